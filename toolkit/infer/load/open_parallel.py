"""open_engine over several ranks of this machine, and their end in order."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

from toolkit.infer.load.load_engine import Opened, open_engine
from toolkit.infer.parallel.driver import Driver
from toolkit.infer.parallel.rank_engine import DriverEngine
from toolkit.infer.parallel.ranks import ParallelError, RankLostError


def open_parallel(tensor_parallel_size: int, **options: Any) -> Opened:
    """open_engine(**options) on that many ranks, of which this process is the first; its engine leads the others.

    Raises what open_engine raises, ParallelError for what cannot be divided and for a rank that ended meanwhile.
    """
    if tensor_parallel_size == 1:
        return open_engine(**options)
    driver = Driver(tensor_parallel_size, options)
    try:
        with driver.working():
            return open_engine(**options, ranks=driver)
    except BaseException as error:
        driver.close()
        if isinstance(error, RankLostError):
            raise ParallelError(str(error)) from error
        raise


@contextlib.contextmanager
def closing(opened: Opened) -> Iterator[None]:
    """Closes the engine at the end. Raises ParallelError that says which rank was lost."""
    try:
        yield
    except RankLostError as error:
        raise ParallelError(str(error)) from error
    finally:
        opened.engine.close()


@contextlib.contextmanager
def interrupted_by_loss(opened: Opened) -> Iterator[None]:
    """Around a server's life: a lost rank ends it as Ctrl-C does. The engine is closed at the end.

    Raises ParallelError that says which rank was lost.
    """
    driver = opened.engine.driver if isinstance(opened.engine, DriverEngine) else None
    try:
        if driver is not None:
            driver.when_lost(lambda: os.kill(os.getpid(), signal.SIGINT))
        yield
    finally:
        opened.engine.close()
    if driver is not None and driver.lost is not None:
        raise ParallelError(driver.lost)
