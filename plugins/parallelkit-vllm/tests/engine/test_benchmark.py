"""The benchmark of updates runs in its quick form, and its result makes the tables."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[4] / "benchmarks"


@pytest.mark.slow
def test_quick_run(tmp_path):
    output = tmp_path / "vllm.json"
    done = subprocess.run(
        [sys.executable, FOLDER / "bench_vllm.py", "--quick", "--output", output],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(output.read_text())
    rows = {row["arm"]: row for row in result["rows"]}
    assert list(rows) == ["parallelkit", "reload", "bytes"]
    for row in rows.values():
        assert 0 < row["pause ms"] <= row["update ms"]
        assert sum(row["phases ms"].values()) == pytest.approx(row["update ms"], rel=0.5)
    assert rows["parallelkit"]["times slower"] == 1.0
    assert not result["parameters"]["missing"]
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("bench_report", FOLDER / "report.py")
        report = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(report)
        text = report.rewrite("<!-- table vllm -->\n<!-- end vllm -->", {"vllm": result})
    finally:
        sys.path.remove(str(FOLDER))
    assert "| 4MB | 27 | parallelkit |" in text
    assert "| parallelkit | look" in text
    assert "4MB: pause of bytes over ours" in text
