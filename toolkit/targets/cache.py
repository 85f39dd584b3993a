"""The user's cache folder, and directories in it that are built once and atomically."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import TargetError
from toolkit.log import get_logger

log = get_logger(__name__)


def cache_root() -> Path:
    """$TOOLKIT_CACHE, else ~/.cache/toolkit."""
    return Path(os.environ.get("TOOLKIT_CACHE") or Path.home() / ".cache" / "toolkit").expanduser()


def build_once(directory: Path, build: Callable[[Path], None]) -> Path:
    """`directory`, built by `build(temporary)` unless it exists.

    With a lock, a second process waits for the result of the first. The folder is renamed to `directory` only after it
    is complete, so an interrupted build never looks finished. Raises `TargetError` when the cache cannot be written.
    """
    if directory.is_dir():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory.parent / f".{directory.name}.lock"):
            if not directory.is_dir():
                _build(directory, build)
    except PermissionError as error:
        raise TargetError(
            f"the cache {directory.parent} cannot be written ({error}); set TOOLKIT_CACHE to a folder of yours"
        ) from error
    return directory


def _build(directory: Path, build: Callable[[Path], None]) -> None:
    prefix = f".{directory.name}.part-"
    for left_over in directory.parent.glob(prefix + "*"):
        shutil.rmtree(left_over, ignore_errors=True)  # of a killed process, since we hold the lock
    temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=prefix))
    try:
        build(temporary)
        # Temporary folders and safetensors files are private to the user; the result must be readable by all.
        temporary.chmod(0o755)
        for path in temporary.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.replace(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel releases the lock when the process ends, so a killed process leaves no stale lock.
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process is building %s; waiting for it", path.name.strip(".").removesuffix(".lock"))
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
