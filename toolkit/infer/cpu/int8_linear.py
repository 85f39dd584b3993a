"""A linear layer that keeps one byte a weight: int8 by output row, inputs in full precision.

The law is that of a float layer whose weight is `qweight * scale`. bfloat16 layers compute it by our own product with
weights in blocks, where this machine can have that (blocked_product.py). Others use integer products, which a CPU does
several times faster than bfloat16 ones: an input row becomes a fixed-point number of 16 or 24 bits times a step of its
own, and is multiplied in 2 or 3 planes of 8 bits. Sums of integers are exact. In either way a row's result does not
depend on how many rows go beside it.

Shapes: M rows, K input features, N output features, P planes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.infer.cpu.blocked_product import from_blocks, takes, to_blocks, traceable_product
from toolkit.infer.cpu.joined_linear import JoinedLinear, SharedInput, biases_of, join

# 8-bit planes of an input: as much precision as its dtype has. bfloat16 keeps more below the row's largest value.
PLANES = {torch.bfloat16: 2, torch.float32: 3}
LARGEST = 127
# PyTorch's bfloat16 x int8 kernel has less overhead a call and costs more a row: measured equal at about this many
# products. It reads beyond the row when K is no multiple of 16.
DIRECT_PRODUCTS = 4_000_000
DIRECT_MULTIPLE = 16
LEAST_SHARED = 8  # rows from which on layers share the planes of one input; fewer cost less than asking for them
SMALLEST = 1e-30
# Sums of a tile of outputs, 2 MB of them, stay in the cache until they are put together.
TILE_SUMS, LEAST_TILE = 2**19, 256
# A sum of K products of two int8 numbers must fit 31 bits.
MOST_INPUTS = 2**31 // 128**2 - 1


class Int8Linear(JoinedLinear):
    """Stands in for an `nn.Linear` of bfloat16 or float32 on the CPU: weight rounded to qweight [N, K] * scale [N].

    blocked: qweight lies in blocks, maybe with that of other layers, of `outputs` rows together, and scale is float32,
    of values that the layer's dtype has. Raises ValueError for other dtypes and for more than 131071 input features.
    """

    qweight: Tensor
    scale: Tensor
    joint_bias: Tensor | None  # of all that lies in `qweight`

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach()
        if weight.dtype not in PLANES or linear.in_features > MOST_INPUTS:
            raise ValueError(
                f"a linear layer of {weight.dtype} and {linear.in_features} inputs came; bfloat16 or float32 and at "
                f"most {MOST_INPUTS} inputs are needed"
            )
        full = weight.float()
        # Rounded to the dtype before it is used, so that both kernels multiply by the same scale.
        scale = (full.abs().amax(dim=1) / LARGEST).clamp_min(SMALLEST).to(weight.dtype)
        rounded = (full / scale.float()[:, None]).round_().clamp_(-LARGEST, LARGEST)
        self.blocked, self._dtype = takes(weight), weight.dtype
        levels = rounded.to(torch.int8)
        if self.blocked:
            levels, scale = to_blocks(levels), scale.float()
        self.hold(levels, scale, self.bias, self.out_features)
        self.shared: SharedInput[tuple[Tensor, Tensor]] | None = None  # planes, of layers beside it

    def hold(self, qweight: Tensor, scale: Tensor, bias: Tensor | None, outputs: int) -> None:
        """Multiply by this weight from now on, of which some rows are its own."""
        self.register_buffer("qweight", qweight, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("joint_bias", bias, persistent=False)
        self.outputs = outputs

    @property
    def levels(self) -> Tensor:
        """Its own rows [N, K] int8."""
        return (from_blocks(self.qweight, self.outputs) if self.blocked else self.qweight)[self.rows]

    @property
    def weight(self) -> Tensor:
        """The layer's weight [N, K] as a float layer would hold it; made anew at every call."""
        return self.levels.to(self._dtype) * self.scale[self.rows].to(self._dtype)[:, None]

    def nbytes(self) -> int:
        """Of its own rows."""
        return self.out_features * (self.in_features + self.scale.element_size())

    def product(self, inputs: Tensor) -> Tensor:
        return traceable_product(inputs, self.qweight, self.scale, self.joint_bias, self.outputs)

    def forward(self, inputs: Tensor, project: Callable[[Tensor, Tensor], Any] = F.linear) -> Any:
        """[..., K] -> [..., N] in the inputs' dtype; a product that is handed in gets the plain weight (see
        `OutputMatrix`)."""
        if project is not F.linear:
            return project(inputs, self.weight)
        if self.blocked:
            return super().forward(inputs)
        rows, shared = inputs.reshape(-1, self.in_features), self.shared
        if torch.compiler.is_exporting() and not isinstance(rows.shape[0], int):
            # One operator: which kernel is used depends on the number of rows.
            out = torch.ops.toolkit.int8_product(rows, self.qweight, self.scale)
        elif shared is None or torch.compiler.is_exporting() or rows.shape[0] < LEAST_SHARED:
            out = int8_product(rows, self.qweight, self.scale)
        elif takes_direct(rows, self.qweight, self.scale) and not shared.holds(inputs, self):
            out = torch._weight_int8pack_mm(rows.contiguous(), self.qweight, self.scale)
        else:
            out = integer_product(rows, self.qweight, self.scale, shared.take(inputs, self))
        if self.bias is not None:
            out = out + self.bias
        return out.view(*inputs.shape[:-1], self.out_features)


