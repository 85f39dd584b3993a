"""A linear layer with one byte per weight on a GPU: float8 e4m3 with a scale per output row, inputs in full precision.

Shapes: M rows, K input features, N output features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from toolkit.infer.kernels import reference
from toolkit.infer.kernels.dispatch import ops_for
from toolkit.targets.fixed_linear import FixedLinear

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST = 1e-30
OLDEST = (8, 9)  # compute capability of the conversion


class Float8Linear(FixedLinear):
    """Replaces an `nn.Linear`: its weight is rounded to levels [N, K] * scales [N]."""

    quantization = "fp8"
    levels: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._dtype = linear.weight.dtype
        levels, scales = _rounded(linear.weight.detach())
        self.register_buffer("levels", levels, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @property
    def weight(self) -> Tensor:
        return (self.levels.float() * self.scales[:, None]).to(self._dtype)

    def nbytes(self) -> int:
        return self.levels.numel() + 4 * self.scales.numel()

    def product(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, self.in_features)
        out = ops_for(rows.device.type).scaled_product(rows, self.levels, self.scales)
        return (out if self.bias is None else out + self.bias).view(*inputs.shape[:-1], self.out_features)

    def set_weight(self, weight: Tensor) -> None:
        levels, scales = _rounded(weight)
        self.levels.copy_(levels)
        self.scales.copy_(scales)

    def like(self, linear: nn.Linear) -> nn.Module:
        return Float8Linear(linear)


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    full = weight.float()
    scales = (full.abs().amax(dim=1) / LARGEST).clamp_min(SMALLEST)
    return (full / scales[:, None]).to(torch.float8_e4m3fn), scales


def takes(device: torch.device) -> bool:
    """Whether the device's kernels read float8."""
    if ops_for(device.type).scaled_product is reference.scaled_product:
        return False
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= OLDEST


def to_float8(head: nn.Module) -> None:
    """Replace every linear layer of a draft head. The drafts change a little; the answers do not."""
    linears = [(path, module) for path, module in head.named_modules() if isinstance(module, nn.Linear)]
    for path, module in linears:
        parent, _, own = path.rpartition(".")
        setattr(head.get_submodule(parent), own, Float8Linear(module))
