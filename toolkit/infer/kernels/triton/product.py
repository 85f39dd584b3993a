"""`batch_invariant.product` in Triton: a matrix product that gives a row the same bits beside any other rows.

A library chooses tiles, and how many parts it splits the sums into, by the number of rows. Here the weight's shape and
the dtype alone choose the tile. One program adds all of an output's products, in ascending order of the inputs:

    x [M, K]  tiles of `rows` x `inputs`      weight [N, K]  tiles of `outputs` x `inputs`
    sums = 0; for each tile of inputs: sums += x_tile @ weight_tile^T

Rows of a tile that do not exist are 0 and not stored. Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.infer.kernels.triton.paged_attention import PRECISION, UPCAST

# By bytes of an element: rows and inputs of a tile. fp32 has fewer, since tf32x3 keeps two parts of every factor.
TILE_ROWS, TILE_INPUTS = {2: 64, 4: 32}, {2: 64, 4: 32}
NARROW, MANY, WIDE = 32, 8192, {2: 128, 4: 64}  # outputs of a tile up to MANY outputs, so that all processors have work


@triton.jit(do_not_specialize=["count"])
def _product(
    x, weight, bias, out, count, width, size, x_row, weight_out, weight_in, rows: tl.constexpr, outputs: tl.constexpr,
    inputs: tl.constexpr, upcast: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * outputs + tl.arange(0, outputs)
    there, stored = row < count, column < size
    x += row.to(tl.int64)[:, None] * x_row
    weight += column.to(tl.int64)[None, :] * weight_out
    sums = tl.zeros((rows, outputs), tl.float32)
    for first in range(0, width, inputs):
        at = first + tl.arange(0, inputs)
        inside = at < width
        left = tl.load(x + at[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        right = tl.load(
            weight + at.to(tl.int64)[:, None] * weight_in, mask=inside[:, None] & stored[None, :], other=0.0
        )
        if upcast:
            left, right = left.to(tl.float32), right.to(tl.float32)
        sums = tl.dot(left, right, sums, input_precision=PRECISION)
    if bias is not None:
        sums += tl.load(bias + column, mask=stored, other=0.0).to(tl.float32)[None, :]
    begin = out + row.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(begin, sums.to(out.dtype.element_ty), mask=there[:, None] & stored[None, :])


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K], weight [N, K] of any strides, bias [N], all of one dtype -> [..., N]."""
    size, width = weight.shape
    rows = x.reshape(-1, width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    tile, outputs = TILE_ROWS[x.element_size()], NARROW if size <= MANY else WIDE[x.element_size()]
    if len(rows):
        _product[(triton.cdiv(len(rows), tile), triton.cdiv(size, outputs))](
            rows, weight, bias, out, len(rows), width, size, rows.stride(0), *weight.stride(), rows=tile,
            outputs=outputs, inputs=TILE_INPUTS[x.element_size()], upcast=UPCAST, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out
