"""The demo: its parts as pure functions, and whole runs of a tiny model in real processes."""

from __future__ import annotations

import html.parser
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from parallelkit_torch.demo.evaluate import evaluate, generate
from parallelkit_torch.demo.model import CausalLM
from parallelkit_torch.demo.text import Windows, held_out, load_corpus

from parallelkit.demo import main as demo
from parallelkit.demo.children import Children, DemoProcessError
from parallelkit.demo.config import PROMPT, DemoSettingsError, Settings
from parallelkit.demo.digest import digest
from parallelkit.demo.events import Followed, Started, Step, Updated, read
from parallelkit.demo.record import Run
from parallelkit.demo.report import render
from parallelkit.specs import DemoSpec
from parallelkit.weights.report import MemberReport, TransferReport

PACKAGE = "parallelkit_torch.demo"
TINY = Settings(
    steps=4, every=2, batch=2, block=16, hidden=64, layers=1, held_out=2, sample=8, timeout=30.0
)


@pytest.fixture
def net() -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(TINY.model_config(11)).eval()


def test_parameters_are_named_as_in_a_qwen2_checkpoint(net: CausalLM) -> None:
    layer = "model.layers.0."
    attention = [f"self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")] + [
        "self_attn.o_proj.weight"
    ]
    mlp = [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    norms = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    assert list(net.state_dict()) == [
        "model.embed_tokens.weight",
        *(layer + name for name in attention + mlp + norms),
        "model.norm.weight",
        "lm_head.weight",
    ]
    assert net.lm_head.weight is net.model.embed_tokens.weight


def test_model_sees_no_later_token_but_every_earlier_one(net: CausalLM) -> None:
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 10
    with torch.no_grad():
        before, after = net(tokens)[0], net(changed)[0]
    assert torch.equal(before[:5], after[:5])
    assert all(not torch.equal(before[i], after[i]) for i in (5, 6, 7))


def test_model_tells_positions_apart(net: CausalLM) -> None:
    with torch.no_grad():
        one, other = net(torch.tensor([[1, 2, 3]]))[0, -1], net(torch.tensor([[2, 1, 3]]))[0, -1]
    assert not torch.allclose(one, other)


def test_generation_is_seeded() -> None:
    vocabulary = load_corpus().vocabulary
    torch.manual_seed(0)
    model = CausalLM(TINY.model_config(len(vocabulary)))
    first, again, other = (
        generate(model, vocabulary, length=12, block=16, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first.startswith(PROMPT)
    assert len(first) == len(PROMPT) + 12


def test_corpus_is_encoded_and_split() -> None:
    corpus = load_corpus()
    assert len(corpus.training) > 300_000
    assert 0.04 < len(corpus.validation) / len(corpus.training) < 0.06
    assert corpus.vocabulary.characters.isascii()
    text = 'The "for" statement'
    assert corpus.vocabulary.decode(corpus.vocabulary.encode(text)) == text
    inputs, targets = held_out(corpus, 16, 3)
    assert inputs.shape == targets.shape == (3, 16)


@pytest.mark.parametrize(("length", "windows"), [(5, 0), (6, 1), (8, 1), (9, 2), (11, 2), (12, 3)])
def test_windows_stay_within_the_text(length: int, windows: int) -> None:
    dataset = Windows(torch.arange(length), block=5, stride=3)
    assert len(dataset) == windows
    for index in range(windows):
        inputs, targets = dataset[index]
        assert inputs.tolist() == list(range(index * 3, index * 3 + 5))
        assert torch.equal(targets, inputs + 1)
    with pytest.raises(IndexError):
        dataset[windows]


def test_settings_travel_and_are_checked() -> None:
    assert Settings.from_json(TINY.to_json()) == TINY
    assert TINY.update_steps == [0, 2, 4]
    assert Settings(steps=5, every=2).update_steps == [0, 2, 4, 5]
    assert Settings(steps=5, every=9).update_steps == [0, 5]
    for wrong in ({"steps": 0}, {"every": 0}, {"ranks": -1}, {"seed": -1}):
        with pytest.raises(DemoSettingsError, match=next(iter(wrong))):
            Settings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("line", [b"", b"hello\n", b'{"type": "Nonsense"}', b"\xff\xfe", b"[1]"])
def test_lines_that_are_no_events_are_passed_over(line: bytes) -> None:
    assert read(line) is None


def test_evaluation_gives_the_bytes_of_the_logits(net: CausalLM) -> None:
    batch = torch.ones(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)
    logits, loss = evaluate(net, batch)
    assert len(logits) == 2 * 4 * 11 * 4
    assert loss > 0
    assert digest(logits) == digest(evaluate(net, batch)[0])


def make_run(*, theirs: np.ndarray[Any, Any] | None = None, sample: str = "text") -> Run:
    """Make the record of a run; `theirs` are the follower's last logits."""
    run = Run(settings=TINY, seconds=3.0)
    run.add(Started(parameters=10, characters=20, explanation="mode 'data'"))
    mine = np.arange(4, dtype=np.float32)
    for number, step in enumerate(TINY.update_steps, 1):
        last = step == TINY.steps
        here = mine.tobytes() if last else b""
        there = here if theirs is None or not last else theirs.tobytes()
        report = TransferReport(
            version=number,
            nbytes=1000,
            tensors=3,
            transport="shm",
            verify="digest",
            verified="every byte",
            phases={"begin": 0.001, "commit": 0.002},
            started_at=0.0,
            members=(MemberReport(name="follower", state="committed", version=number),),
            changed_ratio=0.5,
        )
        assert run.add(Followed(number, sample, digest(there), there)) is None
        updated = Updated(step, number, report.to_dict(), 4.0 - number, digest(here), here)
        assert run.add(updated) is run.versions[-1]
        run.add(Step(step + 1, 3.0))
    return run


def test_equal_runs_are_good() -> None:
    run = make_run()
    assert run.complete
    assert run.equal
    assert "bit for bit" in run.verdict


def test_one_different_bit_is_bad() -> None:
    theirs = np.arange(4, dtype=np.float32)
    theirs[2] = np.nextafter(theirs[2], np.float32(9))
    run = make_run(theirs=theirs)
    assert run.complete
    assert not run.equal
    assert "at version 3" in run.verdict
    assert "2.38e-07" in run.verdict


def test_missing_versions_are_bad() -> None:
    run = make_run()
    run.versions.pop()
    assert not run.equal
    assert "2 of 3" in run.verdict


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "action")]


def test_report_needs_nothing_else_and_escapes_what_it_shows() -> None:
    text = render(make_run(sample="<script>alert(1)</script><img src=x>"))
    links = _Links()
    links.feed(text)
    assert links.found == []
    assert "link" not in links.tags
    assert "img" not in links.tags
    assert "&lt;script&gt;alert(1)" in text
    assert "@import" not in text.split("<script", 1)[0]
    assert "url(" not in text.split("<script", 1)[0]
    assert text.count("<article>") == 3
    assert len(text) < 8_000_000


def test_report_of_an_incomplete_run_says_so() -> None:
    text = render(Run(settings=TINY))
    assert "Incomplete: 0 of 3" in text


def test_a_report_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    for output in (tmp_path, tmp_path / "none" / "report.html"):
        with pytest.raises(DemoSettingsError, match="output"):
            demo.run(DemoSpec(output=str(output)), PACKAGE, TINY)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.ranks
class TestChildren:
    def test_a_failure_is_named_with_its_last_lines(self) -> None:
        with Children(20.0) as children:
            children.start("lasting", python("input()"), os.environ)
            children.start("failing", python("raise SystemExit('what went wrong')"), os.environ)
            with pytest.raises(DemoProcessError) as caught:
                list(children.events())
        assert "failing: exit status 1\n  | what went wrong" in str(caught.value)
        assert "lasting" not in str(caught.value)

    def test_a_signal_is_named(self) -> None:
        with Children(20.0) as children:
            code = "import os; os.kill(os.getpid(), 9)"
            children.start("killed", python(code), os.environ)
            with pytest.raises(DemoProcessError, match="killed: killed by SIGKILL"):
                list(children.events())

    def test_what_a_process_leaves_running_ends_with_it(self) -> None:
        code = """if True:
            import subprocess, sys
            from parallelkit.demo.events import Step, say
            away = {"stdout": sys.stderr, "stdin": subprocess.DEVNULL}
            left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], **away)
            say(Step(left.pid, 0.0))
        """
        with Children(30.0) as children:
            children.start("careless", python(code), os.environ)
            (event,) = children.events()
            assert isinstance(event, Step)
            deadline = time.monotonic() + 5
            while alive(event.step):
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def test_silence_ends(self) -> None:
        with Children(0.5) as children:
            children.start("silent", python("input()"), os.environ)
            with pytest.raises(DemoProcessError, match="no word for 0.5 s from: silent"):
                list(children.events())

    def test_events_arrive_and_other_lines_do_not(self) -> None:
        code = """if True:
            from parallelkit.demo.events import Step, say
            print("hello", flush=True)
            say(Step(int(input()), 2.5))
        """
        with Children(30.0) as children:
            children.start("talking", python(code), os.environ)
            children.tell("talking", "7")
            assert list(children.events()) == [Step(7, 2.5)]
        assert not children.folder.exists()


@pytest.mark.ranks
def test_same_seed_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report.html"
    code, first = demo.execute(DemoSpec(output=str(output)), PACKAGE, TINY)
    shown = capsys.readouterr().out
    assert code == demo.EXIT_GOOD, shown
    assert f"report: {output}" in "".join(shown.splitlines())
    assert "version 3 after 4 steps" in shown
    assert "bit for bit at every version" in shown
    assert output.stat().st_size > 1_000_000

    code, again = demo.execute(DemoSpec(output=str(output)), PACKAGE, TINY)
    assert code == demo.EXIT_GOOD
    assert again.losses == first.losses
    assert len(first.losses) == TINY.steps
    for one, other in zip(first.versions, again.versions, strict=True):
        assert one.updated.digest == other.updated.digest
        assert one.updated.validation == other.updated.validation
        assert one.followed == other.followed
    digests = {version.updated.digest for version in first.versions}
    assert len(digests) == len(first.versions)  # every version was another one


@pytest.mark.ranks
@pytest.mark.slow
def test_another_seed_another_run_in_a_world_of_one(tmp_path: Path) -> None:
    spec = DemoSpec(output=str(tmp_path / "report.html"))
    runs = [demo.execute(spec, PACKAGE, attrs.evolve(TINY, ranks=1, seed=seed)) for seed in (1, 2)]
    assert [code for code, _ in runs] == [demo.EXIT_GOOD] * 2
    assert runs[0][1].losses != runs[1][1].losses


@pytest.mark.ranks
def test_a_follower_that_fails_ends_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = demo._command

    def failing(package: str, module: str, argument: str) -> list[str]:
        code = "raise SystemExit('out of ink')"
        return python(code) if module == "follower" else command(package, module, argument)

    monkeypatch.setattr(demo, "_command", failing)
    output = tmp_path / "report.html"
    assert demo.run(DemoSpec(output=str(output)), PACKAGE, TINY) == demo.EXIT_FAILED
    shown = capsys.readouterr().out
    assert "follower: exit status 1" in shown
    assert "out of ink" in shown
    assert not output.exists()


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_of_the_demo_is_the_end_of_its_processes(tmp_path: Path, number: int) -> None:
    argv = [
        "demo",
        "--engine",
        "module",
        "--framework",
        "torch",
        "--output",
        str(tmp_path / "report.html"),
    ]
    code = f"import sys; from parallelkit.cli.main import main; sys.exit(main({argv}))"
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            python(code),
            env=os.environ | {"TMPDIR": str(tmp_path)},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 60
        while len(pids := children_of(process.pid)) < 3:
            assert process.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(20) == (130 if number == signal.SIGINT else -number)
        while left := [pid for pid in pids if alive(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
