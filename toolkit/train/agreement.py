"""Agreement of the processes of a training about the file system.

On a shared file system a process may see a new file or folder up to a minute after the process that wrote it. If each
process took a branch by what it sees itself, one could miss a collective, and the others would wait for it. So the main
process looks and tells the others (`from_main`), and who reads a file that another process has just written waits until
it is there (`wait_for_files`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch.distributed import broadcast_object_list

from toolkit.errors import TrainError

if TYPE_CHECKING:  # pipeline stages before training import this file without accelerate
    from accelerate import Accelerator

Seen = TypeVar("Seen")

PATIENCE_S = 120.0  # twice the longest time that NFS keeps what it knows of a folder (acdirmax)


def from_main(accelerator: Accelerator, look: Callable[[], Seen]) -> Seen:
    """What `look` returns on the main process; other processes do not look. All processes must call this.

    An exception of `look` is raised on all processes, so that none waits for one that has ended.
    """
    if accelerator.num_processes == 1:
        return look()
    answer: list[tuple[Seen | None, Exception | None]] = [(None, None)]
    if accelerator.is_main_process:
        try:
            answer = [(look(), None)]
        except Exception as failure:
            answer = [(None, failure)]
    broadcast_object_list(answer, src=0)
    seen, error = answer[0]
    if error is not None:
        raise error
    return seen  # type: ignore[return-value]  # what `look` returned


def wait_for_files(*paths: Path) -> None:
    """Return when this process sees all of these files, which another process has written."""
    wait_until(lambda: [path for path in paths if not path.is_file()])


def wait_until(missing: Callable[[], Iterable[object]]) -> None:
    """Return when `missing` returns nothing. Raises `TrainError` with the first of it after two minutes."""
    deadline = time.monotonic() + PATIENCE_S
    while left := list(missing()):
        if time.monotonic() > deadline:
            raise TrainError(
                f"this process does not see {left[0]}, which another one has written: the folder of the run must be on "
                "a file system that all processes share"
            )
        time.sleep(0.05)
