"""`F.linear` for few rows in Triton: reads the weights at the speed of the memory, and does what follows in one launch.

    x [M, K]   weight [N, K]  tiles of `outputs` x `inputs`, the wide operand of the matrix unit; x^T has 16 columns
    sums [outputs, 16] = 0; for each tile of a program's inputs: sums += weight_tile @ x_tile^T

Where N alone gives too few programs, `split` programs share a tile of outputs, each with a range of the inputs. Each
stores its fp32 sums; the last to arrive adds them in ascending order of the ranges, so no result depends on timing.

A row has the same bits beside any other rows, up to 16 and again from 17 on: the tile is chosen by the weight's shape
and dtype, rows that do not exist are 0, and a column of the matrix unit's result depends on its own column only.

Dependent launch (`pdl`): the next kernel of the stream may start while this one ends. It prefetches its first weights,
which never change, and waits for all that came before it until it reads or writes anything else.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from toolkit.infer.kernels.triton.paged_attention import UPCAST

MAX_ROWS = 32
PROCESSORS = 132  # of an H100
SPLIT_SUMS, SPLIT_TILES = 2**22, 2**14  # fp32 numbers and counters of a device that programs of one tile share


@dataclass(frozen=True)
class Tile:
    """outputs, inputs: of the weight, held at once in one of `stages` buffers of a program of `warps` warps.
    split: programs that share the outputs' sums. ahead: tiles of inputs that a program prefetches before it waits;
    0 or a power of two."""

    outputs: int
    inputs: int
    split: int = 1
    warps: int = 4
    stages: int = 4
    ahead: int = 4


def tile_of(size: int, rows: int, itemsize: int) -> Tile:
    """The tile of a weight [size, K] of `itemsize` bytes each for so many rows: the rule that an H100 measured fastest,
    or within 5 % of it, for each product of Llama-3.1-8B and its head (2026-11-27).

    Up to 16 rows narrow tiles, whose programs run all at once where there are few. More rows make x a larger part of
    what a narrow tile reads: wide tiles, and parts of the sums where N gives too few programs.
    """
    if rows > 16:
        split = 1
        while triton.cdiv(size, 64) * split < 3 * PROCESSORS // 2 and split < 8:
            split *= 2
        return Tile(64, 256 // itemsize, split)
    if triton.cdiv(size, 16) <= PROCESSORS // 2:
        return Tile(32, 256 // itemsize, split=8, warps=2, stages=9 if itemsize == 2 else 6)
    few = triton.cdiv(size, 16) <= 2 * PROCESSORS
    if itemsize == 1:
        return Tile(16, 512, warps=2, stages=5) if few else Tile(32, 512, warps=2, stages=4)
    return Tile(16, 256, warps=2, stages=7) if few else Tile(16, 256, warps=1, stages=5)


@triton.jit
def _epilogue(
    sums, column, row, stored, there, residual, scales, out, size, out_size, residual_row, outputs: tl.constexpr,
    rows: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    """Round as separate operations in the dtype of `out` do. column: of the weight, for gated its gates' first."""
    dtype = out.dtype.element_ty
    if scales is not None:
        sums *= tl.load(scales + column)[:, None]
    numbers = sums.to(dtype).to(tl.float32)
    if gated:
        half: tl.constexpr = outputs // 2
        gate, up = tl.split(numbers.reshape(2, half, rows).permute(1, 2, 0))
        numbers = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    if residual is not None:
        at = residual + row.to(tl.int64)[None, :] * residual_row + stored[:, None]
        numbers += tl.load(at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64)[None, :] * out_size + stored[:, None], numbers.to(dtype), mask=there)


