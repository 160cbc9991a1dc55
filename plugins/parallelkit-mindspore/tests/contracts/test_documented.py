"""The page on Ascend names the test of every contract; those exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[3] / "docs" / "ascend.md"


def test_the_page_names_tests_that_exist() -> None:
    defined = {
        name
        for path in HERE.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    assert len(named) > 8
    assert named <= defined, named - defined
