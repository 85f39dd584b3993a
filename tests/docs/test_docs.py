"""README and docs/: commands parse, links and places in the source lead somewhere, the site builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import REPOSITORY, check_command, commands_of

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


@pytest.mark.parametrize("wrong", ["toolkit run recipes/absent.yaml", "toolkit serve --shapes 1", "python tests/no.py"])
def test_a_wrong_command_is_found(wrong: str) -> None:
    """Otherwise the next test would check nothing."""
    with pytest.raises((AssertionError, FileNotFoundError, SystemExit)):
        check_command(next(commands_of(f"```bash\nX=1 {wrong} | tee log\n```\n")))


def test_commands_parse() -> None:
    """A renamed flag or key, or a script that moved, makes the first thing that a reader types fail."""
    for path in PAGES:
        for command in commands_of(path.read_text(encoding="utf-8")):
            try:
                check_command(command)
            except SystemExit as error:
                raise AssertionError(f"{path.name}: {command} does not parse") from error


def test_links_and_places_resolve() -> None:
    """Links where the repository is read as it is, and `path` or `path:name` of its files."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
            assert "://" in target or (path.parent / target).exists(), f"{path.name}: {target} does not exist"
        for file, name in re.findall(r"`((?:toolkit|benchmarks|tests|recipes|examples)/[\w./]+)(?::(\w+))?`", text):
            assert (REPOSITORY / file).exists(), f"{path.name}: {file} does not exist"
            source = (REPOSITORY / file).read_text(encoding="utf-8") if name else ""
            assert not name or re.search(rf"(def|class) {name}\b", source), f"{path.name}: {file} has no {name}"


@pytest.mark.process
def test_the_site_builds(tmp_path: Path) -> None:
    """--strict makes a page that is on no list, and a link or anchor that leads nowhere, an error."""
    pytest.importorskip("material", reason='pip install -e ".[docs]" installs mkdocs-material')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page, text in (("recipe", "train.optimizer.learning_rate"), ("commands", "--draft"), ("python", "top_p")):
        assert text in (tmp_path / f"{page}.html").read_text(encoding="utf-8")
