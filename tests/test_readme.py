"""The README's scripts, as they stand there, run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


@pytest.mark.ranks
def test_the_publisher_and_the_subscriber_of_the_readme(tmp_path):
    _, train, follow = blocks(ROOT / "README.md")
    assert "publish_weights" in train
    assert "subscribe_weights" in follow
    for script in (train, follow):
        ours = [line for line in script.splitlines() if "pk." in line or "follower" in line]
        assert len(ours) <= 10
    (tmp_path / "train.py").write_text(train)
    (tmp_path / "follow.py").write_text(follow)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, tmp_path / "train.py"], stdout=pipe, stderr=pipe, text=True
    ) as trainer:
        try:
            assert trainer.stdout is not None
            ticket = trainer.stdout.readline()
            follower = subprocess.run(
                [sys.executable, tmp_path / "follow.py"],
                input=ticket,
                capture_output=True,
                text=True,
                timeout=60,
            )
            output, errors = trainer.communicate(timeout=60)
        finally:
            trainer.kill()
    assert follower.returncode == 0, follower.stderr
    assert trainer.returncode == 0, errors
    assert output.count("verified: every byte") == 3
    lines = follower.stdout.replace("ticket: ", "").splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert errors == follower.stderr == ""


def test_both_readmes_name_the_two_commands():
    for name in ("README.md", "README.zh-CN.md"):
        text = (ROOT / name).read_text()
        assert "make demo" in text
        assert "make test" in text


def test_links_between_documents_lead_somewhere():
    for document in [ROOT / "README.md", ROOT / "README.zh-CN.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"
