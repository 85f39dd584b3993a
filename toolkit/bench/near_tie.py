"""Where two runs of the same target part: was it a near-tie, or is one of them wrong?

A verify of n rows adds the same products in another order than a step of one row, so its logits differ by rounding. A
divergence is a near-tie iff, in one plain forward over the shared prefix, both runs' tokens could have been chosen
within that rounding; otherwise it is an error of the engine.

The noise of a gap between two logits of one row, run against run, is bounded by

    noise = factor(dtype) * eps(dtype) * max |logit of the row|

16-bit types, factor 4: a logit is rounded to the type when it is written, by at most eps/2 of itself; two logits in
each of two runs make 2 * eps * max. The hidden state that they are read from is rounded in every layer and adds as
much again. float32, factor 16: there the write is exact against the sums before it, whose errors grow with the root of
(layers x terms). Observed on the demo target, one-row steps against one forward, gaps between the 8 best logits of 120
rows: bfloat16 rms 0.5 and at most 2.8, float32 rms 3.2 and at most 10.5 (in units of eps * max |logit|).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from toolkit.targets.load import Target

NOISE_FACTOR = {torch.bfloat16: 4.0, torch.float16: 4.0, torch.float32: 16.0}
NOISE_RULE = (
    "the two tokens' logits lie within factor * eps(dtype) * max |logit| of the row's best, factor 4 in 16 bit and 16 "
    "in float32; at temperature > 0, the random number lies that close (in odds) to both tokens' intervals of the CDF"
)


@dataclass(frozen=True)
class Divergence:
    """The first token at which a speculative answer parts from plain decoding's.

    `position` counts output tokens; the logits and `noise` are None when one answer just ends where the other goes on,
    which rounding cannot explain.
    """

    position: int
    plain_token: int | None
    speculative_token: int | None
    plain_logit: float | None
    speculative_logit: float | None
    top_logit: float | None
    noise: float | None
    near_tie: bool


def first_divergence(plain: Sequence[int], speculative: Sequence[int]) -> int | None:
    """Index of the first differing token, or of the shorter one's end; None when the sequences are equal."""
    for index, (left, right) in enumerate(zip(plain, speculative, strict=False)):
        if left != right:
            return index
    return None if len(plain) == len(speculative) else min(len(plain), len(speculative))


def logit_noise(dtype: torch.dtype | None, magnitude: float) -> float:
    """Largest difference, from run to run, of the gap between two logits in a row whose largest |logit| is `magnitude`.

    Raises ValueError for a dtype without a stated bound.
    """
    if dtype is None or dtype not in NOISE_FACTOR:
        known = ", ".join(str(known) for known in NOISE_FACTOR)
        raise ValueError(f"no rounding bound is known for {dtype}; one of {known} is needed")
    return NOISE_FACTOR[dtype] * torch.finfo(dtype).eps * magnitude


def compare(
    plain: Sequence[int],
    speculative: Sequence[int],
    logits_after: Callable[[Sequence[int]], torch.Tensor],
    dtype: torch.dtype | None,
    temperature: float = 0.0,
    uniform_at: Callable[[int], float] | None = None,
) -> Divergence | None:
    """First divergence of two answers, judged; None when they are equal.

    `logits_after(output_ids)` gives the target's logits [V] after the prompt and these output tokens. At temperature >
    0 `uniform_at(position)` is the number in [0, 1) that picked the token at that output position in both runs.
    """
    position = first_divergence(plain, speculative)
    if position is None:
        return None
    left = plain[position] if position < len(plain) else None
    right = speculative[position] if position < len(speculative) else None
    if left is None or right is None:
        return Divergence(position, left, right, None, None, None, None, near_tie=False)
    row = logits_after(plain[:position]).double()
    noise = logit_noise(dtype, row.abs().max().item())
    if temperature == 0.0:
        near = greedy_near_tie(row, (left, right), noise)
    else:
        assert uniform_at is not None, "a sampled answer is judged by the random number that picked its tokens"
        near = sampled_near_tie(row / temperature, (left, right), noise / temperature, uniform_at(position))
    return Divergence(position, left, right, row[left].item(), row[right].item(), row.max().item(), noise, near)


def greedy_near_tie(row: torch.Tensor, tokens: Sequence[int], noise: float) -> bool:
    """True when each of `tokens` is within `noise` of the largest logit of `row` [V]: rounding may put it first."""
    top = row.max().item()
    return all(top - row[token].item() <= noise for token in tokens)


def sampled_near_tie(row: torch.Tensor, tokens: Sequence[int], noise: float, uniform: float) -> bool:
    """True when rounding may make the inverse CDF of softmax(`row` [V]), in token-id order, give each of `tokens`.

    Gaps moved by at most `noise` multiply the odds of any set of tokens by at most e^noise, so a token may be picked
    when the odds of `uniform` lie within that factor of the ends of its interval of the CDF. In 16 bit this is wide
    (the noise of 1 that a logit of 32 has moves a probability of 1/2 to 0.73): only float32 makes it a sharp test.
    """
    cdf = torch.softmax(row, dim=-1).cumsum(dim=-1).clamp(max=1.0)
    for token in tokens:
        low = _with_odds(cdf[token - 1].item() if token > 0 else 0.0, -noise)
        high = _with_odds(cdf[token].item(), noise)
        if not low <= uniform <= high:
            return False
    return True


def _with_odds(probability: float, log_factor: float) -> float:
    """The probability whose odds are e^log_factor times those of `probability`."""
    raised = probability * math.exp(log_factor)
    return raised / (raised + 1 - probability)


@torch.inference_mode()
def plain_logits(target: Target, ids: Sequence[int]) -> torch.Tensor:
    """Logits [V] after `ids`, from one forward of the target without a cache."""
    batch = torch.tensor([list(ids)], dtype=torch.long, device=target.device)
    hidden = target.body(input_ids=batch, use_cache=False).last_hidden_state[0, -1]
    return target.logits(hidden)
