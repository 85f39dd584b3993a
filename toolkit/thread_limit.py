"""Fewer threads while other processes use this machine's CPUs.

Threads of one operator wait for each other. If another process has the CPU of one thread, the others spin until it
returns: on two cores, one busy process makes two threads several times slower than one.

Linux only: elsewhere nothing says how much of the CPUs other processes use, and the number of threads stays.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from toolkit.log import get_logger

log = get_logger(__name__)

WINDOW_S = 0.25  # least time between two looks at the CPUs
CROWDED_S = 0.75  # other processes must need a CPU for so long before a thread gives it up
# The CPUs must be free for the first time before threads return. The time doubles, up to the second, each time that
# other processes return within STEADY_S: some run in bursts.
LEAST_FREE_S, MOST_FREE_S, STEADY_S = 1.0, 32.0, 60.0
# Other processes that use less of a CPU are ignored: one thread of two gives up more than it gains.
IGNORED_CPUS = 0.25


def seconds_of_others() -> float | None:
    """Return the seconds so far that other processes have run on the CPUs that this process may use; None without
    /proc/stat."""
    try:
        allowed = os.sched_getaffinity(0)
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except (AttributeError, OSError):
        return None
    ticks = 0
    for name, *counts in (line.split() for line in lines if line.startswith("cpu")):
        if name != "cpu" and int(name[3:]) in allowed:
            user, nice, system, _idle, _iowait, *interrupts = map(int, counts[:7])
            ticks += user + nice + system + sum(interrupts)
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


class ThreadLimit:
    """Decides how many threads run, from the time that other processes have used the CPUs.

    cpus: CPUs that this process may use. others: as `seconds_of_others`. clock: seconds, as time.perf_counter.
    """

    def __init__(
        self,
        cpus: int | None = None,
        others: Callable[[], float | None] = seconds_of_others,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._cpus = cpus or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [0])
        self._others, self._clock = others, clock
        self._window: tuple[float, float | None] = (float("-inf"), None)  # when it began, and the seconds until then
        self._left_at = float("-inf")
        self._limit: int | None = None  # None: all threads run
        self._crowded_s = self._free_s = 0.0
        self._free_needed_s, self._raised_at = LEAST_FREE_S, float("-inf")

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Context manager: torch runs the caller's number of threads, or fewer."""
        most = torch.get_num_threads()
        threads = self._threads(most)
        if threads < most:
            torch.set_num_threads(threads)  # of this thread
        try:
            yield
        finally:
            if threads < most:
                torch.set_num_threads(most)
            self._left_at = self._clock()

    def _threads(self, most: int) -> int:
        now = self._clock()
        idle = now - self._left_at > WINDOW_S
        if most > 1 and (idle or now - self._window[0] >= WINDOW_S):
            self._look(now, most, idle)
        return most if self._limit is None else min(most, self._limit)

    def _look(self, now: float, most: int, idle: bool) -> None:
        (began, before), used = self._window, self._others()
        self._window = (now, used)
        if used is None or before is None:
            return
        seconds, threads = now - began, most if self._limit is None else min(most, self._limit)
        fits = self._fitting((used - before) / seconds, most)
        self._crowded_s = self._crowded_s + seconds if fits < threads and not idle else 0.0
        self._free_s = self._free_s + seconds if fits > threads else 0.0
        if self._crowded_s >= CROWDED_S:
            bursts = now - self._raised_at < STEADY_S
            self._free_needed_s = min(2 * self._free_needed_s, MOST_FREE_S) if bursts else LEAST_FREE_S
            self._change(threads, fits, most, "other processes use this machine's CPUs")
        elif self._free_s >= self._free_needed_s:
            self._raised_at = now
            self._change(threads, fits, most, "the CPUs are free again")

    def _fitting(self, busy: float, most: int) -> int:
        """Threads that run undisturbed while others keep so many CPUs busy."""
        return most if busy < IGNORED_CPUS else max(1, min(most, int(self._cpus - busy + IGNORED_CPUS)))

    def _change(self, before: int, after: int, most: int, why: str) -> None:
        self._limit = None if after == most else after
        self._crowded_s = self._free_s = 0.0
        log.info("%d -> %d threads: %s", before, after, why)


def thread_limit(
    device: torch.device, processes: int = 1, *, changing: bool = True
) -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager for each round or training step on `device`: fewer threads while the CPUs are busy.

    It does nothing on a GPU, and where the bits must be the same (several processes, or not `changing`): sums of
    another number of threads differ in rounding.
    """
    return ThreadLimit().limited if device.type == "cpu" and processes == 1 and changing else nullcontext
