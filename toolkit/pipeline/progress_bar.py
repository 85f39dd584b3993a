"""A progress bar fed by the `on_progress(done, total, ...)` calls of the lower floors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from toolkit.log import Progress


@contextmanager
def progress_bar(what: str, unit: str, total: int | None = None, note: str = "") -> Iterator[Callable[..., None]]:
    """Yields the callback. Work before the first call counts as done by an earlier session, and is not timed.

    The callback's third argument is a count, shown beside the bar with `note`.
    """
    with Progress(total, what, unit) as bar:
        first = True

        def show(done: int, total: int, count: int | None = None) -> None:
            nonlocal first
            if first:
                bar.initial = bar.n = max(0, done - 1)
                first = False
            bar.total = total
            bar.update(done - bar.n, None if count is None else f"{count:,} {note}")

        yield show
