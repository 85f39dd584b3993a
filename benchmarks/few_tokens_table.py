"""What `few_tokens.py` says of its rows: the chosen tries, intervals over prompts and seeds, and the table.

Shapes: S seeds, P prompts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from harness import RESULTS
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from training_jobs import CHAIN, TEST, VALIDATION

from toolkit.bench.bootstrap import RESAMPLES
from toolkit.bench.records import read_record
from toolkit.bench.table import NONE, decimal

Row = dict[str, Any]
PUBLISHED, NAME = "published", "training-few-tokens"
COUNTS = {"accept_length": "by_prompt", "forecast": "forecast_by_prompt"}
SUMMED = ("tokens", "start_tokens", "start_seconds", "seconds", "processor_seconds", "seconds_per_step")


def best(tries: Sequence[Row]) -> Row | None:
    """The row of the highest forecast on the validation half; None where every training diverged."""
    known = [row for row in tries if row["split"] == VALIDATION and row["diverged"] is None]
    return max(known, key=lambda row: row["forecast"], default=None)


def tries_of(rows: Sequence[Row], source: str, tokens: int, variant: str) -> list[Row]:
    """The validation rows of the first seed that has any: those among which rate and warm-up are chosen."""
    group = (source, tokens, variant)
    mine = [
        row for row in rows
        if (row["source"], row["asked_tokens"], row["variant"]) == group and row["split"] == VALIDATION
    ]  # fmt: skip
    return [row for row in mine if row["seed"] == mine[0]["seed"]]


def summary(rows: Sequence[Row]) -> list[Row]:
    """A row over all seeds for each variant, number of tokens and source that has been tested."""
    found = []
    for source, tokens, variant in dict.fromkeys((row["source"], row["asked_tokens"], row["variant"]) for row in rows):
        tests = chosen_tests(rows, source, tokens, variant)
        if tests:
            base = chosen_tests(rows, source, tokens, PUBLISHED) if variant != PUBLISHED else []
            row = over_seeds(tests, base) | tried(tries_of(rows, source, tokens, variant))
            found.append(row | {"diverged_seeds": [one["seed"] for one in same_try(rows, row) if one["diverged"]]})
    return found


def chosen_tests(rows: Sequence[Row], source: str, tokens: int, variant: str) -> list[Row]:
    """The test rows of the best try; of others, which were chosen before it was tried, none."""
    won = best(tries_of(rows, source, tokens, variant))
    tests = [row for row in rows if row["split"] == TEST and row["diverged"] is None]
    return [] if won is None else same_try(tests, won)


def same_try(rows: Sequence[Row], row: Row) -> list[Row]:
    """Rows of the same training but for the seed."""
    names = ("source", "asked_tokens", "variant", "learning_rate", "warmup_ratio", "digest")
    return [one for one in rows if all(one[name] == row[name] for name in names)]


def tried(tries: Sequence[Row]) -> Row:
    """How the settings were chosen. at_edge: the best rate is the lowest or highest of those tried."""
    won = best(tries)
    assert won is not None, "it was tested"
    rates = sorted({row["learning_rate"] for row in tries})
    return {
        "tries": len(tries),
        "at_edge": len(rates) > 1 and won["learning_rate"] in (rates[0], rates[-1]),
        "diverged": sum(row["diverged"] is not None for row in tries),
        "validation_forecast": won["forecast"],
    }


def over_seeds(tests: Sequence[Row], base: Sequence[Row]) -> Row:
    """One row of the tests of all seeds: pooled over verify steps, intervals over prompts and seeds, and the ratio to
    the tests of `base` with the same seeds and prompts."""
    first = tests[0]
    kept = ("source", "asked_tokens", "variant", "digest", "learning_rate", "warmup_ratio", "optimizer", "split")
    shape = ("shape", "num_steps", "top_k", "num_draft_tokens", "temperature", "prompts")
    row = {name: first[name] for name in (*kept, *shape)} | {"seed": None, "seeds": [one["seed"] for one in tests]}
    row |= {name: statistics.mean(one[name] for one in tests) for name in SUMMED}
    pairs = [(one, other) for one in tests for other in base if one["seed"] == other["seed"]]
    for name, counts in COUNTS.items():
        known = [one for one in tests if one.get(name) is not None]
        values = [one[name] for one in known]
        value, interval = crossed([counted(known, counts)]) if known else (None, None)
        spread = statistics.stdev(values) if len(values) > 1 else None
        row |= {name: value, _interval(name): interval, f"{name}_spread": spread}
        both = [pair for pair in pairs if all(one.get(name) is not None for one in pair)]
        sides = [counted(side, counts) for side in zip(*both, strict=True)]
        ratio, interval = crossed(sides) if both else (None, None)
        row |= {f"{name}_ratio": ratio, f"{name}_ratio_interval": interval}
    return row


def _interval(name: str) -> str:
    return "interval" if name == "accept_length" else f"{name}_interval"


def counted(rows: Sequence[Row], name: str) -> NDArray[np.float64]:
    """[S, P, 2]: tokens and verify steps of each seed's row and each prompt."""
    return np.asarray([row[name] for row in rows], dtype=np.float64)


