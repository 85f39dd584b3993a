"""What mkdocs generates as it builds the site (`hooks` in mkdocs.yml): whole pages, and blocks in hand-written pages,
each in the place of a line `<!-- generated: NAME -->`."""

from __future__ import annotations

import re
from typing import Any

import commands
import python_api
import recipe
from mkdocs.structure.files import File
from tables import code, plain, table

import toolkit
from toolkit.infer.server.metrics import PREFIX, SERIES

WORD = re.compile(r"^(\S+(?: \S+)*) {2,}(.*(?:\n {16}.*)*)", re.MULTILINE)
BLOCK = re.compile(r"^<!-- generated: (.+?) -->$", re.MULTILINE)


def glossary() -> str:
    """The words that toolkit/__init__.py defines."""
    entries = WORD.findall(toolkit.__doc__ or "")
    return table(("word", "meaning"), [(word, plain(" ".join(text.split()))) for word, text in entries])


def metrics() -> str:
    """The metrics of the server."""
    rows = []
    for name, one in SERIES.items():
        label = f"{{{one.label}}}" if one.label else ""
        rows.append((code(f"{PREFIX}{name}{label}"), one.kind, plain(one.text)))
    return table(("metric", "kind", "meaning"), rows)


PAGES = {"commands.md": commands.page, "recipe.md": recipe.page}
BLOCKS = {"api": python_api.block, "glossary": glossary, "metrics": metrics}


def on_files(files: Any, config: Any) -> None:
    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page()))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Raises KeyError for an unknown block."""
    return BLOCK.sub(lambda line: BLOCKS[line[1]](), markdown)
