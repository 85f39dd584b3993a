"""Decide whether the first difference between two runs of one target is a near-tie or an error of the engine.

A verify step over n rows sums the same products in another order than a step over one row, so the logits differ by
rounding. A divergence is a near-tie iff both tokens are within that rounding of being chosen, judged by the logits of
one plain forward over the shared prefix. Otherwise it is an error. Sampled answers are judged in float32 alone: in 16
bits the bound would admit odds that are off by a factor of two, so that an error could pass.

The difference between runs of the gap between two logits of a row is bounded by

    noise = factor(dtype) * eps(dtype) * max |logit of the row|

16-bit types have factor 4: storing a logit rounds it by at most eps/2 of its size; two logits in each of two runs make
2 * eps * max. The hidden state is rounded in every layer and adds as much again. float32 has factor 16: storing is
exact compared with the sums before it, whose errors grow with the square root of (layers x terms). Observed on the demo
target (one-row steps against one forward, gaps between the 8 largest logits of 120 rows): bfloat16 rms 0.5 and at most
2.8, float32 rms 3.2 and at most 10.5, in units of eps * max |logit|.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from toolkit.targets.target import Target

NOISE_FACTOR = {torch.bfloat16: 4.0, torch.float16: 4.0, torch.float32: 16.0}
NOISE_RULE = (
    "the two tokens' logits lie within factor * eps(dtype) * max |logit| of the row's best, factor 4 in 16 bit and 16 "
    "in float32; at temperature > 0, in float32 alone: the random number lies that close (in odds) to both tokens' "
    "intervals of the CDF"
)
SAMPLED_EPS = 2**-20  # the coarsest rounding in which sampled answers are judged


@dataclass(frozen=True)
class Divergence:
    """The first token at which a speculative answer differs from plain decoding's.

    `position` is an index into the output tokens. The logits and `noise` are None when one answer ends where the other
    continues, which rounding cannot explain, and for sampled answers in 16 bits, whose near_tie is None: not judged.
    """

    position: int
    plain_token: int | None
    speculative_token: int | None
    plain_logit: float | None
    speculative_logit: float | None
    top_logit: float | None
    noise: float | None
    near_tie: bool | None


def logit_noise(dtype: torch.dtype | None, magnitude: float) -> float:
    """Return the bound on the difference between runs of a gap between two logits.

    magnitude: the largest |logit| of the row. Raises ValueError for a dtype without a known bound.
    """
    if dtype is None or dtype not in NOISE_FACTOR:
        known = ", ".join(str(known) for known in NOISE_FACTOR)
        raise ValueError(f"dtype is {dtype}, which has no known rounding bound; expected one of {known}")
    return NOISE_FACTOR[dtype] * torch.finfo(dtype).eps * magnitude


def find_divergence(
    plain: Sequence[int],
    speculative: Sequence[int],
    logits_after: Callable[[Sequence[int]], torch.Tensor],
    dtype: torch.dtype | None,
    temperature: float = 0.0,
    uniform_at: Callable[[int], float] | None = None,
) -> Divergence | None:
    """Find the first divergence of two answers and decide whether it is a near-tie; None when they are equal.

    `logits_after(output_ids)` returns the target's logits [V] after the prompt and these output tokens. At a
    temperature above 0, `uniform_at(position)` is the random number in [0, 1) that drew the output token at `position`
    in both runs.
    """
    pairs = enumerate(zip_longest(plain, speculative))
    position, left, right = next(((at, one, other) for at, (one, other) in pairs if one != other), (None, None, None))
    if position is None:
        return None
    if left is None or right is None:
        return Divergence(position, left, right, None, None, None, None, near_tie=False)
    if temperature > 0 and dtype is not None and torch.finfo(dtype).eps > SAMPLED_EPS:
        return Divergence(position, left, right, None, None, None, None, near_tie=None)
    row = logits_after(plain[:position]).double()
    noise = logit_noise(dtype, row.abs().max().item())
    if temperature == 0.0:
        near = greedy_near_tie(row, (left, right), noise)
    else:
        assert uniform_at is not None, "a temperature above 0 needs the random numbers that drew the tokens"
        near = sampled_near_tie(row / temperature, (left, right), noise / temperature, uniform_at(position))
    return Divergence(position, left, right, row[left].item(), row[right].item(), row.max().item(), noise, near)


def greedy_near_tie(row: torch.Tensor, tokens: Sequence[int], noise: float) -> bool:
    """Return whether each of `tokens` is within `noise` of the largest logit of `row` [V]."""
    top = row.max().item()
    return all(top - row[token].item() <= noise for token in tokens)


def sampled_near_tie(row: torch.Tensor, tokens: Sequence[int], noise: float, uniform: float) -> bool:
    """Return whether each of `tokens` may be drawn from softmax(`row` [V]) by `uniform`, within rounding.

    Tokens are drawn by the inverse CDF in token-id order. Changing gaps by at most `noise` multiplies the odds of any
    set of tokens by at most e^noise. So a token may be drawn when the odds of `uniform` are within that factor of the
    ends of its interval of the CDF. In float32 this is sharp: a logit of 32 has a noise of 6e-5. In 16 bits it is not:
    a logit of 32 has a noise of 1, which moves a probability of 1/2 to 0.73.
    """
    cdf = torch.softmax(row, dim=-1).cumsum(dim=-1).clamp(max=1.0)
    for token in tokens:
        low = _with_odds(cdf[token - 1].item() if token > 0 else 0.0, -noise)
        high = _with_odds(cdf[token].item(), noise)
        if not low <= uniform <= high:
            return False
    return True


def _with_odds(probability: float, log_factor: float) -> float:
    """Return the probability whose odds are e^log_factor times those of `probability`."""
    raised = probability * math.exp(log_factor)
    return raised / (raised + 1 - probability)


@torch.inference_mode()
def plain_logits(target: Target, ids: Sequence[int]) -> torch.Tensor:
    """Compute the logits [V] after `ids` by one forward of the target without a cache."""
    batch = torch.tensor([list(ids)], dtype=torch.long, device=target.device)
    hidden = target.body(input_ids=batch, use_cache=False).last_hidden_state[0, -1]
    return target.logits(hidden)
