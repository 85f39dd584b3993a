"""Which implementation of an op a device gets: Triton's on a GPU, the plain torch reference elsewhere."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from toolkit.infer.kernels import reference
from toolkit.log import get_logger

logger = get_logger(__name__)


@cache
def argmax_for(device_type: str) -> Callable[[Tensor], Tensor]:
    """The argmax over the vocabulary for "cpu" or "cuda"; chosen once, and logged."""
    if device_type == "cuda" and torch.version.hip is None:
        try:
            chosen = importlib.import_module("toolkit.infer.kernels.triton_argmax").argmax
        except ImportError:
            logger.info("argmax on %s: plain torch, since triton is not installed", device_type)
            return reference.argmax
        logger.info("argmax on %s: the Triton kernel", device_type)
        return chosen
    logger.debug("argmax on %s: plain torch", device_type)
    return reference.argmax
