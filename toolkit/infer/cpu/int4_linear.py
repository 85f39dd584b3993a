"""A linear layer with half a byte per weight: 16 levels between the smallest and the largest weight of each group.

The result is that of a float layer whose weight is `(level - 8) * step + middle`. Every GROUP weights of a row have a
step and a middle, in the layer's dtype. PyTorch's kernel converts the levels to floats in registers and adds in
float32, so a row's result does not depend on the number of rows. (torchao's int4 layout for CPUs calls the same
kernel.) The kernel is made for few rows in bfloat16. It reads prompts about as fast as the float layer. It is slow in
float32.

Shapes: K input features, N output features, G = K / GROUP groups per row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from toolkit.targets.fixed_linear import FixedLinear

GROUP = 32
LEVELS = 16
ROWS_MULTIPLE = 16  # the kernel needs N to be a multiple
SMALLEST = 1e-30


class Int4Linear(FixedLinear):
    """Replaces an `nn.Linear` of bfloat16 or float32 on the CPU.

    levels [N, K/2] in the kernel's order; steps [G, N, 2]: step and middle.
    """

    quantization = "int4"
    levels: Tensor
    steps: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        levels, steps = packed_levels(linear.weight.detach())
        self.register_buffer("levels", levels, persistent=False)
        self.register_buffer("steps", steps, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The dequantised weight [N, K] in the layer's dtype; computed at every call."""
        one = torch.eye(self.in_features, dtype=self.steps.dtype)
        return int4_product(one, self.levels, self.steps).t().contiguous()

    def nbytes(self) -> int:
        return self.levels.nbytes + self.steps.nbytes

    def product(self, inputs: Tensor) -> Tensor:
        out = int4_product(inputs.reshape(-1, self.in_features), self.levels, self.steps)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*inputs.shape[:-1], self.out_features)

    def set_weight(self, weight: Tensor) -> None:
        levels, steps = packed_levels(weight.to(self.steps.dtype))
        self.levels.copy_(levels)
        self.steps.copy_(steps)

    def like(self, linear: nn.Linear) -> nn.Module:
        return Int4Linear(linear)


def takes_int4(linear: nn.Linear) -> bool:
    """Whether the kernel supports the sizes of this layer."""
    return linear.out_features % ROWS_MULTIPLE == 0 and linear.in_features % GROUP == 0


def int4_product(rows: Tensor, levels: Tensor, steps: Tensor) -> Tensor:
    """rows [M, K], levels and steps as `Int4Linear` holds them -> [M, N]. An operator of its own, since Inductor (torch
    2.13) replaces PyTorch's by another, to which a region of a program passes the wrong group size."""
    out: Tensor = torch.ops.toolkit.int4_product(rows, levels, steps)
    return out


def _int4_product(rows: Tensor, levels: Tensor, steps: Tensor) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(rows.contiguous(), levels, GROUP, steps)


_library = torch.library.Library("toolkit", "FRAGMENT")
_library.define("int4_product(Tensor rows, Tensor levels, Tensor steps) -> Tensor")
_library.impl("int4_product", _int4_product, "CPU")
torch.library.register_fake(
    "toolkit::int4_product", lambda rows, _levels, steps: rows.new_empty(rows.shape[0], steps.shape[1])
)


def packed_levels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> levels and steps as `Int4Linear` holds them."""
    levels, steps = round_to_levels(weight)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1), steps


def round_to_levels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> levels [N, K] int32 in 0..15, and steps [G, N, 2] in the weight's dtype."""
    groups = weight.float().unflatten(1, (-1, GROUP))  # [N, G, GROUP]
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    # Round steps to the dtype first, so that levels match the stored steps.
    step = ((high - low) / (LEVELS - 1)).clamp_min(SMALLEST).to(weight.dtype)
    middle = (low + LEVELS // 2 * step.float()).to(weight.dtype)
    levels = (groups - middle.float()[..., None]).div_(step.float()[..., None]).round_().add_(LEVELS // 2)
    levels = levels.clamp_(0, LEVELS - 1).to(torch.int32).flatten(1)
    return levels, torch.stack((step, middle), dim=-1).transpose(0, 1).contiguous()
