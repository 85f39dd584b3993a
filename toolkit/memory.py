"""How much memory a process may use: the machine's, or what its container is allowed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_memory(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes. `own` says where in `cgroups` this process stands; a group is bound by all those above it too."""
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
        # In a container the path may be the host's, which does not exist here: the root is then the container's own.
        for place in (group, *group.parents):
            limit = _limit(place / name)
            if limit is not None:
                yield limit
            if place == root:
                break


def _limit(file: Path) -> int | None:
    """None where there is no file, and for "max"."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
