"""Log messages and progress bars on stderr; stdout is for results only."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from tqdm import tqdm


def get_logger(name: str) -> logging.Logger:
    """Return a logger that writes `toolkit: message` to stderr. TOOLKIT_LOG sets its level (default info).

    In a group of launched processes, only the first process of each machine logs info; the others log warnings. With
    TOOLKIT_LOG=debug, all processes log everything.
    """
    root = logging.getLogger("toolkit")
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(
            logging.Formatter("%(levelname)s %(name)s: %(message)s" if _debug() else "toolkit: %(message)s")
        )
        root.addHandler(handler)
        quiet = os.environ.get("LOCAL_RANK", "0") != "0" and not _debug()
        root.setLevel("WARNING" if quiet else os.environ.get("TOOLKIT_LOG", "info").upper())
        root.propagate = False
    return logging.getLogger(name if name.startswith("toolkit") else f"toolkit.{name}")


def _debug() -> bool:
    return os.environ.get("TOOLKIT_LOG", "").lower() == "debug"


def progress(total: int | None, what: str, unit: str = "", initial: int = 0) -> Any:
    """Return a tqdm bar on stderr with a time estimate; without a terminal it prints a line every 15 seconds."""
    terminal = sys.stderr.isatty()
    return tqdm(
        total=total,
        desc=what,
        unit=f" {unit}" if unit else "it",
        initial=initial,
        mininterval=0.2 if terminal else 15.0,
        dynamic_ncols=terminal,
        ncols=None if terminal else 100,
        file=sys.stderr,
        smoothing=0.05,
    )
