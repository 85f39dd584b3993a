"""A container's memory limit is found at any level of the cgroup tree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from toolkit.memory import usable_memory

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MB = 2**20


@pytest.mark.parametrize(
    ("own", "files", "bytes_"),
    [
        ("0::/docker/abc\n", {"memory.max": 512 * MB}, 512 * MB),  # the host's path, which is not there
        ("0::/user/job\n", {"user/memory.max": 64 * MB, "user/job/memory.max": "max"}, 64 * MB),  # bound from above
        ("9:cpu,cpuacct:/x\n4:memory:/x\n", {"memory/x/memory.limit_in_bytes": 32 * MB, "memory.max": 1}, 32 * MB),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": 2**63 - 4096}, MACHINE),  # version 1's "no limit"
        (None, {"memory.max": MB}, MACHINE),
    ],
)
def test_usable_memory(tmp_path: Path, own: str | None, files: dict, bytes_: int) -> None:
    """A cache of half of the host's memory would get a container with an eighth of it killed."""
    for name, value in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    if own is not None:
        (tmp_path / "cgroup").write_text(own)
    assert usable_memory(tmp_path / "groups", tmp_path / "cgroup") == bytes_
