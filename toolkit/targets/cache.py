"""The user's cache folder: directories that are built once, atomically, and the dtype that this CPU multiplies fastest.

That is bfloat16 with AMX, without AMX often float32; measured once.
"""

from __future__ import annotations

import fcntl
import functools
import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F

from toolkit.errors import TargetError
from toolkit.log import get_logger
from toolkit.threads import cpu_info
from toolkit.weights import WeightsError, read_json, write_json

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


# Rows of a decoding batch and of a prompt. With few rows, reading the weights dominates, and bfloat16 is always faster.
ROWS = (64, 256)
COLUMNS = 1024
REPEATS = 10


@functools.cache
def fastest_cpu_dtype() -> torch.dtype:
    """bfloat16 unless float32 products are faster on this CPU. Measured once for each CPU and version of torch; cached,
    so that a resumed pipeline keeps its dtype.
    """
    # Machines with the same model name may differ in instruction sets: virtual machines often hide AMX.
    found = cpu_info()
    flags = [flag for flag in sorted(found.get("flags", "").split()) if "amx" in flag or "bf16" in flag]
    name = " ".join([found.get("model name", platform.machine()), *flags])
    key, path = f"{name} | torch {torch.__version__}", cache_root() / "cpu_products.json"
    try:
        known = read_json(path)
    except (OSError, WeightsError):
        known = {}
    if key not in known:
        known[key] = _measure()
        try:
            write_json(path, known)
            log.info("the speeds of float32 and bfloat16 products on this CPU are cached in %s", path)
        except OSError as error:
            log.debug("%s cannot be written (%s): the measurement of this CPU is not cached", path, error)
    speedup = known[key]["float32_speedup"]
    if speedup <= 1:
        return torch.bfloat16
    log.info("the target is loaded in float32: this CPU multiplies it %.1f times as fast as bfloat16", speedup)
    return torch.float32


@torch.inference_mode()
def _measure() -> dict[str, float]:
    """Speed of float32 products relative to bfloat16, from the fastest of alternating runs.

    On one thread: on a busy machine several threads would measure their waiting for each other.
    """
    dtypes = (torch.bfloat16, torch.float32)
    weights = [torch.ones(COLUMNS, COLUMNS, dtype=dtype) for dtype in dtypes]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ratios = []
        for rows in ROWS:
            seconds = [float("inf"), float("inf")]
            for _ in range(REPEATS):
                for number, weight in enumerate(weights):
                    x = torch.ones(rows, COLUMNS, dtype=weight.dtype)
                    started = time.perf_counter()
                    F.linear(x, weight)
                    seconds[number] = min(seconds[number], time.perf_counter() - started)
            ratios.append(seconds[0] / seconds[1])
    finally:
        torch.set_num_threads(threads)
    return {"float32_speedup": math.prod(ratios) ** (1 / len(ratios))}
