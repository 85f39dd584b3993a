"""`sampling_reference` in Triton: where top-k, top-p and min-p cut, draws, and uniform numbers.

Shapes: M rows, V vocabulary.

The least logit kept is searched by its bits, without a sort. Of 7 candidates between two bounds a pass over the row
counts the tokens (top-k), or adds their probabilities (top-p), that are at least as large. So each pass leaves an
eighth of the candidates, and 11 passes leave one of 2^32:

    low      c1       c2       c3       c4       c5       c6       c7       high
             enough   enough   enough   too few                                        next: c3 .. c4 - 1
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024  # logits per load
PASSES = tl.constexpr(11)


@triton.jit
def _key(values):
    """fp32 -> int64 in the same order."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _value(key):
    """The fp32 number of a key of `_key`."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _load(logits, at, size):
    values = tl.load(logits + at, mask=at < size, other=float("-inf"))
    return tl.where(values == values, values, float("-inf"))


@triton.jit
def _search(logits, size, top, wanted, by_mass: tl.constexpr, chunk: tl.constexpr):
    """The largest key for which the tokens with this key or a larger one are `wanted`: in number, or in the sum of
    e^(logit - top)."""
    low, high = _key(tl.minimum(top, float("-inf"))), _key(top)
    number = tl.arange(0, 8).to(tl.int64)
    for _ in range(PASSES):
        step = (high - low) // 8 + 1
        candidates = low + step * number  # the first is the low bound, which is always enough
        found = tl.zeros((8,), tl.float64)
        for first in range(0, size, chunk):
            at = first + tl.arange(0, chunk)
            values = _load(logits, at, size)
            weights = tl.exp(values - top) if by_mass else (at < size).to(tl.float32)
            large = _key(values)[None, :] >= candidates[:, None]
            found += tl.sum(tl.where(large, weights[None, :], 0.0), axis=1).to(tl.float64)
        enough = (found >= wanted) | (number == 0)
        low = tl.max(tl.where(enough, candidates, low), axis=0)
        high = tl.minimum(high, low + step - 1)
    return low


@triton.jit(do_not_specialize=["size"])
def _least_kept(logits, top_ks, top_ps, min_ps, floors, row_stride, size, chunk: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    best = tl.full((chunk,), float("-inf"), tl.float32)
    for first in range(0, size, chunk):
        best = tl.maximum(best, _load(logits, first + tl.arange(0, chunk), size))
    top = tl.max(best, axis=0)
    floor = top + tl.log(min_p)
    limit = tl.minimum(top, float("-inf"))
    if top_k > 0:
        limit = _value(_search(logits, size, top, tl.minimum(top_k, size).to(tl.float64), False, chunk))
        floor = tl.maximum(floor, limit)
    if top_p < 1.0:
        total = tl.zeros((chunk,), tl.float64)
        for first in range(0, size, chunk):
            values = _load(logits, first + tl.arange(0, chunk), size)
            total += tl.where(values >= limit, tl.exp(values - top), 0.0).to(tl.float64)
        wanted = tl.sum(total, axis=0) * top_p
        floor = tl.maximum(floor, _value(_search(logits, size, top, wanted, True, chunk)))
    tl.store(floors + row, floor)


def least_kept(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, widths: Sequence[int]) -> Tensor:
    """logits [M, V] fp32, top_k, top_p, min_p [M] -> the least logit kept, [M, 1]. The kernel does not read widths."""
    rows, size = logits.shape
    assert logits.stride(1) == 1 or size == 1
    floors = torch.empty(rows, 1, dtype=torch.float32, device=logits.device)
    if rows:
        _least_kept[(rows,)](
            logits, *(one.contiguous() for one in (top_k, top_p, min_p)), floors, logits.stride(0), size, chunk=CHUNK,
            num_warps=8,
        )  # fmt: skip
    return floors


@triton.jit
def _weights_at(weights, at, size):
    return tl.load(weights + at, mask=at < size, other=0.0).to(tl.float64)


@triton.jit(do_not_specialize=["row_stride", "size"])
def _draw(weights, numbers, tokens, row_stride, size, chunk: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weights += row * row_stride
    at = tl.arange(0, chunk)
    lanes = tl.zeros((chunk,), tl.float64)
    for first in range(0, size, chunk):
        lanes += _weights_at(weights, first + at, size)
    total = tl.sum(lanes, axis=0)
    # Below the total by more than the rounding of sums in another order.
    goal = tl.minimum(tl.load(numbers + row), 1.0 - 8.881784197001252e-16) * total
    running, before, start = total * 0.0, total * 0.0, size * 0
    for first in range(0, size, chunk):  # the last chunk with any weight that begins at or below the goal
        mass = tl.sum(_weights_at(weights, first + at, size), axis=0)
        begins = (running <= goal) & (mass > 0)
        start, before = tl.where(begins, first, start), tl.where(begins, running, before)
        running += mass
    inside = _weights_at(weights, start + at, size)
    above = (before + tl.cumsum(inside, axis=0) > goal) & (inside > 0)
    chosen = tl.min(tl.where(above, at, chunk), axis=0)
    last = tl.max(tl.where(inside > 0, at, 0), axis=0)
    tl.store(tokens + row, (start + tl.where(chosen < chunk, chosen, last)).to(tl.int64))


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """By the inverse CDF: weights [M, V] >= 0 (each row with a positive sum), u [M] fp64 in [0, 1) -> indices [M]."""
    rows, size = weights.shape
    assert weights.stride(1) == 1 or size == 1
    tokens = torch.empty(rows, dtype=torch.long, device=weights.device)
    if rows:
        _draw[(rows,)](weights, u.contiguous(), tokens, weights.stride(0), size, chunk=CHUNK, num_warps=8)
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
