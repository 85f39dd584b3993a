"""What is generated in docs/ is what the code says now."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

GENERATE = Path(__file__).resolve().parents[2] / "docs" / "generate"


def test_generated_pages_are_up_to_date(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A reference that the parsers, recipes and docstrings have left behind misleads; so does one edited by hand."""
    monkeypatch.setattr(sys, "argv", ["docs/generate", "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(GENERATE), run_name="__main__")
    assert ended.value.code == 0, capsys.readouterr().out
