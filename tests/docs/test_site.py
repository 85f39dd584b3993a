"""The site of docs/ builds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.process
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    """A page that is on no list and a link that leads nowhere are warnings, which --strict makes errors."""
    pytest.importorskip("material", reason='pip install -e ".[docs]" installs mkdocs-material')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "floors.svg").is_file()
