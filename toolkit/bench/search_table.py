"""Prints what a search found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolkit.bench.answers import PLAIN

SHOWN = 6  # settings of each batch size that are printed
WIDTH_WITHOUT_TERMINAL = 122


def print_search(record: Mapping[str, Any], console: Console | None = None) -> None:
    """Print, for each batch size, the settings that were run end to end and the next best predictions."""
    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDTH_WITHOUT_TERMINAL)
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
        console.print(Text(f"batch {batch}: {found['setting']}{_gain(rows, found['setting'], plain)}", style="bold"))
        console.print(_table(rows, found["setting"]))


def _gain(rows: list[dict[str, Any]], setting: str, plain: Mapping[str, Any]) -> str:
    if setting == PLAIN:
        return " decoding is the fastest: no draft pays here"
    best = next(row for row in rows if row["setting"] == setting)
    return f", {best['measured_tokens_per_s'] / plain['measured_tokens_per_s']:.2f}x plain decoding"


def _table(rows: list[dict[str, Any]], best: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting")
    for title in ("accept_length", "draft ms", "verify ms", "round ms", "tokens/s\npredicted", "tokens/s\nmeasured"):
        table.add_column(title, justify="right")
    run = sorted(
        (row for row in rows if row["measured_tokens_per_s"] is not None), key=lambda row: -row["measured_tokens_per_s"]
    )
    others = sorted(
        (row for row in rows if row["measured_tokens_per_s"] is None), key=lambda row: -row["predicted_tokens_per_s"]
    )
    for row in [*run, *others[: max(0, SHOWN - len(run))]]:
        cells = [f"{row['accept_length']:.2f}"]
        cells += [_ms(row[name]) for name in ("draft_s", "verify_s", "round_s")]
        cells += [_rate(row[f"{when}_tokens_per_s"]) for when in ("predicted", "measured")]
        table.add_row(row["setting"] + (" (best)" if row["setting"] == best else ""), *cells)
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
