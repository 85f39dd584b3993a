"""Does the forecast say what the engine does, on the same prompts, and if not, why?

Two forecasts stand beside the engine's value of a chain. One replays the rollouts of these prompts: it is what training
looks at, and only comparable where both are greedy (drawn texts differ by their seeds). The other replays the answers
that the engine has just written: the text is the same, so that a difference lies between the head as trained and the
head as served. The warning's cause follows from which of them is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolkit.targets.load import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.held_out_prompts import HeldOutPrompts
from toolkit.train.real_acceptance import RealAcceptance

# In accept_length: near-ties in 16 bits part a few answers, and eight prompts make too narrow an interval.
SLACK = 0.02
# In bf16 rounding parts about one answer in a hundred at each token. So many answers that part so early, or so much
# less of their tokens in the draft vocabulary, have another cause.
MANY, EARLY, LESS_COVERED = 0.5, 8, 0.05

Replay = Callable[[Sequence[list[int]], int], float | None]
"""(an answer for each prompt, levels of the chain) -> accept_length forecast over these answers, None without steps"""


@dataclass(frozen=True)
class Comparison:
    """The forecasts of one measured chain; None where there is none."""

    on_rollouts: float | None = None
    on_answers: float | None = None


def compare(
    measured: RealAcceptance, prompts: HeldOutPrompts, replay: Replay, deepest: int, max_tokens: int
) -> Comparison:
    """Forecasts for what was measured: of chains no deeper than the unroll, nothing for trees."""
    shape = measured.shape
    if not shape.is_chain or shape.num_steps > deepest:
        return Comparison()
    rollouts = [one.answer[:max_tokens] for one in prompts.prompts]
    greedy = measured.temperature == prompts.temperature == 0
    return Comparison(
        on_rollouts=replay(rollouts, shape.num_steps) if greedy else None,
        on_answers=replay(measured.answers, shape.num_steps),
    )


def outside(forecast: float | None, interval: tuple[float, float] | None) -> bool:
    """Whether both are known and the forecast lies outside."""
    if forecast is None or interval is None:
        return False
    return not interval[0] - SLACK <= forecast <= interval[1] + SLACK


def explain_gap(
    measured: RealAcceptance,
    found: Comparison,
    prompts: HeldOutPrompts,
    target: Target,
    token_map: TokenMap,
    precision: str,
    max_tokens: int,
) -> str | None:
    """One sentence for the log when forecast and engine part, with the likely cause; None when they agree."""
    served = outside(found.on_answers, measured.interval)
    if not served and not outside(found.on_rollouts, measured.interval):
        return None
    assert measured.interval is not None, "what lies outside an interval lies outside of one"
    forecast = found.on_answers if served else found.on_rollouts
    low, high = measured.interval
    said = (
        f"forecast {forecast:.2f} of {measured.name} lies outside [{low:.2f}, {high:.2f}], the 95 % interval of the "
        f"engine's {measured.accept_length:.2f} on the same prompts"
    )
    if served:
        cause = _of_the_head(target, precision)
    else:
        cause = _of_the_texts(measured, prompts, target, token_map, max_tokens)
    return f"{said}; likely cause: {cause}"


def _of_the_head(target: Target, precision: str) -> str:
    """Over the engine's own answers the trained head and the served one accept different drafts."""
    trained = {"bf16": "bfloat16", "fp32": "float32"}[precision]
    served = str(target.dtype).removeprefix("torch.")
    if trained != served:
        return f"the head is trained in {trained} and drafts in {served} (train.precision, target.dtype)"
    return (
        "training and serving compute something different from the same weights; this is a defect, please report it "
        "with the recipe"
    )


def _of_the_texts(
    measured: RealAcceptance, prompts: HeldOutPrompts, target: Target, token_map: TokenMap, max_tokens: int
) -> str:
    """Over the engine's own answers both agree, so the rollouts are other texts than this target writes."""
    count = len(prompts.prompts)
    otherwise = prompts.rendered_otherwise(target)
    if otherwise:
        return (
            f"{otherwise} of {count} prompts of the rollouts were rendered by another chat template than the target's "
            "(if it has one); write the rollouts again, by this target"
        )
    rollouts = [one.answer[:max_tokens] for one in prompts.prompts]
    differ = sum(mine[:EARLY] != theirs[:EARLY] for mine, theirs in zip(measured.answers, rollouts, strict=True))
    covered, before = (_coverage(texts, token_map) for texts in (measured.answers, rollouts))
    if covered < before - LESS_COVERED:
        return (
            f"the token map covers {covered:.0%} of what the target writes now and {before:.0%} of the rollouts; build "
            "it from rollouts of this target"
        )
    if differ > MANY * count:
        return (
            f"{differ} of {count} answers differ from the rollouts' in their first {EARLY} tokens: these were not "
            f"written by this target as it is loaded now ({target.precision}), but by another model or quantization"
        )
    return "answers part from the rollouts at near-ties, as in 16 bits they do; measure with more prompts"


def _coverage(texts: Sequence[list[int]], token_map: TokenMap) -> float:
    """Share of the tokens that the draft vocabulary has."""
    tokens = [token for text in texts for token in text]
    return float(token_map.t2d[tokens].float().mean()) if tokens else 0.0
