"""Names are Torch's, whatever wraps the model, and no state of training is among them."""

from __future__ import annotations

from collections.abc import Iterator

import mindspore as ms
import pytest
import torch
from mindspore import mint, nn
from mindspore.train.amp import auto_mixed_precision
from parallelkit_mindspore import names

from parallelkit.errors import ManifestError


class Net(nn.Cell):
    """Parts that have the names of wrappers' attributes, and really are called so."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Dense(2, 3)
        self._backbone = nn.BatchNorm1d(3)
        self.scale = ms.Parameter(ms.Tensor(1.0), name="scale", requires_grad=False)
        self.register_buffer("kept", ms.Tensor([1.0]))
        self.register_buffer("lost", ms.Tensor([1.0]), persistent=False)


NET = [
    "scale",
    "kept",
    "network.weight",
    "network.bias",
    "_backbone.running_mean",
    "_backbone.running_var",
    "_backbone.weight",
    "_backbone.bias",
    "_backbone.num_batches_tracked",
]


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    before = dict(names._registered)
    yield
    names._registered.clear()
    names._registered.update(before)


def torch_names(module: torch.nn.Module) -> list[str]:
    return sorted(module.state_dict())


def test_parts_called_like_wrappers_keep_their_names() -> None:
    assert names.plain_names(Net()) == NET


@pytest.mark.parametrize(
    ("cell", "module"),
    [
        (nn.Dense(2, 3), torch.nn.Linear(2, 3)),
        (nn.Conv2d(2, 3, 3, has_bias=True), torch.nn.Conv2d(2, 3, 3)),
        (nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)),
        (nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)),
        (nn.BatchNorm3d(3), torch.nn.BatchNorm3d(3)),
        (
            nn.InstanceNorm2d(3),
            torch.nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        ),
        (nn.LayerNorm((4,)), torch.nn.LayerNorm(4)),
        (nn.GroupNorm(2, 4), torch.nn.GroupNorm(2, 4)),
        (nn.Embedding(5, 4), torch.nn.Embedding(5, 4)),
        (nn.PReLU(3), torch.nn.PReLU(3)),
        (nn.LSTM(4, 5, 2, bidirectional=True), torch.nn.LSTM(4, 5, 2, bidirectional=True)),
        (nn.GRU(4, 5), torch.nn.GRU(4, 5)),
        (nn.MultiheadAttention(4, 2), torch.nn.MultiheadAttention(4, 2)),
        (mint.nn.Linear(2, 3), torch.nn.Linear(2, 3)),
        (mint.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)),
        (mint.nn.LayerNorm(4), torch.nn.LayerNorm(4)),
        (mint.nn.Embedding(5, 4), torch.nn.Embedding(5, 4)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_have_torch_s_names_and_shapes(cell: nn.Cell, module: torch.nn.Module) -> None:
    found = {slot.name: tuple(slot.tensor.shape) for slot in names.slots(cell)}
    assert found == {name: tuple(t.shape) for name, t in module.state_dict().items()}


def wrapped() -> dict[str, object]:
    net = Net()
    optimizer = nn.Adam(net.trainable_params())
    losses = nn.WithLossCell(net, nn.MSELoss())
    step = nn.TrainOneStepCell(losses, optimizer)
    return {
        "loss": losses,
        "step": step,
        "step in a step": nn.TrainOneStepCell(step, optimizer),
        "scaled": nn.TrainOneStepWithLossScaleCell(losses, optimizer, ms.Tensor(2.0)),
        "evaluation": nn.WithEvalCell(net, nn.MSELoss()),
        "gradient": nn.ForwardValueAndGrad(losses, net.trainable_params()),
        "model": ms.Model(net, nn.MSELoss(), optimizer),
    }


@pytest.mark.parametrize("kind", wrapped())
def test_wrappers_are_taken_off(kind: str) -> None:
    assert names.plain_names(wrapped()[kind]) == NET


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_mixed_precision_changes_no_name(level: str) -> None:
    net = nn.SequentialCell(nn.Dense(2, 2), nn.BatchNorm1d(2), nn.LayerNorm((2,)))
    before = names.plain_names(net)
    assert names.plain_names(auto_mixed_precision(net, level)) == before
    step = ms.amp.build_train_network(
        net,
        nn.SGD(net.trainable_params()),
        nn.MSELoss(),
        level=level,
        loss_scale_manager=ms.FixedLossScaleManager(drop_overflow_update=False),
    )
    assert names.plain_names(step) == before


class Step(nn.Cell):
    """A step of the user's own: its parts are attributes that the user named."""

    def __init__(self, net: nn.Cell, optimizer: nn.Cell) -> None:
        super().__init__()
        self.network = net
        self.optimizer = optimizer
        self.weights = optimizer.parameters
        self.schedule = nn.CosineDecayLR(0.1, 1.0, 3)
        self.temperature = ms.Parameter(ms.Tensor(1.0), name="temperature")


