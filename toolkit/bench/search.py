"""Find the fastest draft setting for each batch size: a forecast of acceptance times measured step times, confirmed.

    predicted tokens per second = batch * accept_length (forecast.py) / seconds of a round (step_times.py)

The best predictions are then run end to end beside plain and adaptive decoding, and the winner is chosen among these
by measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolkit.bench.forecast import Surface
from toolkit.bench.prompts import Prompt
from toolkit.bench.side_by_side import PERFECT, Mode, Progress, Round, SideBySide, Trial, run_side_by_side
from toolkit.bench.step_times import Parts, StepTimes
from toolkit.bench.table import NONE, decimal, new_table, wide_console
from toolkit.infer.drafters.adaptive import AdaptiveDrafter, AdaptiveShape
from toolkit.infer.load.search_file import step_costs
from toolkit.infer.request.draft_tree import ADAPTIVE, PLAIN, DraftShape
from toolkit.infer.request.request import summarise

FINALISTS = 3  # shapes that are run end to end at each batch size
CLOSE = 0.03  # difference of two settings that does not matter
AGAIN = 0.1  # settings that are slower than the best by no more run again
PASSES = 3  # over the prompts at most
SHOWN = 6  # settings of each batch size that are printed
NOTE = (
    "perfect drafts are plain decoding's answers again, as deep as the deepest shape, in no time: "
    "the engine's ceiling. adaptive is what a server does without settings: the head up to the best shapes, or lookup "
    "where the text repeats itself. The other rows draft by the head alone."
)


@dataclass(frozen=True)
class Setting:
    """A setting at one batch size. shape: None for plain decoding; of adaptive drafting the largest one.

    forecast: accept_length; predicted: tokens per second of the batch; both and parts are None for adaptive drafting
    and perfect drafts.
    accept_length, measured: the same of the end-to-end run; None if there was none.
    """

    name: str
    shape: DraftShape | None
    forecast: float | None = None
    parts: Parts | None = None
    predicted: float | None = None
    accept_length: float | None = None
    measured: float | None = None

    def row(self, batch: int) -> dict[str, Any]:
        """The row of the record."""
        parts = self.parts
        return {
            "batch": batch,
            "setting": self.name,
            "accept_length": self.forecast if self.accept_length is None else self.accept_length,
            "forecast_accept_length": self.forecast,
            "draft_s": None if parts is None else parts.draft_s,
            "verify_s": None if parts is None else parts.verify_s,
            "round_s": None if parts is None else parts.round_s,
            "predicted_tokens_per_s": self.predicted,
            "measured_tokens_per_s": self.measured,
        }


def predict(surface: Surface, times: StepTimes) -> list[Setting]:
    """Returns plain decoding and every shape of the surface, with predicted speeds."""
    found = [Setting(PLAIN, None, 1.0, times.plain, times.batch / times.plain.round_s)]
    for shape in surface.shapes():
        length, parts = surface.forecast(shape).accept_length, times.parts(shape)
        if length is not None:
            found.append(Setting(shape.as_text(), shape, length, parts, times.batch * length / parts.round_s))
    return found


def finalists(settings: Sequence[Setting]) -> list[DraftShape]:
    """Returns the shapes of the best predictions, at most FINALISTS of them, best first."""
    ordered = sorted(settings, key=lambda one: one.predicted or 0.0, reverse=True)
    return [one.shape for one in ordered if one.shape is not None][:FINALISTS]


def confirm(
    trial: Trial, settings: Sequence[Setting], times: StepTimes, on_progress: Progress | None = None
) -> list[Setting]:
    """Runs plain decoding, adaptive drafting up to the finalists, every finalist and perfect drafts, in turns.

    Adaptive drafting starts from the measured times and has lookup, as it will be served. Prompts are repeated until
    every group of `times.batch` is full. Returns the settings, adaptive drafting and perfect drafts as deep as
    the deepest of them, with what was measured.
    on_progress(done, total): counts answers, PASSES passes in total.
    """
    trial = replace(trial, config=replace(trial.config, verify="target")).with_room()
    shapes = finalists(settings)
    most = DraftShape.covering(shapes)
    deepest = max(one.shape.num_steps for one in settings if one.shape is not None)
    with SideBySide(trial.config, trial.target, 4) as engines:
        learned = engines.open(trial.draft, most, adaptive=True)
        assert isinstance(learned.drafter, AdaptiveDrafter), "adaptive drafting was asked for"
        known = step_costs(most, [times.to_json()], shapes)
        learned.drafter.choose_by(partial(AdaptiveShape, known=known))
        speculative = engines.open(trial.draft, shapes[0])
        modes = [Mode(engines.open(), None), Mode(learned, most, adaptive=True)]
        modes += [Mode(speculative, shape, label=shape.as_text()) for shape in shapes]
        modes.append(engines.open_perfect(deepest))
        run = _run_passes(trial, modes, on_progress)
    return [
        replace(one, accept_length=accept_length_of(run[one.name]), measured=speed_of(run[one.name]))
        if one.name in run
        else one
        for one in (*settings, Setting(ADAPTIVE, most), Setting(PERFECT, DraftShape.chain(deepest)))
    ]


def _run_passes(trial: Trial, modes: Sequence[Mode], on_progress: Progress | None) -> dict[str, list[Round]]:
    """Runs all modes over the prompts, then the best and those that are close to it again; perfect drafts once. Returns
    rounds by mode."""
    prompts = full_groups(trial.prompts, trial.batch)
    planned = sum(len(prompt.turns) for prompt in prompts) * len(modes) * PASSES
    run: dict[str, list[Round]] = {mode.name: [] for mode in modes}
    done = 0

    def show(now: int, _: int) -> None:
        if on_progress is not None:
            on_progress(done + now, planned)

    for number in range(PASSES):
        rounds = run_side_by_side(
            modes, trial.target.tokenizer, prompts, trial.sampling,
            batch=trial.batch, warmup=0 if number else trial.first(1), on_progress=show,
        )  # fmt: skip
        done += sum(len(one.answers) for one in rounds)
        for one in rounds:
            run[one.mode].append(one)
        modes = [mode for mode in modes if mode.name != PERFECT]
        least = (1 - AGAIN) * max(speed_of(run[mode.name]) for mode in modes)
        modes = [mode for mode in modes if speed_of(run[mode.name]) >= least]
        if len(modes) == 1:
            break
    return run


def full_groups(prompts: Sequence[Prompt], batch: int) -> list[Prompt]:
    """Returns the prompts, those with few turns first, and some of them again, so that groups of `batch` are full."""
    found = sorted(prompts, key=lambda prompt: len(prompt.turns))
    again = islice(cycle(reversed(found)), -len(found) % batch)
    return found + [replace(one, question_id=f"{one.question_id} again {n}") for n, one in enumerate(again)]


def speed_of(rounds: Sequence[Round]) -> float:
    """Tokens per second of end-to-end rounds."""
    return sum(one.decode_tokens for one in rounds) / sum(one.decode_s for one in rounds)


def accept_length_of(rounds: Sequence[Round]) -> float:
    """The accept_length of all verify steps; 1 without any."""
    stats = summarise(event for one in rounds for answer in one.answers for event in answer.events)
    return stats.accept_length if stats.verify_steps else 1.0


def winner(settings: Sequence[Setting]) -> Setting:
    """Returns the best of the settings that were run end to end.

    Of those that come CLOSE to it, and are not slower than plain decoding, the best predicted one: a prediction rests
    on more tokens than one short run.
    """
    run = [(one.measured, one) for one in settings if one.measured is not None and one.name != PERFECT]
    speed, best = max(run, key=lambda pair: pair[0])
    if best.predicted is None:
        return best
    least = max([(1 - CLOSE) * speed, *(measured for measured, one in run if one.name == PLAIN)])
    close = [one for measured, one in run if measured >= least and one.predicted is not None]
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
        if PERFECT in speeds:
            gain += f"; perfect drafts: {speeds[PERFECT] / speeds[PLAIN]:.2f}x"
        console.print(Text(f"batch {batch}: {best}{gain}", style="bold"))
        console.print(_table(rows, best))
    console.print(Text(NOTE))


def _table(rows: Sequence[Mapping[str, Any]], best: str) -> Table:
    """The settings that were run and the best predictions, by speed."""
    speeds = ("tokens/s\npredicted", "tokens/s\nmeasured")
    table = new_table("setting", ("accept_length", "draft ms", "verify ms", "round ms", *speeds))
    measured, predicted = "measured_tokens_per_s", "predicted_tokens_per_s"
    run = sorted((row for row in rows if row[measured] is not None), key=lambda row: -row[measured])
    others = sorted((row for row in rows if row[measured] is None), key=lambda row: -row[predicted])
    for row in [*run, *others[: max(0, SHOWN - len(run))]]:
        times = [
            NONE if row[name] is None else f"{1000 * row[name]:.1f}" for name in ("draft_s", "verify_s", "round_s")
        ]
        cells = [decimal(row["accept_length"]), *times, decimal(row[predicted], 1), decimal(row[measured], 1)]
        table.add_row(row["setting"] + (" (best)" if row["setting"] == best else ""), *cells)
    return table
