"""Every benchmark runs in its quick form and writes a result that report.py understands."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
KEYS = {
    "benchmark",
    "command",
    "goals",
    "machine",
    "parameters",
    "quick",
    "rows",
    "seconds",
    "started",
}
ROWS = {
    "import": {"module", "wall ms", "booked ms", "of torch", "samples"},
    "hooks": {"way", "plugins", "µs", "of method"},
    "step": {"strategy", "mode", "size", "arm", "ms a step", "ratio", "ratio low", "ratio high"},
    "start": {"arm", "imported s", "group open s", "first step s", "ratio", "import of library ms"},
    "plan": {"ranks", "what", "ms", "low ms", "high ms"},
    "shm": {"size", "kind", "tensors", "nbytes", "verify", "aliased", "update ms", "of memcpy"}
    | {"times pickle", "phases ms"},
    "mindspore_step": {"mode", "size", "arm", "ms a step", "ratio", "ratio low", "of eager"},
    "mindspore_weights": {"size", "kind", "tensors", "nbytes", "verify", "update ms", "of memcpy"}
    | {"times broadcast", "phases ms"},
    "tcp": {"size", "nbytes", "way", "connections", "ms", "GB/s", "CPU s/GB", "of raw"},
    "transfer_plan": {"case", "tensors", "ranks", "plans", "pieces", "buckets", "s", "low s"},
    "placement": {"kind", "tensors", "MB", "arm", "ms", "low ms", "high ms", "times loader"},
    "soak": {"process", "updates", "MB at first", "MB at last", "bytes an update", "error", "rss"}
    | {"descriptors", "threads", "update ms"},
    "vllm": {"size", "tensors", "nbytes", "arm", "update ms", "low ms", "pause ms", "of memcpy"}
    | {"times slower", "times longer pause", "phases ms"},
}


def test_there_is_a_row_of_keys_for_each_benchmark():
    assert {p.stem.removeprefix("bench_") for p in FOLDER.glob("bench_*.py")} == set(ROWS)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", sorted(ROWS))
def test_quick_run(name: str, tmp_path: Path):
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; its own tests run this one")
    result = quick(name, tmp_path)
    assert set(result) == KEYS
    assert result["quick"]
    assert result["benchmark"] == name
    assert {"cpu", "cores", "kernel", "python", "packages"} <= set(result["machine"])
    assert result["rows"]
    for row in result["rows"]:
        assert set(row) >= ROWS[name]
    for goal in result["goals"]:
        assert set(goal) == {"name", "target", "measured", "at_least", "met"}
    if name in ("import", "hooks"):  # counts, not times: they hold on a loaded machine too
        assert all(goal["met"] for goal in result["goals"])


def test_the_tables_of_the_readme_are_those_of_the_results():
    done = subprocess.run([sys.executable, FOLDER / "report.py", "--check"], timeout=60)
    assert done.returncode == 0, "run python benchmarks/report.py"


def test_the_time_of_an_update_is_reported_as_overhead_and_bandwidth_over_several_sizes():
    """Either alone says nothing of another model: a rate depends on how large the tensors were."""
    result = json.loads((FOLDER / "results" / "shm.json").read_text())
    assert len({row["size"] for row in result["rows"]}) >= 3
    assert len({row["tensors"] for row in result["rows"]}) >= 3
    assert result["parameters"]["fits"]
    for fit in result["parameters"]["fits"]:
        assert {"fixed ms", "overhead µs", "bandwidth GB/s", "worst error"} <= set(fit)


def test_the_fit_finds_the_terms_that_times_were_made_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(FOLDER)
    fit = importlib.import_module("bench_shm").fit
    rows = [
        {
            "verify": "off",
            "aliased": True,
            "tensors": tensors,
            "nbytes": nbytes,
            "update ms": 2.0 + tensors * 0.05 + nbytes / 4e6,
        }
        for tensors in (1, 300, 18_000)
        for nbytes in (10**6, 10**8, 10**9)
    ]
    found = fit(rows, "off", True)
    assert found["fixed ms"] == pytest.approx(2.0)
    assert found["overhead µs"] == pytest.approx(50.0)
    assert found["bandwidth GB/s"] == pytest.approx(4.0)


def quick(name: str, folder: Path) -> dict[str, Any]:
    output = folder / f"{name}.json"
    done = subprocess.run(
        [sys.executable, FOLDER / f"bench_{name}.py", "--quick", "--output", output],
        capture_output=True,
        text=True,
        timeout=300 if name == "vllm" else 100,  # an engine starts, in processes of its own
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(output.read_text())
    return found
