"""The CPU: its description, the cores that a process may use, and the user's number of threads."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")


def cpu_info() -> dict[str, str]:
    """Return the fields of the first CPU in /proc/cpuinfo; without that file, none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_flags(cpu: Mapping[str, str]) -> list[str]:
    """Return those of `CPU_FLAGS` that the CPU of `cpu_info` has."""
    flags = cpu.get("flags", "").split()
    return [flag for flag in CPU_FLAGS if flag in flags]


def physical_cores() -> int:
    """Return the cores that this process may use, by its affinity (one per physical core) and its cgroup's quota."""
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
    """Return OMP_NUM_THREADS if the user set it; None if it is unset or a launcher set it.

    `accelerate launch` and torchrun set it to 1 for their workers. In a worker, 1 counts as the user's setting only if
    the launcher's own environment has it. If that cannot be read (no /proc), 1 counts as the launcher's.
    """
    own = os.environ.get("OMP_NUM_THREADS")
    if own != "1" or not ({"LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys()):
        return own
    try:
        entries = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return "1" if b"OMP_NUM_THREADS=1" in entries else None


def end_openmp_workers() -> None:
    """End the OpenMP workers of the calling thread; its next parallel operator would start new ones.

    To be called by a thread that has loaded a model, before another thread computes with it. Every thread that computes
    has workers of its own, and libgomp lets all of them sleep at each barrier, instead of spinning shortly, once a
    process has more of them than CPUs: on two cores a decode step of the demo's target then takes 1.7 times as long.
    """
    if os.name == "posix":  # elsewhere CDLL needs a name
        pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)  # OpenMP 5.0
        if pause is not None:
            pause(1)  # omp_pause_soft
