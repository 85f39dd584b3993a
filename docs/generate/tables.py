"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. Cells hold Markdown without vertical bars, which Markdown readers treat differently in code."""
    lines = [header, ["---"] * len(header), *rows]
    assert not any("|" in cell for line in lines for cell in line), "a cell has a vertical bar"
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(text: str) -> str:
    """Inline code; nothing for an empty text."""
    return f"`{text}`" if text else ""


def plain(text: str) -> str:
    """Text of the program as Markdown: what looks like a tag is text."""
    return text.replace("<", "&lt;")
