"""The examples run as their first lines say, and what they promise holds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from parallelkit import spawn_ranks

FOLDER = Path(__file__).resolve().parents[1] / "examples"
SMALL = ("--hidden", "32", "--layers", "2", "--length", "32", "--batch", "8")
#: A curve of the language model is the same under every plan but for rounding.
CLOSE = 2e-4

#: A ResNet whose steps are cheap, and calm enough to compare frameworks by.
CALM = ("--blocks", "1,1,1,1", "--width", 16, "--norm", "group", "--size", 32, "--every", 1)

#: What importing torch's compiler warns of.
TORCHS_OWN = "ignore:`torch.jit.script_method`:DeprecationWarning"

pytestmark = pytest.mark.ranks
needs_mindspore = pytest.mark.skipif(
    importlib.util.find_spec("mindspore") is None, reason="MindSpore is not installed"
)


def run(script: str, *args: object, ranks: int = 1) -> str:
    """Run an example on ranks of this host and return what rank 0 wrote."""
    filters = ["-W", "error", "-W", TORCHS_OWN]
    argv = [sys.executable, *filters, str(FOLDER / script), *map(str, args)]
    results = spawn_ranks(argv, ranks, timeout=300, env={"OMP_NUM_THREADS": "1", "GLOG_v": "3"})
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}:\n{result.stderr[-4000:]}"
    assert not any(result.stdout for result in results[1:]), "ranks other than 0 wrote"
    return results[0].stdout


def curve(output: str) -> dict[str, float]:
    """Losses and norms by step, and the held-out loss."""
    found = {}
    for line in output.splitlines():
        match = re.fullmatch(r"step (\d+): loss ([\d.]+), norm ([\d.]+)", line)
        if match is None:
            continue
        step, loss, norm = match.groups()
        found |= {f"loss {step}": float(loss), f"norm {step}": float(norm)}
    held_out = re.search(r"^held-out text: loss ([\d.]+)", output, re.MULTILINE)
    assert held_out
    return found | {"held out": float(held_out[1])}


@pytest.fixture(scope="module")
def alone() -> dict[str, float]:
    """The curve of six steps of one process."""
    found = curve(run("train_lm.py", *SMALL, "--steps", 6))
    assert len(found) == 13
    assert found["loss 6"] < found["loss 1"]
    return found


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("data=2", "data_shard=2 --auto"),
        ("data_shard=2,tensor=2", "pipeline=2"),
        ("tensor=2,sequence=true", "pipeline=2,data=2"),
    ],
)
def test_every_plan_takes_the_same_steps_and_goes_on_from_another(
    first: str, then: str, alone: dict[str, float], tmp_path: Path
):
    def ranks(context: str) -> int:
        return 2 ** len(re.findall(r"=2\b", context))

    place = tmp_path / "checkpoint"
    options = ("--steps", 3, "--accumulate", 2, "--save", place, "--context", first)
    begun = curve(run("train_lm.py", *SMALL, *options, ranks=ranks(first)))
    options = ("--steps", 6, "--resume", place, "--context", *then.split())
    output = run("train_lm.py", *SMALL, *options, ranks=ranks(then))
    assert ("mode 'auto'" in output) == ("--auto" in then)
    ended = curve(output)
    assert {name.split()[1] for name in begun} - {"out"} == {"1", "2", "3"}
    assert {name.split()[1] for name in ended} - {"out"} == {"4", "5", "6"}
    del begun["held out"]  # after three steps, not six
    for name, value in (begun | ended).items():
        assert value == pytest.approx(alone[name], abs=CLOSE), name


def test_a_batch_that_does_not_divide_is_refused_with_what_would():
    argv = [sys.executable, str(FOLDER / "train_lm.py"), "--batch", "6", "--accumulate", "4"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "--batch 6 is the batch of all ranks" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_graph_takes_the_same_steps(alone: dict[str, float]):
    found = curve(run("train_lm.py", *SMALL, "--steps", 6, "--mode", "graph", ranks=2))
    for name, value in found.items():
        assert value == pytest.approx(alone[name], abs=CLOSE), name


def test_resnet_has_the_names_and_the_size_of_torchvisions():
    code = """
import sys; sys.path.insert(0, sys.argv[1])
from resnet import ResNet50
for name, value in ResNet50().state_dict().items():
    print(name, *value.shape)
