"""The host's numbers on a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def upload(numbers: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return `torch.tensor(numbers)` on a device.

    To a GPU they go in stream order, from pinned memory: the host does not wait for the work before.
    """
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