def crossed(sides: Sequence[NDArray[np.float64]], seed: int = 0) -> tuple[float, tuple[float, float]]:
    """The mean of tokens over verify steps, or of two sides the ratio of theirs, with its 95 % bootstrap interval.

    sides: [S, P, 2] each, of the same seeds and prompts in the same order. Every resample draws seeds and prompts, both
    with replacement, and both sides have what it drew: what a prompt or an order of the data does to all heads is in
    neither interval of a ratio. With three seeds, what they add to an interval is a rough guess.
    """
    seeds, prompts, _ = sides[0].shape
    assert all(side.shape == sides[0].shape for side in sides), "both sides have the same seeds and prompts"
    random = np.random.default_rng(seed)
    drawn = [random.multinomial(count, np.full(count, 1 / count), size=RESAMPLES) for count in (seeds, prompts)]

    def value(of_seeds: NDArray[Any], of_prompts: NDArray[Any]) -> NDArray[np.float64]:
        sums = [np.einsum("rs,rp,spc->cr", of_seeds, of_prompts, side) for side in sides]
        means = [tokens / np.maximum(steps, 1) for tokens, steps in sums]
        return means[0] if len(means) == 1 else means[0] / means[1]

    low, high = np.quantile(value(*drawn), [0.025, 0.975])
    return float(value(np.ones((1, seeds)), np.ones((1, prompts)))[0]), (float(low), float(high))


def show(rows: Sequence[Row], tested: Sequence[Row]) -> None:
    """A table a source and number of tokens. rows: of single trainings; tested: those over all seeds."""
    groups = dict.fromkeys((row["source"], row["asked_tokens"]) for row in rows)
    for source, tokens in sorted(groups, key=lambda group: group[1]):
        title = (
            f"{source}, {tokens:,} tokens: chain of {CHAIN}, test half, pooled over seeds [95 % over prompts, seeds]"
        )
        table = Table(title=title, title_justify="left")
        columns = ("variant", "rate, warm-up", "accept_length", "over published", "forecast", "over published", "min")
        for column in columns:
            table.add_column(column, justify="left" if column == "variant" else "right")
        done = {row["variant"]: row for row in tested if (row["source"], row["asked_tokens"]) == (source, tokens)}
        counts = {}
        for variant in dict.fromkeys(row["variant"] for row in rows if row["source"] == source):
            tries = tries_of(rows, source, tokens, variant)
            counts[variant] = len(tries)
            if variant in done:
                table.add_row(variant, *in_words(done[variant]))
            elif tries:
                won = best(tries)
                forecast = "all diverged" if won is None else f"validation {decimal(won['forecast'])}"
                table.add_row(variant, f"{len(tries)} tried, none tested", NONE, NONE, forecast)
        Console(width=130).print(table)
        if len(set(filter(None, counts.values()))) > 1:
            print(f"warning: not as many tries for each: {counts}")


def show_records() -> None:
    """The tables of the records in the folder of results. Raises `SystemExit` where there are none."""
    files = sorted(RESULTS.glob(f"{NAME}-*.json"))
    if not files:
        raise SystemExit(f"{RESULTS} has no record {NAME}-*.json; name run folders or rollouts files")
    for file in files:
        rows = read_record(file, "training")["rows"]
        print(file.name)
        show([row for row in rows if row["seed"] is not None], [row for row in rows if row["seed"] is None])


def in_words(row: Row) -> list[str]:
    chosen = f"{row['learning_rate']:g}, {row['warmup_ratio']:g}, of {row['tries']}"
    chosen += " (edge: try more rates)" if row["at_edge"] else ""
    cells = [chosen]
    for name in COUNTS:
        spread = row[f"{name}_spread"]
        seeds = "" if spread is None else f" ±{spread:.2f}"
        cells.append(bounded(row[name], row[_interval(name)]) + seeds)
        cells.append(bounded(row[f"{name}_ratio"], row[f"{name}_ratio_interval"]))
    lost = f", {len(row['diverged_seeds'])} diverged" if row.get("diverged_seeds") else ""
    return [*cells, f"{row['seconds'] / 60:.1f} (n={len(row['seeds'])}{lost})"]


def bounded(value: float | None, interval: Sequence[float] | None) -> str:
    return NONE if value is None or interval is None else "{:s} [{:.2f}, {:.2f}]".format(decimal(value), *interval)


def warnings(rows: Sequence[Row]) -> list[str]:
    """Rows of several sessions may come from other code, or from a machine that rounds otherwise; and a test half that
    was looked at for several choices is a second validation half."""
    found = []
    for name in ("commit", "machine"):
        known = sorted({str(row.get(name, "unknown")) for row in rows})
        if len(known) > 1:
            found.append(f"rows of several {name}s stand side by side: {', '.join(known)}")
    looked: dict[tuple[str, int, str], set[tuple[float, float]]] = {}
    for row in rows:
        if row["split"] == TEST:
            group = (row["source"], row["asked_tokens"], row["variant"])
            looked.setdefault(group, set()).add((row["learning_rate"], row["warmup_ratio"]))
    return found + [
        f"the test half was looked at for {len(tried)} choices of {variant}, {tokens} tokens of {source}"
        for (source, tokens, variant), tried in looked.items()
        if len(tried) > 1
    ]
