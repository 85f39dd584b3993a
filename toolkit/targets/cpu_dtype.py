"""Which float torch multiplies fastest in batches on this CPU: with AMX bfloat16, without it often float32."""

from __future__ import annotations

import functools
import math
import platform
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from toolkit.log import get_logger
from toolkit.targets.cache import cache_root
from toolkit.weights import WeightsError, read_json, write_json

log = get_logger(__name__)

# A batch that decodes, and a prompt. (A few rows mostly read weights: bfloat16 has half the bytes.)
ROWS = (64, 256)
COLUMNS = 1024
REPEATS = 10


@functools.cache
def fastest_cpu_dtype() -> torch.dtype:
    """bfloat16 unless float32 products are faster here; measured once per CPU and torch, then read from the cache.

    Kept, so that a pipeline started again finds the target it began with.
    """
    speedup = float32_speedup()
    if speedup <= 1:
        return torch.bfloat16
    log.info("float32 target: this CPU multiplies it %.1f times as fast as bfloat16", speedup)
    return torch.float32


@functools.cache
def float32_speedup() -> float:
    """How many times as fast this CPU multiplies float32 as bfloat16, in batches; measured once, then kept."""
    key = f"{_cpu_name()} | torch {torch.__version__}"
    path = cache_root() / "cpu_products.json"
    try:
        known = read_json(path)
    except (OSError, WeightsError):
        known = {}
    if key not in known:
        measured = _measure()
        known = {**known, key: measured}
        try:
            write_json(path, known)
        except OSError as error:
            log.debug("%s cannot be written (%s): the measurement of this CPU is not kept", path, error)
        else:
            ratio = measured["float32_speedup"]
            log.info("float32 products are %.2f times as fast as bfloat16 ones here; kept in %s", ratio, path)
    return float(known[key]["float32_speedup"])


@torch.inference_mode()
def _measure() -> dict[str, float]:
    """How many times as fast float32 products are, on one thread: several would time their barriers on a busy machine.

    Of each the least of several taken in turns.
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
    """Model and instruction sets: two machines of one name may offer different ones (AMX is often hidden)."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    return " ".join([model, *sorted(flag for flag in flags if "amx" in flag or "bf16" in flag)])
