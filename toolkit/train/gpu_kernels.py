"""Chooses the Triton kernels of a training. Each has a definition in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.infer.kernels.dispatch import OLDEST
from toolkit.log import get_logger

logger = get_logger(__name__)


class GpuKernels(NamedTuple):
    """score_rows replaces the tiles of `loss._score`; attend and attend_backward replace the tiled functions of
    `causal_attention.py`; merge and merge_backward the plain ones of `ttt.py`."""

    score_rows: Callable[..., tuple[Tensor, Tensor]]
    attend: Callable[..., tuple[Tensor, Tensor]]
    attend_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    merge: Callable[..., tuple[Tensor, Tensor]]
    merge_backward: Callable[..., tuple[Tensor, list[Tensor], list[Tensor]]]


@cache
def gpu_kernels(device_type: str) -> GpuKernels | None:
    """The kernels on NVIDIA GPUs with bfloat16 products (Ampere and later); None elsewhere or without Triton. Logs the
    choice once."""
    if device_type != "cuda":
        return None
    missing = _missing()
    if missing is not None:
        logger.info("training computes losses and attention in plain torch: %s", missing)
        return None
    from toolkit.train.triton_attention import attend, attend_backward
    from toolkit.train.triton_diagonals import merge, merge_backward
    from toolkit.train.triton_loss import score_rows

    logger.info("training computes losses and attention with Triton kernels")
    return GpuKernels(score_rows, attend, attend_backward, merge, merge_backward)


def _missing() -> str | None:
    if torch.version.hip is not None:
        return "the Triton kernels need an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < OLDEST:
        return f"the GPU has compute capability {major}.{minor}, the Triton kernels need {OLDEST[0]}.{OLDEST[1]}"
    return None if find_spec("triton") is not None else "triton is not installed"
