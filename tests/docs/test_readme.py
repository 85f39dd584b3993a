"""README stays a page that is read to its end."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
LINES, WORDS = 120, 900
HASH = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")


def test_readme_is_short() -> None:
    """What does not fit belongs to a page of docs/."""
    lines, words = README.count("\n"), len(README.split())
    assert lines <= LINES and words <= WORDS, f"{lines} lines of at most {LINES}, {words} words of at most {WORDS}"


def test_readme_names_no_commit() -> None:
    """A hash says nothing to a reader; the record of a measurement has it."""
    assert not HASH.findall(README)
