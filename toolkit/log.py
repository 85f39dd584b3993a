"""Log messages and progress bars on stderr; stdout is for results only."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import ClassVar, TextIO

REDRAW_S, LINE_S = 0.2, 30.0  # at least so long between two states of a bar, and between two lines in a log file
ESTIMATE_SHARE = 0.05
BAR_WIDTH = 24


def get_logger(name: str) -> logging.Logger:
    """Return a logger that writes `toolkit: message` to stderr. TOOLKIT_LOG sets its level (default info).

    In a group of launched processes, only the first process of each machine logs info; the others log warnings. With
    TOOLKIT_LOG=debug, all processes log everything.
    """
    root = logging.getLogger("toolkit")
    if not root.handlers:
        handler = _Handler()
        handler.setFormatter(
            logging.Formatter("%(levelname)s %(name)s: %(message)s" if _debug() else "toolkit: %(message)s")
        )
        root.addHandler(handler)
        quiet = os.environ.get("LOCAL_RANK", "0") != "0" and not _debug()
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


def _debug() -> bool:
    return os.environ.get("TOOLKIT_LOG", "").lower() == "debug"


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to stderr. A bar on the terminal's line is removed first; its next update draws it again."""

    def emit(self, record: logging.LogRecord) -> None:
        if Progress.drawn is not None:
            Progress.drawn.remove()
        super().emit(record)


class Progress:
    """The progress of one task on stderr: a bar on a terminal; elsewhere now and then a line, and one at the end.

    An estimate of the time left is shown from the moment where it is roughly right: 5 % of the work was done after the
    first finished units, and took at least as long as these did. The first units pay for what happens once (loading,
    compiling), and where several units run at a time, the short ones finish first. So they count for no rate.
    """

    drawn: ClassVar[Progress | None] = None  # the bar on the terminal's current line

    def __init__(
        self,
        total: int | None,
        what: str,
        unit: str,
        initial: int = 0,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """total: units of the whole task, None: not yet known. initial: units that an earlier session finished."""
        self.total, self.done = total, initial
        self._what, self._unit, self._note = what, unit, ""
        self._stream, self._clock = stream or sys.stderr, clock
        self._bar = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._started = self._shown_at = clock()
        self._first: tuple[int, float] | None = None  # units done and time after the first finished units
        self._any = False
        if self._bar:
            self._draw()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, count: int = 1, note: str | None = None) -> None:
        """Count finished units. note: a text beside the bar; None keeps the earlier one."""
        self.done += count
        self._any = True
        self._note = self._note if note is None else note
        now = self._clock()
        if count and self._first is None:
            self._first = (self.done, now)
        # The longer a task takes, the more seldom it writes a line: hours make no thousands of them.
        pause = REDRAW_S if self._bar else max(LINE_S, (now - self._started) / 20)
        if now - self._shown_at < pause:
            return
        self._shown_at = now
        if self._bar:
            self._draw()
        else:
            print(f"{self._what}: {self._facts()}", file=self._stream, flush=True)

    def remaining_s(self) -> float | None:
        """Estimated seconds until the end; None as long as too little is done for an estimate."""
        rate = self._rate()
        return None if rate is None or self.total is None else (self.total - self.done) / rate

    def close(self) -> None:
        """Write the final state."""
        if self._bar:
            self._draw()
            self._stream.write("\n")
            Progress.drawn = None
        elif self._any:
            print(f"{self._what}: {self._facts()}", file=self._stream, flush=True)

    def remove(self) -> None:
        """Remove the bar from the terminal's line until the next update."""
        self._stream.write("\r\x1b[K")
        self._stream.flush()
        Progress.drawn, self._shown_at = None, 0.0

    def _rate(self) -> float | None:
        """Units a second after the first finished units; None as long as they are too few."""
        if self._first is None or self.total is None:
            return None
        count, first = self.done - self._first[0], self._first[1]
        seconds = self._clock() - first
        if not 0 < (self.total - self._first[0]) * ESTIMATE_SHARE <= count or seconds < first - self._started:
            return None
        return count / seconds if seconds > 0 else None

    def _draw(self) -> None:
        share = self.done / self.total if self.total else 0.0
        filled = int(share * BAR_WIDTH)
        text = f"{self._what} [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {self._facts()}"
        self._stream.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
        self._stream.flush()
        Progress.drawn = self

    def _facts(self) -> str:
        done = f"{self.done:,} {self._unit}s"
        if self.total is not None:
            done = f"{self.done:,}/{self.total:,} {self._unit}s"
        seconds = round(self._clock() - self._started)
        facts = [done, f"{seconds // 60}:{seconds % 60:02d} min"]
        rate, left = self._rate(), self.remaining_s()
        if rate is not None:
            facts.append(f"{rate:.{0 if rate >= 10 else 2}f} {self._unit}s/s")
        if left:
            facts.append(f"about {_roughly(left)} left")
        return ", ".join([*facts, *([self._note] if self._note else [])])


def _roughly(seconds: float) -> str:
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
