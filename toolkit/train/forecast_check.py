"""Compares the forecast accept_length with the engine's on the same prompts, and explains a difference.

A chain has two forecasts. One replays the rollouts of these prompts, as the forecasts of training do; it is comparable
only if both are greedy, because sampled texts differ by their seeds. The other replays the answers that the engine has
just written: the text is the same, so a difference comes from the head as trained or as served. Which of the forecasts
differs decides the cause that the warning names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.real_acceptance import RealAcceptance
from toolkit.train.training_data import HeldOutPrompts

# Of accept_length, on both sides of the interval: in 16 bits a few answers diverge at near-ties, and the bootstrap
# interval of eight prompts is too narrow.
SLACK = 0.02
# In bf16, rounding makes about one answer in a hundred diverge at each token. If more than a share MANY of the answers
# diverges within the first EARLY tokens, or the draft vocabulary covers LESS_COVERED less, the cause is another one.
MANY, EARLY, LESS_COVERED = 0.5, 8, 0.05


class ReplayedForecasts(NamedTuple):
    """The forecast accept_lengths of one measured shape; None if it cannot be forecast."""

    on_rollouts: float | None = None
    on_answers: float | None = None


def outside(forecast: float | None, interval: tuple[float, float] | None) -> bool:
    """Whether both are known and the forecast lies outside of the interval by more than SLACK."""
    if forecast is None or interval is None:
        return False
    return not interval[0] - SLACK <= forecast <= interval[1] + SLACK


def explain_gap(
    measured: RealAcceptance,
    replayed: ReplayedForecasts,
    prompts: HeldOutPrompts,
    target: Target,
    token_map: TokenMap,
    precision: str,
    max_tokens: int,
) -> str | None:
    """The warning when forecast and engine differ, with the likely cause; None when they agree."""
    head_differs = outside(replayed.on_answers, measured.interval)
    if not head_differs and not outside(replayed.on_rollouts, measured.interval):
        return None
    assert measured.interval is not None, "a forecast cannot lie outside of an unknown interval"
    forecast = replayed.on_answers if head_differs else replayed.on_rollouts
    low, high = measured.interval
    gap = (
        f"forecast {forecast:.2f} of {measured.name} lies outside [{low:.2f}, {high:.2f}], the 95 % interval of the "
        f"engine's {measured.accept_length:.2f} on the same prompts"
    )
    if head_differs:
        cause = _cause_in_head(target, precision)
    else:
        cause = _cause_in_texts(measured, prompts, target, token_map, max_tokens)
    return f"{gap}; likely cause: {cause}"


def _cause_in_head(target: Target, precision: str) -> str:
    """The cause if the trained head and the served head accept different drafts on the same text."""
    trained = {"bf16": "bfloat16", "fp32": "float32"}[precision]
    served = str(target.dtype).removeprefix("torch.")
    if trained != served:
        return f"the head is trained in {trained} and drafts in {served} (train.precision, target.dtype)"
    return (
        "training and serving compute different results from the same weights; this is a bug, please report it with "
        "the recipe"
    )


def _cause_in_texts(
    measured: RealAcceptance, prompts: HeldOutPrompts, target: Target, token_map: TokenMap, max_tokens: int
) -> str:
    """The cause if both agree on the engine's answers: the rollouts are not the texts that this target writes."""
    count = len(prompts.prompts)
    other_template = prompts.rendered_differently(target)
    if other_template:
        return (
            f"{other_template} of {count} prompts of the rollouts were rendered with another chat template than the "
            "target's (if it has one); write the rollouts again with this target"
        )
    rollouts = [one.answer[:max_tokens] for one in prompts.prompts]
    differ = sum(mine[:EARLY] != theirs[:EARLY] for mine, theirs in zip(measured.answers, rollouts, strict=True))
    covered, before = (_coverage(texts, token_map) for texts in (measured.answers, rollouts))
    if covered < before - LESS_COVERED:
        return (
            f"the token map covers {covered:.0%} of the tokens that the target writes now and {before:.0%} of the "
            "rollouts; build it from rollouts of this target"
        )
    if differ > MANY * count:
        return (
            f"{differ} of {count} answers differ from the rollouts' in their first {EARLY} tokens: the rollouts were "
            f"not written by this target as it is loaded now ({target.precision}), but by another model or "
            "quantization; write them again with this target"
        )
    return "answers diverge from the rollouts at near-ties, as is usual in 16 bits; measure with more prompts"


def _coverage(texts: Sequence[list[int]], token_map: TokenMap) -> float:
    """Share of the tokens that are in the draft vocabulary; 0 without tokens."""
    tokens = [token for text in texts for token in text]
    return float(token_map.t2d[tokens].float().mean()) if tokens else 0.0
