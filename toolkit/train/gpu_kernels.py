"""Which Triton kernels a training runs on; plain torch beside each defines it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.log import get_logger

logger = get_logger(__name__)

OLDEST = (8, 0)


class GpuKernels(NamedTuple):
    """score_rows: the tiles of `loss._score`. attend, attend_backward: the tiled ones of `causal_attention.py`."""

    score_rows: Callable[..., tuple[Tensor, Tensor]]
    attend: Callable[..., tuple[Tensor, Tensor]]
    attend_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


@cache
def gpu_kernels(device_type: str) -> GpuKernels | None:
    """Those of an NVIDIA GPU that has bfloat16 products (Ampere and later); None elsewhere, and without Triton. Said in
    the log, once."""
    if device_type != "cuda":
        return None
    missing = _missing()
    if missing is not None:
        logger.info("losses and attention of training in plain torch: %s", missing)
        return None
    from toolkit.train.triton_attention import attend, attend_backward
    from toolkit.train.triton_loss import score_rows

    logger.info("losses and attention of training by Triton kernels")
    return GpuKernels(score_rows, attend, attend_backward)


def _missing() -> str | None:
    if torch.version.hip is not None:
        return "the kernels were written for NVIDIA GPUs"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < OLDEST:
        return f"the GPU has compute capability {major}.{minor}, the kernels need {OLDEST[0]}.{OLDEST[1]}"
    return None if find_spec("triton") is not None else "triton is not installed"
