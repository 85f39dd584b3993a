"""The memory that a process may use: the machine's, or the limit of its container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_memory(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the usable memory in bytes: the machine's, or the lowest limit of the process's cgroup and its parents.

    cgroups: where the cgroup file system is mounted. own: the file with the cgroup paths of this process.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits(cgroups, own)])


def _limits(cgroups: Path, own: Path) -> Iterator[int]:
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:  # "0::/path" (version 2), "9:memory:/path" (version 1)
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        # In a container the path may be the host's and not exist; the root is then the container's own group.
        for place in (group, *group.parents):
            limit = _limit(place / name)
            if limit is not None:
                yield limit
            if place == root:
                break


def _limit(file: Path) -> int | None:
    """Read a limit in bytes; None if the file does not exist or says "max"."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
