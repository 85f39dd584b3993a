"""Whether the user or a launcher set OMP_NUM_THREADS."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
# What a launcher does: it sets the variables in its own process and starts a worker.
LAUNCHER = (
    "import os, subprocess, sys; os.environ.update(OMP_NUM_THREADS='1', LOCAL_RANK='0'); "
    "subprocess.run([sys.executable, '-c', 'from toolkit.threads import users_threads; print(users_threads())'])"
)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the launcher's environment is read from /proc")
@pytest.mark.parametrize("users", ["1", None])
def test_a_launcher_s_one_is_not_the_user_s(users: str | None) -> None:
    """If the 1 that accelerate sets counted as the user's, a training on a large CPU would be several times slower."""
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "LOCAL_RANK")}
    if users is not None:
        environment["OMP_NUM_THREADS"] = users
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER], env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(users)


WORKERS = """
import os, torch
from toolkit.threads import end_openmp_workers
torch.set_num_threads(2)
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
torch.ones(10**6).add_(1)
during = count()
end_openmp_workers()
after = count()
torch.ones(10**6).add_(1)
print(before, during, after, count())
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's list of threads")
def test_openmp_workers_end_and_start_again():
    """With workers of two threads left, a server's decode step took 1.7 times as long on two cores."""
    done = subprocess.run([sys.executable, "-c", WORKERS], capture_output=True, text=True, check=True, timeout=120)
    before, during, after, again = map(int, done.stdout.split())
    assert during == again == before + 1
    assert after == before