@pytest.mark.parametrize("kind", [nn.Adam, nn.Momentum, mint.optim.AdamW])
def test_state_of_training_in_a_user_s_step_is_left_out(kind: type) -> None:
    net = nn.Dense(2, 2)
    options = {"learning_rate": 0.1, "momentum": 0.9} if kind is nn.Momentum else {}
    step = Step(net, kind(net.trainable_params(), **options))
    assert sorted(names.plain_names(step)) == ["network.bias", "network.weight", "temperature"]


def test_a_tuple_of_parameters_that_no_part_owns_is_kept() -> None:
    class Tuple(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            items = [ms.Parameter(ms.Tensor([1.0]), name=f"item{i}") for i in range(2)]
            self.items = ms.ParameterTuple(items)

    assert names.plain_names(Tuple()) == ["item0", "item1"]


def test_a_part_that_is_there_twice_has_both_names() -> None:
    shared = nn.Dense(2, 2)
    found = names.plain_names(nn.SequentialCell([shared, shared]))
    assert found == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_the_count_of_batches_is_one_for_each_layer_and_lasts() -> None:
    a, b = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
    first, second = (names.slots(cell)[-1].tensor for cell in (a, b))
    assert first is not second
    assert names.slots(a)[-1].tensor is first
    assert (first.shape, str(first.dtype)) == ((), "Int64")


# --- register_names ----------------------------------------------------------------------------


class RMSNorm(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = ms.Parameter(mint.ones(4), name="gamma")
        self.weight = ms.Parameter(mint.ones(4), name="weight")


class Derived(RMSNorm):
    pass


def test_nothing_is_guessed_from_an_attribute_s_name() -> None:
    assert names.plain_names(RMSNorm()) == ["gamma", "weight"]


def test_registered_names_hold_for_derived_types_and_the_nearest_decides() -> None:
    names.register_names(RMSNorm, {"gamma": "scale", "weight": "inner.weight"})
    names.register_names(RMSNorm, {"gamma": "scale", "weight": "inner.weight"})  # the same: fine
    assert names.plain_names(nn.SequentialCell(Derived())) == ["0.scale", "0.inner.weight"]
    names.register_names(Derived, {"gamma": "g"})
    assert names.plain_names(Derived()) == ["g", "weight"]
    assert names.plain_names(RMSNorm()) == ["scale", "inner.weight"]


def test_registered_names_replace_what_is_built_in() -> None:
    names.register_names(nn.LayerNorm, {"gamma": "g"})
    assert names.plain_names(nn.LayerNorm((4,))) == ["g", "beta"]


def test_a_collision_names_both_places() -> None:
    names.register_names(RMSNorm, {"gamma": "weight"})
    with pytest.raises(ManifestError, match=r"0\.gamma and 0\.weight would both .* '0\.weight'"):
        names.slots(nn.SequentialCell(RMSNorm()))


@pytest.mark.parametrize(
    ("kind", "mapping", "said"),
    [
        (torch.nn.Linear, {}, "subclass of mindspore.nn.Cell"),
        ("Dense", {}, "got 'Dense'"),
        (RMSNorm, {"gamma": ""}, "names that are not empty"),
        (RMSNorm, {"gamma": "."}, "names that are not empty"),
        (RMSNorm, {"gamma": 3}, "'gamma': 3"),
        (RMSNorm, {"gamma": "w", "weight": "w"}, "gamma and weight of RMSNorm the same name, 'w'"),
    ],
)
def test_bad_registrations(kind: type, mapping: dict[str, str], said: str) -> None:
    with pytest.raises(ManifestError, match=said):
        names.register_names(kind, mapping)


def test_a_second_registration_that_differs_is_refused() -> None:
    names.register_names(RMSNorm, {"gamma": "a"})
    with pytest.raises(ManifestError, match=r"registered already with \{'gamma': 'a'\}"):
        names.register_names(RMSNorm, {"gamma": "b"})
