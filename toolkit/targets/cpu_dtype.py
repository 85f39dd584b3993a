"""The dtype that torch multiplies fastest in batches on this CPU: bfloat16 with AMX, without AMX often float32."""

from __future__ import annotations

import functools
import math
import platform
import time

import torch
import torch.nn.functional as F

from toolkit.log import get_logger
from toolkit.targets.cache import cache_root
from toolkit.threads import cpu_info
from toolkit.weights import WeightsError, read_json, write_json

log = get_logger(__name__)

# Rows of a decoding batch and of a prompt. With few rows, reading the weights dominates, and bfloat16 is always faster.
ROWS = (64, 256)
COLUMNS = 1024
REPEATS = 10


@functools.cache
def fastest_cpu_dtype() -> torch.dtype:
    """bfloat16 unless float32 products are faster on this CPU. Measured once for each CPU and version of torch; cached,
    so that a resumed pipeline keeps its dtype.
    """
    key = f"{_cpu_name()} | torch {torch.__version__}"
    path = cache_root() / "cpu_products.json"
    try:
        known = read_json(path)
    except (OSError, WeightsError):
        known = {}
    if key not in known:
        known[key] = _measure()
        ratio = known[key]["float32_speedup"]
        try:
            write_json(path, known)
        except OSError as error:
            log.debug("%s cannot be written (%s): the measurement of this CPU is not cached", path, error)
        else:
            log.info("float32 products are %.2f times as fast as bfloat16 on this CPU; cached in %s", ratio, path)
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


def _cpu_name() -> str:
    """Model and instruction sets: machines with the same model name may differ (virtual machines often hide AMX)."""
    found = cpu_info()
    flags = sorted(flag for flag in found.get("flags", "").split() if "amx" in flag or "bf16" in flag)
    return " ".join([found.get("model name", platform.machine()), *flags])
