"""`reference` in Triton: where top-k, top-p and min-p cut, draws, and uniform numbers.

Shapes: M rows, V vocabulary, P parts of a row's vocabulary, each of one program.

The least logit kept is searched by its bits, without a sort, in passes over the row that are launches: first all passes
of top-k, then those of top-p. A pass gives each part's number of tokens (top-k), or sum of their probabilities (top-p),
that are at least as large as each of 16 candidates. The next pass adds these up over the parts, always in one order. So
each pass finds four bits:

    low      c1       c2       c3    ..  c15
    enough   enough   too few            too few      next: c1 .. c2 - 1
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.infer.kernels.triton.launch import dependent, wait_for_earlier
from toolkit.infer.kernels.triton.top_tokens import best_of_parts

PART = 2048  # tokens of a program
WAYS = tl.constexpr(16)
PASSES = tl.constexpr(8)  # of each search
LOWEST = tl.constexpr(-2139095041)  # the key of -inf
WANTED = tl.constexpr(2 * 8)  # where the sum that top-p wants lies behind the bounds of the passes


@triton.jit
def _value(key):
    """int64 -> the fp32 number that has this place in the order of all; nan above the largest."""
    bits = tl.minimum(key, 0x7FFFFFFF).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _top(peaks, row, parts, wide: tl.constexpr):
    at = tl.arange(0, wide)
    return tl.max(tl.load(peaks + row * parts + at, mask=at < parts, other=float("-inf")), axis=0)


@triton.jit
def _distance(turn):
    """The bits between two candidates of a pass."""
    return 28 - 4 * (turn % PASSES)


@triton.jit
def _narrowed(bounds, sums, last, top_k, top_p, parts, wide: tl.constexpr):
    """The lower bound that the pass `last` leaves: the largest candidate for which there is enough."""
    part, way = tl.arange(0, wide), tl.arange(0, WAYS)
    places = (last % 2 * parts + part[:, None]) * WAYS + way[None, :]
    found = tl.sum(tl.load(sums + places, mask=part[:, None] < parts, other=0.0).to(tl.float64), axis=0)
    wanted = top_k.to(tl.float64)
    if last == PASSES:  # its lowest candidate has all that top-k left
        wanted = tl.max(found, axis=0) * top_p
        tl.store(bounds + WANTED, wanted)
    elif last > PASSES:
        wanted = tl.load(bounds + WANTED)
    best = tl.max(tl.where(found >= wanted, way, 0), axis=0).to(tl.int64)
    return tl.load(bounds + last).to(tl.int64) + (best << _distance(last))


@triton.jit(do_not_specialize=["size", "turn"])
def _search(
    logits, peaks, top_ks, top_ps, bounds, sums, row_stride, size, turn, part_size: tl.constexpr, wide: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """The pass `turn`; all programs of a row store the same bound."""
    wait_for_earlier(pdl)
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    by_mass = turn >= PASSES
    if (by_mass & (top_p < 1.0)) | ((turn < PASSES) & (top_k > 0)):
        bounds += row * (WANTED + 1)
        sums += row * 2 * parts * WAYS
        low = row * 0 + LOWEST
        if (turn % PASSES > 0) | (by_mass & (top_k > 0)):
            low = _narrowed(bounds, sums, turn - 1, top_k, top_p, parts, wide)
        tl.store(bounds + turn, low.to(tl.float64))
        way, at = tl.arange(0, WAYS), part * part_size + tl.arange(0, part_size)
        values = tl.load(logits + row * row_stride + at, mask=at < size, other=float("-inf"))
        values = tl.where(values == values, values, float("-inf"))
        weights = tl.where(by_mass, tl.exp(values - _top(peaks, row, parts, wide)), (at < size).to(tl.float32))
        large = values[None, :] >= _value(low + (way.to(tl.int64) << _distance(turn)))[:, None]
        found = tl.sum(tl.where(large, weights[None, :], 0.0), axis=1)
        tl.store(sums + (turn % 2 * parts + part) * WAYS + way, found)


@triton.jit
def _floors(peaks, top_ks, top_ps, min_ps, bounds, sums, floors, parts, wide: tl.constexpr, pdl: tl.constexpr):
    wait_for_earlier(pdl)
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    floor = _top(peaks, row, parts, wide) + tl.log(tl.load(min_ps + row))
    if (top_k > 0) | (top_p < 1.0):
        last = tl.where(top_p < 1.0, 2 * PASSES, PASSES) - 1
        low = _narrowed(bounds + row * (WANTED + 1), sums + row * 2 * parts * WAYS, last, top_k, top_p, parts, wide)
        floor = tl.maximum(floor, _value(low))
    tl.store(floors + row, floor)


def least_kept(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """logits [M, V] fp32, top_k, top_p, min_p [M] -> the least logit kept, [M, 1]."""
    rows, size = logits.shape
    assert logits.stride(1) == 1 or size == 1
    floors = torch.empty(rows, 1, dtype=torch.float32, device=logits.device)
    if not rows:
        return floors
    top_k, top_p, min_p = (one.contiguous() for one in (top_k, top_p, min_p))
    peaks, _ = best_of_parts(logits, PART)
    parts = peaks.shape[1]
    bounds = torch.empty(rows, WANTED.value + 1, dtype=torch.float64, device=logits.device)
    sums = torch.empty(rows, 2, parts, WAYS.value, dtype=torch.float32, device=logits.device)  # of the last two passes
    wide, early = triton.next_power_of_2(parts), dependent(logits)
    for turn in range(2 * PASSES.value):
        _search[(rows, parts)](
            logits, peaks, top_k, top_p, bounds, sums, logits.stride(0), size, turn, part_size=PART, wide=wide,
            num_warps=8, **early,
        )  # fmt: skip
    _floors[(rows,)](peaks, top_k, top_p, min_p, bounds, sums, floors, parts, wide=wide, **early)
    return floors


@triton.jit
def _weights_at(weights, at, size):
    return tl.load(weights + at, mask=at < size, other=0.0).to(tl.float64)


@triton.jit(do_not_specialize=["row_stride", "size"])
def _sum_parts(weights, sums, row_stride, size, part_size: tl.constexpr, pdl: tl.constexpr):
    wait_for_earlier(pdl)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inside = _weights_at(weights + row * row_stride, part * part_size + tl.arange(0, part_size), size)
    tl.store(sums + row * tl.num_programs(1) + part, tl.sum(inside, axis=0))


@triton.jit(do_not_specialize=["row_stride", "size", "parts"])
def _draw(
    weights, sums, numbers, tokens, row_stride, size, parts, part_size: tl.constexpr, wide: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(pdl)
    row = tl.program_id(0).to(tl.int64)
    at, part = tl.arange(0, part_size), tl.arange(0, wide)
    mass = tl.load(sums + row * parts + part, mask=part < parts, other=0.0)
    # Below the total by more than the rounding of sums in another order.
    goal = tl.minimum(tl.load(numbers + row), 1.0 - 8.881784197001252e-16) * tl.sum(mass, axis=0)
    begins = tl.cumsum(mass, axis=0) - mass
    # The last part with any weight that begins at or below the goal.
    chosen_part = tl.max(tl.where((begins <= goal) & (mass > 0), part, 0), axis=0)
    before = tl.sum(tl.where(part == chosen_part, begins, 0.0), axis=0)
    inside = _weights_at(weights + row * row_stride, chosen_part * part_size + at, size)
    above = (before + tl.cumsum(inside, axis=0) > goal) & (inside > 0)
    chosen = tl.min(tl.where(above, at, part_size), axis=0)
    last = tl.max(tl.where(inside > 0, at, 0), axis=0)
    tl.store(tokens + row, (chosen_part * part_size + tl.where(chosen < part_size, chosen, last)).to(tl.int64))


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """By the inverse CDF: weights [M, V] >= 0 (each row with a positive sum), u [M] fp64 in [0, 1) -> indices [M]."""
    rows, size = weights.shape
    assert weights.stride(1) == 1 or size == 1
    tokens, parts = torch.empty(rows, dtype=torch.long, device=weights.device), triton.cdiv(size, PART)
    sums = torch.empty(rows, parts, dtype=torch.float64, device=weights.device)
    if rows:
        settings = {"part_size": PART, "num_warps": 8, **dependent(weights)}
        _sum_parts[(rows, parts)](weights, sums, weights.stride(0), size, **settings)
        wide = triton.next_power_of_2(parts)
        _draw[(rows,)](weights, sums, u.contiguous(), tokens, weights.stride(0), size, parts, wide=wide, **settings)
    return tokens


@triton.jit
def _mix(x):
    """SplitMix64's output function of a state (uint64)."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["count", "width", "seed_row", "seed_one", "position_row", "position_one"])
def _uniform(
    seeds, positions, numbers, count, width, seed_row, seed_one, position_row, position_one, block: tl.constexpr
):
    at = tl.program_id(0) * block + tl.arange(0, block)
    row, one = at // width, at % width
    seed = tl.load(seeds + row * seed_row + one * seed_one, mask=at < count, other=0).to(tl.uint64, bitcast=True)
    place = tl.load(positions + row * position_row + one * position_one, mask=at < count, other=0)
    x = _mix(_mix(seed) + place.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15)
    tl.store(numbers + at, (x >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16, mask=at < count)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """SplitMix64 of (seed, position), int64 of one or two dimensions that broadcast -> float64 in [0, 1)."""
    seeds, positions = torch.broadcast_tensors(seeds, positions)
    numbers = torch.empty(seeds.shape, dtype=torch.float64, device=seeds.device)
    strides = [one.stride() if one.dim() == 2 else (0, *one.stride()) for one in (seeds, positions)]
    count = numbers.numel()
    if count:
        _uniform[(triton.cdiv(count, 128),)](
            seeds, positions, numbers, count, seeds.shape[-1], *strides[0], *strides[1], block=128, num_warps=1
        )
    return numbers