@triton.jit(do_not_specialize=["count"])
def _skinny(
    x, weight, residual, scales, out, parts, arrived, count, size, x_row, residual_row, width: tl.constexpr,
    rows: tl.constexpr, outputs: tl.constexpr, inputs: tl.constexpr, split: tl.constexpr, stages: tl.constexpr,
    ahead: tl.constexpr, gated: tl.constexpr, pdl: tl.constexpr, upcast: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    row, within = tl.arange(0, rows), tl.arange(0, outputs)
    if gated:  # the upper half of a tile is of gates, the lower of the ups beside them
        half: tl.constexpr = outputs // 2
        out_size = size // 2
        column = tl.minimum(tile * half + within % half, out_size - 1) + within // half * out_size
        stored = tile * half + tl.arange(0, half)
    else:
        out_size = size
        column = tl.minimum(tile * outputs + within, size - 1)
        stored = tile * outputs + within
    blocks: tl.constexpr = (width + inputs - 1) // inputs
    share: tl.constexpr = (blocks + split - 1) // split
    first = part * share
    last = tl.minimum(first + share, blocks)
    weight += column.to(tl.int64)[:, None] * width
    if pdl:
        gdc_launch_dependents()
        if ahead > 0:
            line: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
            begin = first * inputs + tl.arange(0, ahead * inputs // line) * line
            lines = weight + tl.minimum(begin, width - 1)[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines.to(tl.int64)], tl.int32, False, 1
            )
        gdc_wait()
    x += row.to(tl.int64)[None, :] * x_row
    given = row[None, :] < count
    sums = tl.zeros((outputs, rows), tl.float32)
    for block in tl.range(first, last, num_stages=stages):
        at = block * inputs + tl.arange(0, inputs)
        if width % inputs == 0:
            left = tl.load(weight + at[None, :], eviction_policy="evict_first")
            right = tl.load(x + at[:, None], mask=given, other=0.0)
        else:
            left = tl.load(weight + at[None, :], mask=at[None, :] < width, other=0.0, eviction_policy="evict_first")
            right = tl.load(x + at[:, None], mask=given & (at[:, None] < width), other=0.0)
        if upcast:
            left, right = left.to(tl.float32), right.to(tl.float32)
        elif left.dtype != right.dtype:  # float8 to bfloat16 itself takes an instruction of a sixteenth of the speed
            left = left.to(tl.float16).to(tl.float32).to(right.dtype)
        sums = tl.dot(left, right, sums)
    there = given & (stored[:, None] < out_size)
    if split == 1:
        _epilogue(
            sums, column, row, stored, there, residual, scales, out, size, out_size, residual_row, outputs, rows, gated
        )
    else:
        parts += tile * split * outputs * rows + row[None, :] * outputs + within[:, None]
        tl.store(parts + part * outputs * rows, sums, mask=given)
        tl.debug_barrier()  # all threads have stored before one says so
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == split - 1:
            tl.store(arrived + tile, 0)
            sums = tl.zeros((outputs, rows), tl.float32)
            for other in tl.static_range(split):
                sums += tl.load(parts + other * outputs * rows, mask=given, other=0.0, cache_modifier=".cg")
            _epilogue(
                sums, column, row, stored, there, residual, scales, out, size, out_size, residual_row, outputs, rows,
                gated,
            )  # fmt: skip


@cache
def _shared(device: torch.device) -> tuple[Tensor, Tensor]:
    """Sums and counters that the programs of a tile share. The counters are 0 between launches."""
    sums = torch.empty(SPLIT_SUMS, dtype=torch.float32, device=device)
    return sums, torch.zeros(SPLIT_TILES, dtype=torch.int32, device=device)


def skinny_product(
    x: Tensor, weight: Tensor, *, residual: Tensor | None = None, gated: bool = False, scales: Tensor | None = None,
    pdl: bool = False, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """x [M, K] @ weight [N, K]^T -> [M, N], M <= 32, in x's dtype, rounded as F.linear and then the rest would be.

    residual [M, N]: is added. gated: the first N / 2 rows of the weight are gates, the rest ups; silu(gate) * up,
    [M, N / 2]. scales [N] fp32: factors of the weight's rows, for float8_e4m3fn. pdl: start while the kernel before
    ends; needs compute capability 9.0. Launches of one device must follow each other in one stream where tiles are
    split; one must have run before a graph is captured.
    """
    (count, width), (size, _) = x.shape, weight.shape
    assert count <= MAX_ROWS and x.stride(1) == 1 and weight.is_contiguous(), (x.shape, x.stride(), weight.stride())
    assert residual is None or (residual.stride(1) == 1 and not gated)
    tile = tile or tile_of(size, count, weight.element_size())
    out = torch.empty(count, size // 2 if gated else size, dtype=x.dtype, device=x.device)
    rows, tiles = 16 if count <= 16 else 32, triton.cdiv(size, tile.outputs)
    parts, arrived = _shared(x.device) if tile.split > 1 else (None, None)
    assert tile.split == 1 or (tiles <= SPLIT_TILES and tiles * tile.split * tile.outputs * rows <= SPLIT_SUMS), tile
    pdl = pdl and not UPCAST  # the interpreter runs one launch after the other
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    _skinny[(tiles, tile.split)](
        x, weight, residual, scales, out, parts, arrived, count, size, x.stride(0),
        0 if residual is None else residual.stride(0), width=width, rows=rows, outputs=tile.outputs,
        inputs=tile.inputs, split=tile.split, stages=tile.stages, ahead=tile.ahead, gated=gated, pdl=pdl,
        upcast=UPCAST, num_warps=tile.warps, **options,
    )  # fmt: skip
    return out
