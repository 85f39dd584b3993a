"""Fewer threads while other processes use the CPUs: the decision, by a scripted clock and scripted CPU times."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from toolkit.thread_limit import ThreadLimit, seconds_of_others, thread_limit


class Machine:
    """A machine whose other processes use as many CPUs as a test says; time passes in rounds and while it is idle."""

    def __init__(self, cpus: int, most: int) -> None:
        self.now = self.used = 0.0
        self.most = most
        self.limit = ThreadLimit(cpus, self.others, lambda: self.now)

    def others(self) -> float:
        return self.used

    def pass_time(self, seconds: float, busy: float) -> None:
        self.now += seconds
        self.used += seconds * busy

    def run(self, seconds: float, busy: float, step: float = 0.02) -> int:
        """Rounds of `step` seconds beside processes that use `busy` CPUs; returns the threads of the last round."""
        threads, before = 0, torch.get_num_threads()
        torch.set_num_threads(self.most)
        try:
            for _ in range(round(seconds / step)):
                with self.limit.limited():
                    threads = torch.get_num_threads()
                    self.pass_time(step, busy)
        finally:
            torch.set_num_threads(before)
        return threads


def test_steps_down_beside_a_busy_process_and_back() -> None:
    machine = Machine(cpus=2, most=2)
    assert machine.run(10, busy=0.05) == 2
    assert machine.run(1.5, busy=0.7) == 1
    assert machine.run(60, busy=1.0) == 1, "another process still computes"
    assert machine.run(2, busy=0.0) == 2


def test_idle_cpus_are_taken_into_account() -> None:
    """With threads for half of the CPUs (two a core), as many other processes need none of ours."""
    machine = Machine(cpus=8, most=4)
    assert machine.run(5, busy=4.0) == 4
    assert machine.run(5, busy=6.0) == 2
    assert machine.run(5, busy=9.0) == 1, "at least one thread"
    assert machine.run(5, busy=6.0) == 2, "some threads return"


def test_idle_time_counts_for_the_return_only() -> None:
    """A busy process that ended before a request came does not slow it down; nor does one that ran before it."""
    machine = Machine(cpus=2, most=2)
    assert machine.run(5, busy=0.9) == 1
    machine.pass_time(60, busy=0.01)
    assert machine.run(0.02, busy=0.0) == 2
    machine.pass_time(60, busy=1.0)
    assert machine.run(0.02, busy=0.0) == 2


def test_threads_are_limited_inside_only(caplog: pytest.LogCaptureFixture) -> None:
    """What the caller computes outside of a round keeps its number of threads, and a number that it sets counts."""
    before = torch.get_num_threads()
    machine = Machine(cpus=2, most=2)
    with caplog.at_level(logging.INFO, "toolkit.thread_limit"):
        machine.run(2, busy=0.9)
    try:
        torch.set_num_threads(2)
        with pytest.raises(KeyError), machine.limit.limited():
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert [record.getMessage() for record in caplog.records] == [
        "2 -> 1 threads: other processes use this machine's CPUs"
    ]


def test_only_a_single_process_on_a_cpu_is_limited() -> None:
    """Several processes would compute with different numbers of threads, which round differently, and a training may
    have to be repeatable."""
    assert thread_limit(torch.device("cuda")) is nullcontext is thread_limit(torch.device("cpu"), processes=2)
    assert thread_limit(torch.device("cpu")) is not nullcontext is thread_limit(torch.device("cpu"), changing=False)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the load is read from /proc/stat")
def test_seconds_of_others_counts_other_processes_only() -> None:
    """Checked as least and most over 0.6 s: other programs of the machine add to it."""

    def passed(code: str) -> float:
        before = seconds_of_others()
        subprocess.run([sys.executable, "-c", code], check=True)
        after = seconds_of_others()
        assert before is not None and after is not None
        return after - before

    assert passed("import time\nwhile time.process_time() < 0.6: pass") > 0.4
    before, own = seconds_of_others(), time.process_time()
    assert before is not None
    started = time.perf_counter()
    while time.process_time() - own < 0.6:
        pass
    elapsed, after = time.perf_counter() - started, seconds_of_others()
    assert after is not None
    assert after - before < elapsed * len(os.sched_getaffinity(0)) - 0.4, "our own 0.6 s are not in it"
