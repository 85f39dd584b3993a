"""How many threads a process should run: the cores it may use, and what the user asked for."""

from __future__ import annotations

import os
from pathlib import Path


def physical_cores() -> int:
    """Cores this process may use: its affinity, hardware threads of one core counted once, and the cgroup's quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(cores), _cgroup_cores() or len(cores)))


def _siblings(cpu: int) -> str:
    try:
        return (
            Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii").strip()
        )
    except OSError:
        return str(cpu)


def _cgroup_cores() -> int | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, round(int(quota) / int(period)))


def users_threads() -> str | None:
    """OMP_NUM_THREADS where the user set it, None where nobody or only a launcher did.

    `accelerate launch` and torchrun export 1 to their workers. Then the environment that the launcher itself was
    started with tells; where it cannot be read (no /proc), a 1 counts as the launcher's.
    """
    own = os.environ.get("OMP_NUM_THREADS")
    if own != "1" or not ({"LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys()):
        return own
    try:
        entries = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return "1" if b"OMP_NUM_THREADS=1" in entries else None
