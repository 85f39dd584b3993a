"""Log messages and progress bars on stderr; stdout is for results only."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TextIO

from tqdm import tqdm

REDRAW_S, LINE_S = 0.2, 30.0  # at least so long between two states of a bar, and between two lines in a log file
LINE = "{desc}: {n_fmt}/{total_fmt}{unit}s, {elapsed} min, {rate_fmt}, {remaining} left{postfix}"


def get_logger(name: str) -> logging.Logger:
    """Return a logger that writes `toolkit: message` to stderr. TOOLKIT_LOG sets its level (default info).

    In a group of launched processes, only the first process of each machine logs info; the others log warnings. With
    TOOLKIT_LOG=debug, all processes log everything.
    """
    root = logging.getLogger("toolkit")
    if not root.handlers:
        handler = _Handler()
        handler.setFormatter(
            logging.Formatter("%(levelname)s %(name)s: %(message)s" if wants_debug() else "toolkit: %(message)s")
        )
        root.addHandler(handler)
        quiet = os.environ.get("LOCAL_RANK", "0") != "0" and not wants_debug()
        root.setLevel("WARNING" if quiet else os.environ.get("TOOLKIT_LOG", "info").upper())
        root.propagate = False
    return logging.getLogger(name if name.startswith("toolkit") else f"toolkit.{name}")


def give_up_full_streams() -> None:
    """Drop what stdout and stderr cannot write (a full disk): Python would end with status 120 because of it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def wants_debug() -> bool:
    """Whether TOOLKIT_LOG asks for everything: lines of debugging, and tracebacks."""
    return os.environ.get("TOOLKIT_LOG", "").lower() == "debug"


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to stderr, on a terminal above the bars."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream) if self.stream.isatty() else nullcontext():
            super().emit(record)


class Progress(tqdm):
    """The progress of one task on stderr: a bar on a terminal; elsewhere now and then a line, and one at the end."""

    monitor_interval = 0  # no thread

    def __init__(self, total: int | None, what: str, unit: str, initial: int = 0) -> None:
        """total: units of the whole task, None: not yet known. initial: units that an earlier session finished."""
        bar = sys.stderr.isatty()
        super().__init__(
            total=total, desc=what, unit=f" {unit}", initial=initial, file=sys.stderr, dynamic_ncols=bar, miniters=1,
            mininterval=REDRAW_S if bar else LINE_S, delay=1e-6, bar_format=None if bar else LINE,
        )  # fmt: skip

    @staticmethod
    def status_printer(file: TextIO) -> Callable[[str], object]:
        return tqdm.status_printer(file) if file.isatty() else lambda text: print(text, file=file, flush=True)

    def update(self, count: int = 1, note: str | None = None) -> None:
        """Count finished units. note: a text beside the bar; None keeps the earlier one."""
        if note is not None:
            self.set_postfix_str(note, refresh=False)
        super().update(count)

    def close(self) -> None:
        """Write the final state, unless nothing was done."""
        if self.n > self.initial:
            self.delay = 0
        super().close()


GREEN, YELLOW, UNDERLINE, DIM, END = "\x1b[32m", "\x1b[33m", "\x1b[4m", "\x1b[2m", "\x1b[0m"
# Control characters would let a model move the cursor or retitle the terminal; newline and tab stay.
UNPRINTABLE = {code: "\ufffd" for code in [*range(0x20), *range(0x7F, 0xA0)] if code not in (0x09, 0x0A)}
