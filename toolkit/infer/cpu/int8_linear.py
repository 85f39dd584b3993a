"""A linear layer with one byte per weight: int8 with a scale per output row, inputs in full precision.

The result is that of a float layer whose weight is `qweight * scale`. bfloat16 layers use our native product if this
machine has it (blocked_product.py). Others use PyTorch's int8 product, which torchao calls too. With both, a row's
result does not depend on the number of rows.

Shapes: M rows, K input features, N output features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.infer.cpu.blocked_product import from_blocks, takes, to_blocks
from toolkit.infer.cpu.joined_product import BlockedLinear

DTYPES = (torch.bfloat16, torch.float32)
LARGEST = 127
SMALLEST = 1e-30
BFLOAT16_MULTIPLE = 16  # PyTorch's bfloat16 kernel reads past the row's end if K is not a multiple


class Int8Linear(BlockedLinear):
    """Replaces an `nn.Linear` of bfloat16 or float32 on the CPU: weight is rounded to qweight [N, K] * scale [N].

    blocked: qweight is in blocks, and scale is float32, with values that are exact in the layer's dtype. Raises
    ValueError for other dtypes.
    """

    quantization = "int8"
    qweight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach()
        if weight.dtype not in DTYPES:
            raise ValueError(f"a linear layer of {weight.dtype} was given; bfloat16 or float32 is needed")
        self.blocked, self._dtype = takes(weight), weight.dtype
        qweight, scale = self._rounded(weight)
        self.register_buffer("qweight", qweight, persistent=False)
        self.register_buffer("scale", scale, persistent=False)

    def _rounded(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """qweight and scale of a weight [N, K] of the layer's dtype."""
        full = weight.float()
        # Round the scale to the dtype first, so that both kernels use the same scale.
        scale = (full.abs().amax(dim=1) / LARGEST).clamp_min(SMALLEST).to(self._dtype)
        levels = (full / scale.float()[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
        return (to_blocks(levels), scale.float()) if self.blocked else (levels, scale)

    @property
    def levels(self) -> Tensor:
        """The int8 weight [N, K], out of blocks."""
        return from_blocks(self.own_blocks(), self.out_features) if self.blocked else self.qweight

    @property
    def weight(self) -> Tensor:
        return self.levels.to(self._dtype) * self.scale.to(self._dtype)[:, None]

    @property
    def blocks(self) -> Tensor:
        return self.qweight

    @property
    def block_scale(self) -> Tensor:
        return self.scale

    def hold(self, blocks: Tensor) -> None:
        self.qweight = blocks

    def nbytes(self) -> int:
        return self.out_features * (self.in_features + self.scale.element_size())

    def product(self, inputs: Tensor) -> Tensor:
        if self.blocked:
            return self.blocked_product(inputs)
        out = int8_product(inputs.reshape(-1, self.in_features), self.qweight, self.scale)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*inputs.shape[:-1], self.out_features)

    def set_weight(self, weight: Tensor) -> None:
        qweight, scale = self._rounded(weight.to(self._dtype))
        self.scale.copy_(scale)
        self.set_blocks(qweight)

    def like(self, linear: nn.Linear) -> nn.Module:
        return Int8Linear(linear)


def int8_product(rows: Tensor, qweight: Tensor, scale: Tensor) -> Tensor:
    """rows [M, K] of a dtype of DTYPES, qweight [N, K] int8, scale [N] -> rows @ (qweight * scale).T [M, N]."""
    if rows.dtype == torch.bfloat16 and rows.shape[1] % BFLOAT16_MULTIPLE:
        return F.linear(rows, qweight.to(rows.dtype) * scale[:, None])
    return torch._weight_int8pack_mm(rows.contiguous(), qweight, scale)
