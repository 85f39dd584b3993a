"""Prints what a search found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolkit.bench.search import FIGURES, Objective
from toolkit.bench.table import new_table, wide_console
from toolkit.infer.request.draft_tree import PLAIN

SHOWN = 6  # settings of each batch size that are printed
UNITS = {"tokens-per-s": "tokens/s", "itl": "itl ms", "ttft": "ttft ms"}
# What stands above figures of end-to-end runs. No request arrives during such a run.
RUN = {"tokens-per-s": "measured", "itl": "measured", "ttft": "estimated\nfrom runs"}
NOTE = (
    "adaptive is what a server does without settings: the head up to the best shapes, or lookup where the text repeats "
    "itself. The other rows draft by the head alone."
)


def print_search(record: Mapping[str, Any], console: Console | None = None) -> None:
    """Print, for each batch size, the settings that were run end to end and the next best predictions."""
    console = console or wide_console()
    settings = record["settings"]
    console.print(
        Text(
            f"{settings['shapes']} settings of {record['target']['name']} in {settings['seconds'] / 60:.1f} min, "
            f"objective {settings['objective']}, temperature {settings['temperature']:g}",
            style="bold",
        )
    )
    for batch, found in record["best"].items():
        rows = [row for row in record["rows"] if row["batch"] == int(batch)]
        plain = next(row for row in rows if row["setting"] == PLAIN)
        console.print(
            Text(
                f"batch {batch}: {found['setting']}{_gain(rows, found['setting'], plain, settings['objective'])}",
                style="bold",
            )
        )
        console.print(_table(rows, found["setting"], settings["objective"]))
    console.print(Text(NOTE))


def _gain(rows: list[dict[str, Any]], setting: str, plain: Mapping[str, Any], objective: Objective) -> str:
    if setting == PLAIN:
        return " decoding is the best: no draft pays here"
    best = next(row for row in rows if row["setting"] == setting)
    figure = f"measured_{FIGURES[objective]}"
    if objective == "tokens-per-s":
        return f", {best[figure] / plain[figure]:.2f}x plain decoding"
    how = " (estimated: half a measured round and the reading of a prompt)" if objective == "ttft" else ""
    return f", {objective} {_ms(best[figure])} ms, plain decoding's {_ms(plain[figure])} ms{how}"


def _table(rows: list[dict[str, Any]], best: str, objective: Objective) -> Table:
    """The settings that were run and the best predictions, by the objective's figure."""
    figures = (f"{UNITS[objective]}\n{when}" for when in ("predicted", RUN[objective]))
    table = new_table("setting", ("accept_length", "draft ms", "verify ms", "round ms", *figures))
    measured, predicted = (f"{when}_{FIGURES[objective]}" for when in ("measured", "predicted"))
    sign = -1 if objective == "tokens-per-s" else 1
    run = sorted((row for row in rows if row[measured] is not None), key=lambda row: sign * row[measured])
    others = sorted((row for row in rows if row[measured] is None), key=lambda row: sign * row[predicted])
    text = _rate if objective == "tokens-per-s" else _ms
    for row in [*run, *others[: max(0, SHOWN - len(run))]]:
        cells = [f"{row['accept_length']:.2f}"]
        cells += [_ms(row[name]) for name in ("draft_s", "verify_s", "round_s")]
        cells += [text(row[name]) for name in (predicted, measured)]
        table.add_row(row["setting"] + (" (best)" if row["setting"] == best else ""), *cells)
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
