"""How long a benchmark still takes, said while it runs."""

from __future__ import annotations

import time

from toolkit.log import get_logger

logger = get_logger(__name__)


class TimeLeft:
    """Of `total` turns of about one length, called `what`. guess_s: seconds of them all, if that can be guessed."""

    def __init__(self, what: str, total: int, guess_s: float | None = None) -> None:
        self._what, self._total, self._done, self._began = what, total, 0, time.perf_counter()
        if guess_s is not None:
            logger.info("%s: %d turns, about %s", what, total, _in_words(guess_s))

    def turn_ended(self) -> None:
        """Say how many are done and, by their mean, when the rest will be."""
        self._done += 1
        left = (time.perf_counter() - self._began) / self._done * (self._total - self._done)
        logger.info("%s: %d of %d, about %s left", self._what, self._done, self._total, _in_words(left))


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