"""
    argv = [sys.executable, "-c", code, str(FOLDER)]
    lines = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
    shapes = {line.split()[0]: tuple(map(int, line.split()[1:])) for line in lines.splitlines()}
    assert len(shapes) == 320
    norms = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    expected = {"conv1.weight", "fc.weight", "fc.bias"} | {f"bn1.{key}" for key in norms}
    for stage, blocks in enumerate((3, 4, 6, 3), 1):
        for block in range(blocks):
            at = f"layer{stage}.{block}"
            expected |= {f"{at}.conv{n}.weight" for n in (1, 2, 3)}
            expected |= {f"{at}.bn{n}.{key}" for n in (1, 2, 3) for key in norms}
        expected |= {f"layer{stage}.0.downsample.{key}" for key in ("0.weight",)}
        expected |= {f"layer{stage}.0.downsample.1.{key}" for key in norms}
    assert set(shapes) == expected
    learned = {k: v for k, v in shapes.items() if k.endswith(("weight", "bias"))}
    assert sum(_product(shape) for shape in learned.values()) == 25_557_032
    assert shapes["layer1.0.conv2.weight"] == (64, 64, 3, 3)
    assert shapes["layer4.0.downsample.0.weight"] == (2048, 1024, 1, 1)
    assert shapes["fc.weight"] == (1000, 2048)


RESNET = ("--size", 32, "--batch", 8, "--every", 1, "--seed", 3)


def test_resnet_on_digits_counts_each_image_once(tmp_path: Path):
    output = run("train_resnet.py", *RESNET, "--steps", 1, "--save", tmp_path / "it", ranks=2)
    # an odd number of images on two ranks
    assert re.search(r"accuracy 0\.\d+ of 359 images", output), output
    assert (tmp_path / "it").is_dir()


@pytest.mark.slow
def test_resnet_on_digits_goes_on_where_it_was(tmp_path: Path):
    place = tmp_path / "checkpoint"
    whole = run("train_resnet.py", *RESNET, "--steps", 3, ranks=2)
    begun = run("train_resnet.py", *RESNET, "--steps", 2, "--save", place, ranks=2)
    ended = run("train_resnet.py", *RESNET, "--steps", 3, "--resume", place, ranks=2)

    def steps(output: str) -> list[str]:
        lines = [line for line in output.splitlines() if line.startswith("  step")]
        return [line.strip() for line in lines if ": loss" in line]  # others are of explain()

    assert len(steps(whole)) == 3
    assert steps(begun) + steps(ended) == steps(whole)


def test_resnet_on_a_folder_of_images(tmp_path: Path):
    from PIL import Image

    for name, colour in (("cats", (200, 30, 30)), ("dogs", (30, 30, 200))):
        (tmp_path / name).mkdir()
        for number in range(8):
            size = (40 + number, 48)
            Image.new("RGB", size, colour).save(tmp_path / name / f"{number}.png")
    output = run("train_resnet.py", "--data", tmp_path, "--size", 32, "--batch", 4, "--epochs", 1)
    assert re.search(r"epoch 0, step 3: .* of 3 images", output), output


def test_the_resnet_example_takes_fourteen_lines_of_parallelkit():
    lines = (FOLDER / "train_resnet.py").read_text().splitlines()
    ours = [x for x in lines if re.search(r"import parallelkit|pk\.[a-z]|context\.\w+\(", x)]
    assert len(ours) == 14, ours  # of both frameworks


@needs_mindspore
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_resnet_takes_the_same_steps_in_both_frameworks(ranks: int, tmp_path: Path):
    """By parallelkit's loop in both, and by MindSpore's own `Model`, from torch's weights."""
    first, second = tmp_path / "first", tmp_path / "second"
    mindspore = ("--framework", "mindspore", "--take")
    runs = (
        ("--give", first),
        (*mindspore, first, "--give", second),
        (*mindspore, second, "--api", "model", "--sink", "--mode", "graph"),
    )

    def start(options: tuple[object, ...]) -> str:
        return run("train_resnet.py", *CALM, "--steps", 20, *options, ranks=ranks)

    with ThreadPoolExecutor(len(runs)) as pool:
        outputs = list(pool.map(start, runs))
    torch_s, *others = [
        [float(loss) for loss in re.findall(r"^  step \d+: loss ([\d.]+)$", output, re.MULTILINE)]
        for output in outputs
    ]
    assert len(torch_s) == 20
    assert len(set(torch_s)) == 20
    for losses in others:
        assert losses == pytest.approx(torch_s, abs=1e-3)
    for output in outputs[1:]:
        kind = "data" if ranks > 1 else "standalone"
        assert f"mode 'auto', effective '{kind}'" in output
        assert "MindSpore compiles modes 'semi_auto' and 'auto' for Ascend and GPU only" in output


def test_the_model_api_is_mindspore_s():
    argv = [sys.executable, str(FOLDER / "train_resnet.py"), "--api", "model"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "--api model is MindSpore's" in done.stderr


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
