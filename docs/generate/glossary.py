"""The glossary in docs/architecture.md: the words that toolkit/__init__.py defines."""

from __future__ import annotations

import re

from tables import plain, table

import toolkit

ENTRY = re.compile(r"^(\S+(?: \S+)*) {2,}(.*(?:\n {16}.*)*)", re.MULTILINE)


def block() -> str:
    return table(("word", "meaning"), [(word, plain(" ".join(text.split()))) for word, text in _entries()])


def _entries() -> list[tuple[str, str]]:
    return ENTRY.findall(toolkit.__doc__ or "")
