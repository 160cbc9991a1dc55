"""Packed layers are seen by what they compute."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from parallelkit_vllm import live
from torch import nn
from torch.nn.functional import linear


def packed(*, remove=True, width=64, seed=0):
    """A layer whose weight is in its product only, as vLLM leaves it on the CPU."""
    layer = nn.Linear(width, 32, bias=False, dtype=torch.bfloat16)
    torch.manual_seed(seed)
    nn.init.normal_(layer.weight, std=0.1)
    layer.input_size_per_partition = width
    repack(layer, remove=remove)
    return layer


def repack(layer, values=None, *, remove=True):
    inside = (layer.weight if values is None else values).detach().clone()
    layer.cpu_linear = lambda x, weight, bias: linear(x, inside, bias)
    layer.inside = inside
    if remove:
        layer.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)


def model(*layers):
    return nn.Sequential(nn.LayerNorm(64), *layers)


def test_two_looks_are_alike():
    one = model(packed())
    assert live.look(one) == live.look(one)
    assert not live.look(one).zero


@pytest.mark.parametrize("remove", [True, False])
def test_a_packed_layer_that_changed_is_seen(remove):
    """Also where a parameter is left behind that is not used any more."""
    one = model(packed(remove=remove))
    before = live.look(one)
    ((name, digest),) = [(n, d) for n, d in before.digests.items() if "product" in n]
    # less than the smallest step of training: one unit in the last place of one weight in eight
    values = one[1].inside.clone()
    values.view(torch.int16)[:, ::8] += 1
    repack(one[1], values, remove=remove)
    after = live.look(one)
    assert after.digests[name] != digest
    assert {n for n in after.digests if after.digests[n] != before.digests[n]} == {name}


def test_a_parameter_that_changed_by_one_bit_is_seen():
    one = model(packed())
    before = live.look(one)
    with torch.no_grad():
        one[0].bias.view(torch.int32)[63] += 1
    assert live.look(one) != before


def test_zero_is_zero_in_packed_layers_and_others():
    one = model(packed())
    with torch.no_grad():
        one[0].weight.zero_()
        one[0].bias.zero_()
    assert not live.look(one).zero
    repack(one[1], torch.zeros(32, 64, dtype=torch.bfloat16))
    assert live.look(one).zero
    with torch.no_grad():
        one[0].bias[3] = 1e-30
    assert not live.look(one).zero


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "bool", "complex64", "float64"])
def test_parameters_of_any_dtype(dtype):
    one = nn.Module()
    one.p = nn.Parameter(torch.zeros(4, 2).to(getattr(torch, dtype)), requires_grad=False)
    before = live.look(one)
    assert before.zero
    one.p = nn.Parameter(torch.ones(4, 2).to(getattr(torch, dtype)), requires_grad=False)
    assert live.look(one).digests != before.digests
    assert not live.look(one).zero


def test_what_can_be_read_in_no_way_is_named():
    one = model(packed())
    del one[1].cpu_linear
    assert live.look(one).unseen == ("1",)
    assert live.look(model()).unseen == ()


def test_a_model_without_weights_is_not_zero():
    assert not live.look(nn.Sequential(nn.ReLU())).zero


def test_bytes_are_row_major():
    x = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    assert bytes(live.as_bytes(x.t())) == x.t().contiguous().numpy().tobytes()
    assert bytes(live.as_bytes(torch.empty(0, 4))) == b""
    assert bytes(live.as_bytes(torch.tensor(1, dtype=torch.uint8))) == b"\1"
    assert live.digest(x) != live.digest(x.reshape(3, 2))
