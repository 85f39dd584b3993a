"""Context managers that close a loaded engine, also after the loss of a rank."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from toolkit.infer.load.load_engine import LoadedEngine
from toolkit.infer.parallel.rank_engine import DriverEngine
from toolkit.infer.parallel.ranks import ParallelError, RankLostError


@contextlib.contextmanager
def closing(loaded: LoadedEngine) -> Iterator[None]:
    """Close the engine at the end. Raises ParallelError with the name of a lost rank."""
    try:
        yield
    except RankLostError as error:
        raise ParallelError(str(error)) from error
    finally:
        loaded.engine.close()


@contextlib.contextmanager
def interrupted_by_loss(loaded: LoadedEngine) -> Iterator[None]:
    """Interrupt a server after the loss of a rank, as Ctrl-C does. Close the engine at the end.

    Raises ParallelError with the name of the lost rank.
    """
    driver = loaded.engine.driver if isinstance(loaded.engine, DriverEngine) else None
    try:
        if driver is not None:
            driver.when_lost(lambda: os.kill(os.getpid(), signal.SIGINT))
        yield
    finally:
        loaded.engine.close()
    if driver is not None and driver.lost is not None:
        raise ParallelError(driver.lost)