def share_input(layers: Sequence[Int8Linear]) -> None:
    """Layers that read the same input: their blocks lie together, or they make its planes once."""
    if all(layer.blocked for layer in layers):
        levels, scale = torch.cat([one.levels for one in layers]), torch.cat([one.scale[one.rows] for one in layers])
        blocks, bias = to_blocks(levels), biases_of(layers)
        for layer in layers:
            layer.hold(blocks, scale, bias, len(levels))
        join(layers)
    elif not any(layer.blocked for layer in layers):
        shared = SharedInput(len(layers), planes_of)
        for layer in layers:
            layer.shared = shared


def takes_direct(rows: Tensor, qweight: Tensor, scale: Tensor) -> bool:
    """Whether PyTorch's own kernel is the faster one."""
    return (
        rows.dtype == scale.dtype == torch.bfloat16
        and rows.shape[0] * qweight.numel() <= DIRECT_PRODUCTS
        and rows.shape[1] % DIRECT_MULTIPLE == 0
    )


def int8_product(rows: Tensor, qweight: Tensor, scale: Tensor) -> Tensor:
    """rows @ (qweight * scale).T as `integer_product`, by whichever kernel is faster for that many rows."""
    if takes_direct(rows, qweight, scale):
        return torch._weight_int8pack_mm(rows.contiguous(), qweight, scale)
    return integer_product(rows, qweight, scale)


_library = torch.library.Library("toolkit", "FRAGMENT")
_library.define("int8_product(Tensor rows, Tensor qweight, Tensor scale) -> Tensor")
_library.impl("int8_product", int8_product, "CompositeExplicitAutograd")
torch.library.register_fake(
    "toolkit::int8_product", lambda rows, qweight, _scale: rows.new_empty(rows.shape[0], qweight.shape[0])
)


def integer_product(rows: Tensor, qweight: Tensor, scale: Tensor, made: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """rows @ (qweight * scale).T [M, N], in the rows' dtype: rows [M, K] of a dtype of `PLANES`, qweight [N, K] int8,
    scale [N]. made: the rows' planes, where they are there already."""
    count, outputs, planes = rows.shape[0], qweight.shape[0], PLANES[rows.dtype]
    digits, step = split_planes(rows, planes) if made is None else made
    tile = max(TILE_SUMS // max(1, planes * count), LEAST_TILE)
    parts = []
    for start in range(0, outputs, tile):
        end = min(start + tile, outputs)
        sums = torch._int_mm(digits, qweight[start:end].t()).float().view(planes, count, end - start)
        part = sums[0]
        for place in range(1, planes):
            part.add_(sums[place], alpha=256**place)
        parts.append(part.mul_(step).mul_(scale[start:end]).to(rows.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def planes_of(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """`split_planes` of inputs [..., K] as rows, as many as their dtype needs."""
    return split_planes(inputs.reshape(-1, inputs.shape[-1]), PLANES[inputs.dtype])


def split_planes(rows: Tensor, planes: int) -> tuple[Tensor, Tensor]:
    """rows [M, K] -> digits [P*M, K] int8, lowest plane first, and step [M, 1] fp32.

    The fixed-point number is sum over p of digits[p] * 256^p in -128..127 each, at most 127 * 256^(P-1), and the row is
    that number times its step.
    """
    count, width = rows.shape
    largest = torch.linalg.vector_norm(rows, float("inf"), dim=-1, keepdim=True, dtype=torch.float32)
    step = largest.clamp_min_(SMALLEST) / (LARGEST * 256 ** (planes - 1))
    # 128 more in every plane makes its byte unsigned; the flipped top bit takes the 128 off again.
    middle = sum(128 << 8 * place for place in range(planes))
    number = (rows / step).round_().to(torch.int32).add_(middle).bitwise_xor_(middle)
    # The int32's bytes, lowest first (a little-endian machine, as x86 and ARM are).
    digits = number.view(torch.int8).as_strided((planes, count, width), (1, 4 * width, 4))
    return digits.reshape(planes * count, width), step
