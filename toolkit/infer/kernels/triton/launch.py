"""Programmatic dependent launch of Hopper GPUs (CUDA programming guide, "Programmatic Dependent Launch").

A kernel that is launched so may start while the one before it still runs. It reads and writes nothing of another kernel
before `wait_for_earlier`, which returns when all earlier kernels are over. So starts overlap, in graphs too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import JITFunction

CAPABILITY = (9, 0)
enabled = True  # benchmarks switch it off


@triton.jit
def wait_for_earlier(pdl: tl.constexpr):
    """The next kernel may start; then wait until all earlier ones are over."""
    if pdl:
        gdc_launch_dependents()
        gdc_wait()


@cache
def _supported() -> bool:
    compiled = isinstance(wait_for_earlier, JITFunction)  # not the interpreter's
    return compiled and torch.cuda.is_available() and torch.cuda.get_device_capability() >= CAPABILITY


def depends(x: Tensor) -> bool:
    """Whether kernels on x's device start early."""
    return enabled and x.is_cuda and _supported()


def dependent(x: Tensor) -> dict[str, Any]:
    """Arguments of a launch on x's device: the kernel's `pdl`, and the option that lets it start early."""
    return {"pdl": True, "launch_pdl": True} if depends(x) else {"pdl": False}
