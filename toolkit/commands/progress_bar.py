"""A progress bar fed by the `on_progress(done, total, ...)` calls of the lower floors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from toolkit.log import progress


@contextmanager
def progress_bar(what: str, unit: str, note: str = "") -> Iterator[Callable[..., None]]:
    """Yields the callback. The bar starts at the first call, so work done in an earlier session counts for no speed.

    A third argument of the callback is a count of what `note` says, shown beside the bar.
    """
    bar: Any = None

    def show(done: int, total: int, count: int | None = None) -> None:
        nonlocal bar
        if bar is None:
            bar = progress(total, what, unit, initial=max(0, done - 1))
        bar.total = total
        if count is not None:
            bar.set_postfix_str(f"{count} {note}", refresh=False)
        bar.update(done - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
