"""Find the fastest draft setting for each batch size: a forecast of acceptance times measured step times, confirmed.

    predicted tokens per second = batch * accept_length (forecast.py) / seconds of a round (step_times.py)

The best predictions are then run end to end beside plain and adaptive decoding, and the winner is chosen among these
by measurement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolkit.bench.bootstrap import LEAST_GROUPS, resampled_interval
from toolkit.bench.forecast import Surface
from toolkit.bench.prompts import Prompt
from toolkit.bench.side_by_side import Mode, Progress, Round, SideBySide, Trial, run_side_by_side
from toolkit.bench.step_times import Parts, StepTimes
from toolkit.bench.table import NONE, decimal, new_table, wide_console
from toolkit.infer.drafters.adaptive import AdaptiveDrafter, AdaptiveShape
from toolkit.infer.load.search_file import step_costs
from toolkit.infer.request.draft_tree import ADAPTIVE, PLAIN, DraftShape
from toolkit.infer.request.request import summarise

FINALISTS = 3  # shapes that are run end to end at each batch size
CLOSE = 0.03  # difference of two settings that does not matter
PASSES = 3  # over the prompts at most; all but the first by the best and those not significantly slower
SHOWN = 6  # settings of each batch size that are printed
NOTE = (
    "adaptive is what a server does without settings: the head up to the best shapes, or lookup where the text repeats "
    "itself. The other rows draft by the head alone."
)


@dataclass(frozen=True)
class Setting:
    """A setting at one batch size. shape: None for plain decoding.

    predicted, measured: tokens per second of the batch. measured: None if it was not run end to end.
    """

    name: str
    shape: DraftShape | None
    accept_length: float
    parts: Parts | None
    predicted: float | None
    measured: float | None = None


def predict(surface: Surface, times: StepTimes) -> list[Setting]:
    """Returns plain decoding and every shape of the surface, with predicted speeds."""
    found = [Setting(PLAIN, None, 1.0, times.plain, times.batch / times.plain.round_s)]
    for shape in surface.shapes():
        length, parts = surface.forecast(shape).accept_length, times.parts(shape)
        if length is not None:
            found.append(Setting(shape.as_text(), shape, length, parts, times.batch * length / parts.round_s))
    return found


def finalists(settings: Sequence[Setting]) -> list[Setting]:
    """Returns the best predicted shapes, at most FINALISTS of them, best first."""
    shapes = [one for one in settings if one.shape is not None]
    return sorted(shapes, key=lambda one: one.predicted or 0.0, reverse=True)[:FINALISTS]


def confirm(
    trial: Trial, chosen: Sequence[Setting], times: StepTimes, on_progress: Progress | None = None
) -> list[Setting]:
    """Runs plain decoding, adaptive drafting up to the finalists and every finalist, in turns.

    Adaptive drafting starts from the measured times and has lookup, as it will be served. Prompts are repeated until
    every group of `times.batch` is full. The best and those that are not significantly slower run again, at most PASSES
    times in all. on_progress(done, total): counts answers, PASSES passes in total. Returns the settings with measured
    speeds.
    """
    trial = trial.with_room()
    shapes = [one.shape for one in chosen if one.shape is not None]
    most = covering_shape(chosen)
    with SideBySide(trial.config, trial.target, 3) as engines:
        learned = engines.open(trial.draft, most, adaptive=True)
        assert isinstance(learned.drafter, AdaptiveDrafter), "adaptive drafting was asked for"
        known = step_costs(most, [times.to_json()], shapes)
        learned.drafter.choose_by(partial(AdaptiveShape, known=known))
        speculative = engines.open(trial.draft, shapes[0])
        modes = [Mode(engines.open(), None), Mode(learned, most, adaptive=True)]
        modes += [Mode(speculative, shape) for shape in shapes]
        full = full_groups(trial.prompts, times.batch)
        run: dict[str, list[Round]] = {mode.name: [] for mode in modes}
        planned = sum(len(prompt.turns) for prompt in full) * len(modes) * PASSES
        playing = modes
        for number in range(PASSES):
            before = sum(len(one.answers) for rounds in run.values() for one in rounds)
            show = None if on_progress is None else partial(_show, on_progress, before, planned)
            rounds = run_side_by_side(
                playing, trial.target.tokenizer, full, trial.sampling,
                batch=times.batch, warmup=0 if number else 1, on_progress=show,
            )  # fmt: skip
            for one in rounds:
                run[one.mode].append(one)
            best = max((mode.name for mode in playing), key=lambda name: speed_of(run[name]))
            playing = [one for one in playing if one.name == best or not is_significant(run[best], run[one.name])]
            if len(playing) == 1:
                break
    plain = Setting(PLAIN, None, 1.0, times.plain, times.batch / times.plain.round_s)
    settings = [plain, Setting(ADAPTIVE, most, 1.0, None, None), *chosen]
    return [
        replace(one, measured=speed_of(run[mode.name]), accept_length=accept_length_of(run[mode.name]))
        for one, mode in zip(settings, modes, strict=True)
    ]


def _show(on_progress: Progress, before: int, planned: int, done: int, total: int) -> None:
    """Shows answers of a pass among those of all: `before` in the earlier ones."""
    on_progress(before + done, planned)


def full_groups(prompts: Sequence[Prompt], batch: int) -> list[Prompt]:
    """Returns the prompts, those with few turns first, and some of them again, so that groups of `batch` are full."""
    found = sorted(prompts, key=lambda prompt: len(prompt.turns))
    again = islice(cycle(reversed(found)), -len(found) % batch)
    return found + [replace(one, question_id=f"{one.question_id} again {n}") for n, one in enumerate(again)]


def speed_of(rounds: Sequence[Round]) -> float:
    """Tokens per second of end-to-end rounds."""
    return sum(one.decode_tokens for one in rounds) / sum(one.decode_s for one in rounds)


def is_significant(best: Sequence[Round], other: Sequence[Round]) -> bool:
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
        numbers = [ours.decode_tokens, ours.decode_s, theirs.decode_tokens, theirs.decode_s]
        pairs[unit] = pairs.get(unit, 0) + np.array(numbers)
    if len(pairs) < LEAST_GROUPS:
        return False
    low, high = resampled_interval(list(pairs.values()), lambda t, s, other_t, other_s: 1 - other_t / other_s * s / t)
    return high - low < CLOSE or low > CLOSE


def accept_length_of(rounds: Sequence[Round]) -> float:
    """The accept_length of all verify steps; 1 without any."""
    stats = summarise(event for one in rounds for answer in one.answers for event in answer.events)
    return stats.accept_length if stats.verify_steps else 1.0


def covering_shape(chosen: Sequence[Setting]) -> DraftShape:
    """Returns the smallest shape that covers those of the settings."""
    return DraftShape.covering(one.shape for one in chosen if one.shape is not None)


def winner(measured: Sequence[Setting]) -> Setting:
    """Returns the best of the settings that were run end to end.

    Of those that come CLOSE to it, and are not slower than plain decoding, the best predicted one: a prediction rests
    on more tokens than one short run.
    """
    run = [one for one in measured if one.measured is not None]
    best = max(run, key=lambda one: one.measured or 0.0)
    if best.predicted is None:
        return best
    least = max([(1 - CLOSE) * (best.measured or 0.0), *(one.measured or 0.0 for one in run if one.name == PLAIN)])
    close = [one for one in run if (one.measured or 0.0) >= least and one.predicted is not None]
    return max(close, key=lambda one: one.predicted or 0.0)


def print_search(record: Mapping[str, Any], console: Console | None = None) -> None:
    """Print, for each batch size, the settings that were run end to end and the next best predictions."""
    console = console or wide_console()
    settings = record["settings"]
    title = f"{settings['shapes']} settings of {record['target']['name']} in {settings['seconds'] / 60:.1f} min"
    console.print(Text(f"{title}, temperature {settings['temperature']:g}", style="bold"))
    for batch, found in record["best"].items():
        rows = [row for row in record["rows"] if row["batch"] == int(batch)]
        speeds = {row["setting"]: row["measured_tokens_per_s"] for row in rows}
        best = found["setting"]
        gain = " decoding is the best: no draft pays here"
        if best != PLAIN:
            gain = f", {speeds[best] / speeds[PLAIN]:.2f}x plain decoding"
        console.print(Text(f"batch {batch}: {best}{gain}", style="bold"))
        console.print(_table(rows, best))
    console.print(Text(NOTE))


def _table(rows: list[dict[str, Any]], best: str) -> Table:
    """The settings that were run and the best predictions, by speed."""
    speeds = ("tokens/s\npredicted", "tokens/s\nmeasured")
    table = new_table("setting", ("accept_length", "draft ms", "verify ms", "round ms", *speeds))
    measured, predicted = "measured_tokens_per_s", "predicted_tokens_per_s"
    run = sorted((row for row in rows if row[measured] is not None), key=lambda row: -row[measured])
    others = sorted((row for row in rows if row[measured] is None), key=lambda row: -row[predicted])
    for row in [*run, *others[: max(0, SHOWN - len(run))]]:
        cells = [f"{row['accept_length']:.2f}"]
        cells += [
            NONE if row[name] is None else f"{1000 * row[name]:.1f}" for name in ("draft_s", "verify_s", "round_s")
        ]
        cells += [decimal(row[name], 1) for name in (predicted, measured)]
        table.add_row(row["setting"] + (" (best)" if row["setting"] == best else ""), *cells)
    return table
