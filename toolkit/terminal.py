"""Escape sequences and control characters of a terminal."""

from __future__ import annotations

GREEN, YELLOW, UNDERLINE, DIM, END = "\x1b[32m", "\x1b[33m", "\x1b[4m", "\x1b[2m", "\x1b[0m"
# Control characters would let a model move the cursor or retitle the terminal; newline and tab stay.
UNPRINTABLE = {code: "\ufffd" for code in [*range(0x20), *range(0x7F, 0xA0)] if code not in (0x09, 0x0A)}
