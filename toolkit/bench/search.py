"""Find the fastest draft setting for each batch size: a forecast of acceptance times measured step times, confirmed.

    predicted tokens per second = batch * accept_length (forecast.py) / seconds of a round (step_times.py)

The best predictions are then run end to end beside plain and adaptive decoding, and the winner is chosen among these
by measurement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any, Literal

import numpy as np

from toolkit.bench.answers import Round
from toolkit.bench.bootstrap import LEAST_GROUPS, resampled_interval
from toolkit.bench.engine_context import SideBySide, Trial
from toolkit.bench.forecast import Surface
from toolkit.bench.prompts import Prompt
from toolkit.bench.side_by_side import Mode, Progress, run_side_by_side
from toolkit.bench.step_times import Parts, StepTimes
from toolkit.infer.drafters.adaptive import AdaptiveDrafter
from toolkit.infer.load.search_file import arm_times
from toolkit.infer.request.draft_tree import ADAPTIVE, PLAIN, DraftShape
from toolkit.infer.request.request import summarise

Objective = Literal["tokens-per-s", "itl", "ttft"]
FIGURES: dict[Objective, str] = {"tokens-per-s": "tokens_per_s", "itl": "itl_s", "ttft": "ttft_s"}
FINALISTS = 3  # shapes that are run end to end at each batch size
CLOSE = 0.03  # difference of two settings that does not matter
PASSES = 3  # over the prompts at most; all but the first by the best and those that are not told apart from it


@dataclass(frozen=True)
class Figures:
    """Tokens per second of the batch, and mean seconds between two tokens of a request (itl).

    ttft: mean seconds until the first token of a request that arrives during a round, estimated: half a round and the
    reading of its prompt. Nothing arrives during a run."""

    tokens_per_s: float
    itl_s: float
    ttft_s: float

    def score(self, objective: Objective) -> float:
        """Higher is better."""
        value: float = getattr(self, FIGURES[objective])
        return value if objective == "tokens-per-s" else -value


@dataclass(frozen=True)
class Setting:
    """A setting at one batch size. shape: None for plain decoding. measured: None if it was not run end to end."""

    name: str
    shape: DraftShape | None
    accept_length: float
    parts: Parts | None
    predicted: Figures | None
    measured: Figures | None = None


def figures(batch: int, accept_length: float, round_s: float, prefill_s: float) -> Figures:
    """Figures of steady rounds. A new request waits for half a round, in the mean, and is then read."""
    return Figures(batch * accept_length / round_s, round_s / accept_length, round_s / 2 + prefill_s)


def predict(surface: Surface, times: StepTimes) -> list[Setting]:
    """Returns plain decoding and every shape of the surface, with predicted figures."""
    plain_prefill, drafting_prefill = times.prefill_s
    found = [
        Setting(PLAIN, None, 1.0, times.plain, figures(times.batch, 1.0, times.plain.round_s, plain_prefill)),
    ]
    for shape in surface.shapes():
        length, parts = surface.forecast(shape).accept_length, times.parts(shape)
        if length is not None:
            predicted = figures(times.batch, length, parts.round_s, drafting_prefill)
            found.append(Setting(shape.as_text(), shape, length, parts, predicted))
    return found


def finalists(settings: Sequence[Setting], objective: Objective) -> list[Setting]:
    """Returns the best predicted shapes, at most FINALISTS of them, best first."""
    shapes = [one for one in settings if one.shape is not None and one.predicted is not None]
    return sorted(shapes, key=lambda one: one.predicted.score(objective), reverse=True)[:FINALISTS]  # type: ignore[union-attr]


def confirm(
    trial: Trial,
    chosen: Sequence[Setting],
    times: StepTimes,
    objective: Objective = "tokens-per-s",
    on_progress: Progress | None = None,
) -> list[Setting]:
    """Runs plain decoding, adaptive drafting up to the finalists and every finalist, in turns.

    Adaptive drafting starts from the measured times and has lookup, as it will be served. Prompts are repeated until
    every group of `times.batch` is full. The best and those close to it run again until they are told apart
    (told_apart), at most PASSES times in all. on_progress(done, total): counts answers, PASSES passes in total. Returns
    the settings with measured figures.
    """
    trial = trial.with_room()
    shapes = [one.shape for one in chosen if one.shape is not None]
    most = most_of(chosen)
    with SideBySide(trial.config, trial.target, 3) as engines:
        learned = engines.open(trial.draft, most, adaptive=True)
        assert isinstance(learned.drafter, AdaptiveDrafter), "adaptive drafting was asked for"
        learned.drafter.start_from(arm_times(most, [times.to_json()], shapes))
        speculative = engines.open(trial.draft, shapes[0])
        modes = [Mode(engines.open(), None), Mode(learned, most, adaptive=True)]
        modes += [Mode(speculative, shape) for shape in shapes]
        full = full_groups(trial.prompts, times.batch)
        rounds: list[Round] = []
        turns = sum(len(prompt.turns) for prompt in full)
        planned = turns * len(modes) * PASSES
        playing = modes
        for left in range(PASSES, 0, -1):
            answered = sum(len(one.answers) for one in rounds)
            show = None if on_progress is None else partial(_show, on_progress, answered, planned)
            rounds += run_side_by_side(
                playing, trial.target.tokenizer, full, trial.sampling,
                batch=times.batch, warmup=1 if left == PASSES else 0, on_progress=show,
            )  # fmt: skip
            run = _by_mode(rounds)
            best = max((mode.name for mode in playing), key=lambda name: measured_figures(run[name]).score(objective))
            playing = [
                one for one in playing if one.name == best or not told_apart(run[best], run[one.name], objective)
            ]
            if len(playing) == 1:
                break
    settings = {one.shape.name: one for one in chosen if one.shape is not None}
    plain = Setting(PLAIN, None, 1.0, times.plain, figures(times.batch, 1.0, times.plain.round_s, times.prefill_s[0]))
    settings |= {PLAIN: plain, ADAPTIVE: Setting(ADAPTIVE, most, 1.0, None, None)}
    run = _by_mode(rounds)
    return [
        replace(
            settings[mode.name],
            measured=measured_figures(run[mode.name]),
            accept_length=accept_length_of(run[mode.name]),
        )
        for mode in modes
    ]


def _show(on_progress: Progress, before: int, planned: int, done: int, total: int) -> None:
    """Shows answers of a pass among those of all: `before` in the earlier ones."""
    on_progress(before + done, planned)


def full_groups(prompts: Sequence[Prompt], batch: int) -> list[Prompt]:
    """Returns the prompts, those with few turns first, and some of them again, so that groups of `batch` are full."""
    found = sorted(prompts, key=lambda prompt: len(prompt.turns))
    again = islice(cycle(reversed(found)), -len(found) % batch)
    return found + [replace(one, question_id=f"{one.question_id} again {n}") for n, one in enumerate(again)]


def measured_figures(rounds: Sequence[Round]) -> Figures:
    """Figures of end-to-end rounds. itl: steps of every answer times seconds of a step, by its tokens. ttft: half a
    step, and the seconds until a prompt's first token."""
    return _figures(*map(sum, zip(*map(_numbers, rounds), strict=True)))


