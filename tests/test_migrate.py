"""The two scripts of docs/migrate.md run as they stand there, and so does the one line."""

from __future__ import annotations

import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from parallelkit import spawn_ranks

PAGE = Path(__file__).resolve().parents[1] / "docs" / "migrate.md"
LINE = "context = pk.parallel_context(data=-1)"

pytestmark = pytest.mark.ranks


def scripts() -> tuple[str, str]:
    """The script before, and after."""
    before, after, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return before, after


def run(script: str, folder: Path, *, ranks: int, bare: bool = False) -> dict[int, float]:
    """Losses by epoch, as rank 0 prints them.

    `bare`: torch alone, whose ranks at times abort at the end of Python, when all work is done
    (`parallelkit_torch.letting_go` says why, and spares its users that).
    """
    path = folder / "script.py"
    path.write_text(script)
    with socket.socket() as probe:  # the raw script reads a port from the environment
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}
    argv = [sys.executable, "-W", "error", str(path)]
    results = spawn_ranks(argv, ranks, timeout=300, env=env)
    for result in results:
        if bare and result.returncode == -signal.SIGABRT:
            assert result.stderr == "terminate called without an active exception\n"
            continue
        assert result.returncode == 0, f"rank {result.rank}:\n{result.stderr[-4000:]}"
    found = re.findall(r"^epoch (\d): loss (\d\.\d{5})$", results[0].stdout, re.MULTILINE)
    return {int(epoch): float(loss) for epoch, loss in found}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    losses = run(scripts()[0], tmp_path_factory.mktemp("before"), ranks=2, bare=True)
    assert sorted(losses) == [0, 1, 2]
    assert losses[2] < losses[0]
    return losses


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        (LINE, 2),
        pytest.param("context = pk.parallel_context(data_shard=-1)", 2, marks=pytest.mark.slow),
        ("context = pk.parallel_context(data_shard=-1, tensor=2)", 4),
    ],
)
def test_one_line_spreads_the_script_differently(
    line: str, ranks: int, before: dict[int, float], tmp_path: Path
):
    after = scripts()[1]
    assert after.count(LINE) == 1
    assert line in PAGE.read_text()
    losses = run(after.replace(LINE, line), tmp_path, ranks=ranks)
    assert losses == pytest.approx(before, abs=5e-5)


def test_the_scripts_are_the_same_but_for_what_the_page_says():
    before, after = (script.splitlines() for script in scripts())
    start = before.index("class MLP(nn.Module):")
    stop = next(i for i, line in enumerate(before) if line.startswith("net = "))
    ours = after.index("class MLP(nn.Module):")
    assert after[ours : ours + stop + 1 - start] == before[start : stop + 1]
    calls = [line for line in after if re.search(r"pk\b|context\.|group\.", line)]
    assert len(calls) <= 10
