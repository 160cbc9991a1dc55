"""The demo on MindSpore: its parts, and a run of a tiny model in real processes."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from parallelkit_mindspore.demo.evaluate import generate, likeliest
from parallelkit_mindspore.demo.model import CausalLM, copy_values
from parallelkit_mindspore.demo.text import held_out, load_corpus, windows
from parallelkit_mindspore.names import plain_names

from parallelkit.demo import main as demo
from parallelkit.demo.config import GREEDY, PROMPT, Settings
from parallelkit.specs import DemoSpec

TINY = Settings(
    steps=4, every=2, batch=2, block=16, hidden=64, layers=1, held_out=2, sample=8, timeout=100.0
)


@pytest.fixture(scope="module")
def net() -> CausalLM:
    ms.set_seed(0)
    return CausalLM(TINY.model_config(len(load_corpus().vocabulary)), 128)


def test_parameters_are_those_of_a_qwen2_checkpoint(net: CausalLM) -> None:
    shapes = net.config.shapes()
    assert plain_names(net) == [*shapes, "lm_head.weight"]
    # each has the name of its place, but the embedding, which is in two
    held = {p.name.replace("lm_head.", "model.embed_tokens."): p for p in net.get_parameters()}
    assert {name: tuple(p.shape) for name, p in held.items()} == shapes
    assert net.lm_head.weight is net.model.embed_tokens.weight


def test_values_are_copied_in_place_rounded_to_the_nearest(net: CausalLM) -> None:
    half = CausalLM(net.config, 128, dtype=ms.bfloat16)
    before = [p.data_ptr() for p in half.get_parameters()]
    copy_values(net, half)
    assert [p.data_ptr() for p in half.get_parameters()] == before
    rounded = 0
    for mine, theirs in zip(net.get_parameters(), half.get_parameters(), strict=True):
        values, copied = mine.asnumpy(), theirs.astype(ms.float32).asnumpy()
        np.testing.assert_allclose(copied, values, rtol=2**-8, atol=0, err_msg=mine.name)
        rounded += int((copied != values).sum())
    assert rounded > 1000


def test_windows_are_one_character_apart_and_stay_within_the_text() -> None:
    inputs, targets = windows(np.arange(12), block=5, stride=3)
    assert inputs.tolist() == [[0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [6, 7, 8, 9, 10]]
    assert (targets == inputs + 1).all()
    assert windows(np.arange(5), block=5, stride=3)[0].shape == (0, 5)


def test_the_text_is_what_torch_trains_on() -> None:
    text = pytest.importorskip("parallelkit_torch.demo.text")
    mine, theirs = load_corpus(), text.load_corpus()
    assert mine.vocabulary == theirs.vocabulary
    assert (mine.training == theirs.training.numpy()).all()
    assert (mine.validation == theirs.validation.numpy()).all()
    for one, other in zip(held_out(mine, 16, 3), text.held_out(theirs, 16, 3), strict=True):
        assert (one.asnumpy() == other.numpy()).all()


def test_the_likeliest_tokens_do_not_depend_on_what_follows(net: CausalLM) -> None:
    """They are computed at one width; here at each length of its own."""
    vocabulary = load_corpus().vocabulary
    found = likeliest(net, vocabulary, width=len(PROMPT) + GREEDY)
    assert len(found.tokens) == len(found.margins) == len(found.logprobs) == GREEDY
    text = vocabulary.encode(PROMPT)
    for place in range(3):
        scores = net(ms.Tensor([text], ms.int32)).asnumpy()[0, -1].astype(np.float64)
        shares = np.exp(scores) / np.exp(scores).sum()
        second, first = np.sort(shares)[-2:]
        np.testing.assert_allclose(np.exp(found.logprobs[place]), first, rtol=1e-5)
        np.testing.assert_allclose(np.exp(found.margins[place]), first / second, rtol=1e-5)
        text.append(found.tokens[place])


def test_generation_is_seeded(net: CausalLM) -> None:
    vocabulary = load_corpus().vocabulary
    first, again, other = (
        generate(net, vocabulary, length=6, width=32, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first.startswith(PROMPT)
    assert len(first) == len(PROMPT) + 6


@pytest.mark.ranks
def test_a_cell_follows_a_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report.html"
    code, run = demo.execute(DemoSpec(output=str(output)), "parallelkit_mindspore.demo", TINY)
    shown = capsys.readouterr().out
    assert code == demo.EXIT_GOOD, shown
    assert "bit for bit at every version" in shown
    assert len(run.losses) == TINY.steps
    assert len({version.updated.digest for version in run.versions}) == 3
    assert output.stat().st_size > 1_000_000