def _numbers(one: Round) -> tuple[float, ...]:
    """Returns tokens, seconds, seconds that its answers waited in all, steps, seconds of prompts and answers."""
    own = [len(answer.events) for answer in one.answers]
    steps = max(own)
    waited = one.decode_s * sum(own) / max(1, steps)
    return one.decode_tokens, one.decode_s, waited, steps, one.prefill_s, len(own)


def _figures(tokens: Any, seconds: Any, waited: Any, steps: Any, prefill_s: Any, answers: Any) -> Figures:
    """Takes sums of `_numbers`, or arrays of such sums."""
    return Figures(tokens / seconds, waited / tokens, seconds / np.maximum(1, steps) / 2 + prefill_s / answers)


def told_apart(best: Sequence[Round], other: Sequence[Round], objective: Objective) -> bool:
    """Returns whether the interval of the relative difference between two settings is narrower than CLOSE, or lies
    above it.

    They ran in turns, so each group of prompts in each pass is a pair; its turns are one unit. False with few pairs.
    """
    pairs: dict[tuple[str, int], Any] = {}
    seen: Counter[tuple[str, int]] = Counter()
    for ours, theirs in zip(best, other, strict=True):
        question = ours.answers[-1].question  # of the conversation with the most turns
        seen[question.prompt.question_id, question.turn] += 1
        unit = question.prompt.question_id, seen[question.prompt.question_id, question.turn]
        pairs[unit] = pairs.get(unit, 0) + np.array([*_numbers(ours), *_numbers(theirs)])
    if len(pairs) < LEAST_GROUPS:
        return False

    def difference(*sums: Any) -> Any:
        ours, theirs = (_figures(*sums[at : at + 6]).score(objective) for at in (0, 6))
        return (ours - theirs) / abs(ours)

    low, high = resampled_interval(list(pairs.values()), difference)
    return high - low < CLOSE or low > CLOSE


def _by_mode(rounds: Sequence[Round]) -> dict[str, list[Round]]:
    run: dict[str, list[Round]] = {}
    for one in rounds:
        run.setdefault(one.mode, []).append(one)
    return run


def accept_length_of(rounds: Sequence[Round]) -> float:
    """The accept_length of all verify steps; 1 without any."""
    stats = summarise(event for one in rounds for answer in one.answers for event in answer.events)
    return stats.accept_length if stats.verify_steps else 1.0


def most_of(chosen: Sequence[Setting]) -> DraftShape:
    """Returns the smallest shape that covers those of the settings."""
    return DraftShape.covering(one.shape for one in chosen if one.shape is not None)


def winner(measured: Sequence[Setting], objective: Objective) -> Setting:
    """Returns the best of the settings that were run end to end.

    Of those that come CLOSE to it, and are not slower than plain decoding, the best predicted one: a prediction rests
    on more tokens than one short run.
    """
    run = [(one, one.measured.score(objective)) for one in measured if one.measured is not None]
    best, top = max(run, key=lambda pair: pair[1])
    if best.predicted is None:
        return best
    least = max([top - CLOSE * abs(top), *(score for one, score in run if one.name == PLAIN)])
    close = [one for one, score in run if score >= least and one.predicted is not None]
    return max(close, key=lambda one: one.predicted.score(objective))  # type: ignore[union-attr]
