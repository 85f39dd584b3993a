"""The pages: what is generated is what the code says now, and links lead somewhere."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as the site and as GitHub make them where the two agree."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", one) for one in words} & {re.sub(r"\s", "-", one) for one in words}


def lost_links(path: Path) -> list[str]:
    """Links of a page to a file or heading that is not there. The site has no files outside of docs/."""
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", path.read_text(encoding="utf-8"))):
        name, _, anchor = target.partition("#")
        other = (path.parent / name).resolve() if name else path
        if re.match(r"https?://|mailto:", target):
            continue
        there = other.exists() and (path.parent != DOCS or other.parent == DOCS)
        if not there or (anchor and anchor not in anchors(other)):
            lost.append(f"{path.name}: {target}")
    return lost


def test_pages_are_generated_and_links_resolve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reference that parsers, recipes, docstrings or records have left behind misleads; a page takes links along."""
    monkeypatch.setattr(sys, "argv", ["docs/generate", "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(DOCS / "generate"), run_name="__main__")
    assert ended.value.code == 0, capsys.readouterr().out
    assert not [lost for path in (REPOSITORY / "README.md", *DOCS.glob("*.md")) for lost in lost_links(path)]
