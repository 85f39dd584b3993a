"""Write what is generated in docs/ and README.md. With --check: write nothing, and exit 1 if a file differs from it.

A whole page is in PAGES. A block inside a page written by hand is in BLOCKS; it stands on any page, or in README.md,
between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import commands
import drawing
import figure
import glossary
import measurements
import python_api
import readme
import recipe
import server_metrics

DOCS = Path(__file__).resolve().parents[1]
PAGES: dict[str, Callable[[], str]] = {
    "recipe.md": recipe.page,
    "commands.md": commands.page,
    "floors.svg": drawing.page,
    "benchmarks.md": measurements.page,
    "acceptance.svg": figure.svg,
}
BLOCKS: dict[str, Callable[[], str]] = {
    "serve flags": commands.serve_flags,
    "metrics": server_metrics.block,
    "api": python_api.block,
    "glossary": glossary.block,
    "demo": readme.demo,
}
BLOCK = re.compile(r"(<!-- generated: ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def generated() -> dict[Path, str]:
    """The text of every generated file, and of every page with a generated block. Raises KeyError: unknown block;
    ValueError: a block that no page has."""
    lost = set(BLOCKS)
    texts = {DOCS / name: page() for name, page in PAGES.items()}
    for path in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if path not in texts and BLOCK.search(text):
            texts[path] = BLOCK.sub(lambda block: f"{block[1]}\n{BLOCKS[block[2]]()}\n{block[3]}", text)
            lost -= {block[1] for block in BLOCK.findall(text)}
    if lost:
        raise ValueError(f"no page has the block {', '.join(sorted(lost))}")
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python docs/generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    status = 0
    for path, text in generated().items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            name = path.relative_to(DOCS.parent)
            print(f"{name} is not what `python docs/generate` writes; type it and commit the result")
            status = 1
        else:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(DOCS.parent))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
