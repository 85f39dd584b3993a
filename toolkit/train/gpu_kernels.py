"""Which Triton kernels a training runs on; plain torch beside each defines it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.log import get_logger

logger = get_logger(__name__)


class GpuKernels(NamedTuple):
    """score_rows: the tiles of `loss._score`. attend, attend_backward: the tiled ones of `causal_attention.py`."""

    score_rows: Callable[..., tuple[Tensor, Tensor]]
    attend: Callable[..., tuple[Tensor, Tensor]]
    attend_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


@cache
def gpu_kernels(device_type: str) -> GpuKernels | None:
    """Those of an NVIDIA GPU; None elsewhere, and without Triton."""
    if device_type != "cuda" or torch.version.hip is not None:
        return None
    try:
        from toolkit.train.triton_attention import attend, attend_backward
        from toolkit.train.triton_loss import score_rows
    except ImportError:
        logger.info("training on %s: losses and attention in plain torch, since triton is not installed", device_type)
        return None
    return GpuKernels(score_rows, attend, attend_backward)
