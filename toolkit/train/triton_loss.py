"""The row losses of `loss.py` in Triton: losses, argmax and gradients of rows of scores in one launch on a GPU.

As separate operations they read and write a chunk of scores a dozen times. Here the scores are read from memory once;
the later passes find them in the GPU's cache.

Shapes: n rows, M rows of the teacher's distributions, D draft vocabulary.

    first pass    the largest score and its id, the sum of exponentials, p.z
    second pass   for losses of probabilities: the total variation of p and q, the sum of q where q < p
    last pass     gradients, which overwrite the scores
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.recipe_fields import LossName

BLOCK = 4096  # scores of one load
WARPS = 16  # with fewer, the registers cannot hold the sums of a block
SOFT, HARD, VARIATION, HYBRID, DSPARK = (tl.constexpr(kind) for kind in range(5))
HARD_SHARE = tl.constexpr(0.1)  # loss.CROSS_ENTROPY, which cannot be imported here
KINDS: dict[LossName, int] = {
    "soft_cross_entropy": 0,
    "hard_cross_entropy": 1,
    "total_variation": 2,
    "lk_hybrid": 3,
    "dspark": 4,
}


@triton.jit
def _sums(own, teacher, vocabulary, kind: tl.constexpr, block: tl.constexpr):
    """Sums over one row: the largest score, its lowest id, sum exp(z - largest), p.(z - largest), sum p log p."""
    lanes = tl.arange(0, block)
    at, high = lanes, tl.full((block,), float("-inf"), tl.float32)
    total, dot = tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32)
    mass, information = tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32)
    for start in range(0, vocabulary, block):
        here = start + lanes
        inside = here < vocabulary
        # fp32 right after the load, because Triton's interpreter computes wrong results in bf16.
        z = tl.load(own + here, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(high, z)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(high - base) + tl.exp(z - base)
        at = tl.where(z > high, here, at)
        high = higher
        if kind != HARD:
            p = tl.load(teacher + here, mask=inside, other=0.0)
            dot += p * tl.where(inside, z, 0.0)
            mass += p
            if kind == HYBRID:
                information += tl.where(p > 0, p * tl.log(tl.where(p > 0, p, 1.0)), 0.0)
    peak = tl.max(high, axis=0)
    best = tl.min(tl.where(high == peak, at, vocabulary - 1), axis=0)
    norm = tl.sum(total * tl.exp(high - peak), axis=0)
    # Shifted like the exponentials, so that a large p.z does not lose precision.
    shifted = tl.sum(dot, axis=0) - peak * tl.sum(mass, axis=0)
    return peak, best, norm, shifted, tl.sum(information, axis=0)


@triton.jit
def _distance(own, teacher, peak, norm, vocabulary, block: tl.constexpr):
    """Total variation of q and p, and the sum of q where q < p."""
    gap, less = tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32)
    for start in range(0, vocabulary, block):
        here = start + tl.arange(0, block)
        inside = here < vocabulary
        z = tl.load(own + here, mask=inside, other=float("-inf")).to(tl.float32)
        q, p = tl.exp(z - peak) / norm, tl.load(teacher + here, mask=inside, other=0.0)
        gap += tl.abs(q - p)
        less += tl.where(q < p, q, 0.0)
    return 0.5 * tl.sum(gap, axis=0), tl.sum(less, axis=0)


@triton.jit
def _score_rows(
    scores, probs, offsets, choice, weight, losses, best,
    score_stride, prob_stride, vocabulary, eta,
    kind: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    own, teacher = scores + row * score_stride, probs + tl.load(offsets + row) * prob_stride
    factor = tl.load(weight + row).to(tl.float32)
    peak, at, norm, shifted, information = _sums(own, teacher, vocabulary, kind, block)
    tl.store(best + row, at.to(tl.int64))

    label, apart, short, share = 0, 0.0, 0.0, HARD_SHARE
    if kind == VARIATION or kind == HYBRID or kind == DSPARK:
        apart, short = _distance(own, teacher, peak, norm, vocabulary, block)
    if kind == SOFT:
        loss = tl.log(norm) - shifted
    elif kind == HARD or kind == DSPARK:
        label = tl.maximum(tl.load(choice + row), 0)
        loss = tl.log(norm) + peak - tl.load(own + label).to(tl.float32)
        if kind == DSPARK:
            loss = HARD_SHARE * loss + (1.0 - HARD_SHARE) * apart
    elif kind == VARIATION:
        loss = apart
    else:
        share = tl.exp(-eta * (1.0 - apart))
        loss = share * (information + tl.log(norm) - shifted) + (1.0 - share) * apart
    tl.store(losses + row, loss)

    tl.debug_barrier()  # the label's score must be read before another thread overwrites it
    for start in range(0, vocabulary, block):
        here = start + tl.arange(0, block)
        inside = here < vocabulary
        q = tl.exp(tl.load(own + here, mask=inside, other=float("-inf")).to(tl.float32) - peak) / norm
        if kind == HARD:
            gradient = q - tl.where(here == label, 1.0, 0.0)
        else:
            p = tl.load(teacher + here, mask=inside, other=0.0)
            gradient = q - tl.where(here == label, 1.0, 0.0) if kind == DSPARK else q - p
            if kind != SOFT:
                change = q * short - tl.where(q < p, q, 0.0)
                gradient = change if kind == VARIATION else share * gradient + (1.0 - share) * change
        tl.store(own + here, factor * gradient, mask=inside)


def score_rows(
    name: LossName, scores: Tensor, probs: Tensor, offsets: Tensor, choice: Tensor, weight: Tensor, eta: float
) -> tuple[Tensor, Tensor]:
    """Losses [n] fp32 and argmax [n] of scores [n, D]. The scores are overwritten with weight * (gradient of the loss).

    offsets [n]: the row of probs [M, D] fp32 for each row of scores. choice [n]: right ids, -1 for none. weight [n].
    eta: of the LK hybrid. Of equal scores the lowest id is the argmax. Raises `ValueError` if scores or probs are not
    contiguous along their last dimension.
    """
    if scores.stride(1) != 1 or probs.stride(1) != 1:
        raise ValueError(
            f"scores and probs have strides {scores.stride()} and {probs.stride()}; the last one must be 1: call "
            "contiguous()"
        )
    losses = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
    best = torch.empty(len(scores), dtype=torch.long, device=scores.device)
    if len(scores):
        _score_rows[(len(scores),)](
            scores, probs, offsets, choice, weight, losses, best,
            scores.stride(0), probs.stride(0), scores.shape[1], float(eta),
            kind=KINDS[name], block=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return losses, best
