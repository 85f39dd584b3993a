"""The record, tables and heat map of a forecast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolkit.bench.acceptance import describe_draft, measured_target
from toolkit.bench.engine_context import Trial
from toolkit.bench.forecast import Surface
from toolkit.bench.records import make_record
from toolkit.bench.rows import shape_keys, shape_text
from toolkit.bench.table import new_table, wide_console
from toolkit.weights import atomic_write

Row = Mapping[str, Any]


def forecast_record(surface: Surface, trial: Trial, settings: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Make the record of a forecast: a row for every shape of the surface."""
    prompts = len({one.question.prompt.question_id for one in surface.references})
    rows = []
    for shape in surface.shapes():
        found = surface.forecast(shape)
        rows.append(
            {
                **shape_keys(shape),
                "temperature": settings["temperature"],
                "prompts": prompts,
                "verify_steps": found.verify_steps,
                "accept_length": found.accept_length,
                "interval": found.interval,
                "accept_rate": found.accept_rate,
            }
        )
    return make_record(
        "forecast",
        command,
        settings,
        rows,
        target=measured_target(trial.target),
        draft=describe_draft(trial.draft),
        answers=len(surface.references),
    )


def print_surface(record: Row, console: Console | None = None) -> None:
    """Print a table for each top_k: levels downwards, verified nodes to the right."""
    console = console or wide_console()
    settings, rows = record["settings"], record["rows"]
    console.print(
        Text(
            f"accept_length by forecast: {record['target']['name']} ({record['target']['dtype']}), "
            f"{rows[0]['prompts']} prompts, {record['answers']} answers of at most {settings['max_tokens']} tokens, "
            f"temperature {settings['temperature']:g}",
            style="bold",
        )
    )
    for top_k, of_width in _by_width(rows):
        if top_k == 1:
            console.print(Text("top_k 1: chains, by levels"))
            console.print(_chains(of_width))
        else:
            console.print(Text(f"top_k {top_k}: levels downwards, num_draft_tokens (with the root) to the right"))
            console.print(_trees(of_width))
    if settings["temperature"] > 0:
        console.print(
            "each answer is one draw, by its seed: accept_length is that of these draws under --verify target, not an "
            "expectation over draws; the interval is by prompt, and so over their draws too"
        )
    best = max(rows, key=lambda row: row["accept_length"] or 0)
    if best["interval"] is not None:
        low, high = best["interval"]
        console.print(
            f"largest: {shape_text(best)}, {best['accept_length']:.2f} [{low:.2f}, {high:.2f}], 95 % over prompts; "
            "`toolkit search` measures which shape is the fastest"
        )


def _by_width(rows: Sequence[Row]) -> Iterator[tuple[int, list[Row]]]:
    for top_k in dict.fromkeys(row["top_k"] for row in rows):
        yield top_k, [row for row in rows if row["top_k"] == top_k]


def _length(row: Row | None) -> str:
    return "" if row is None else "-" if row["accept_length"] is None else f"{row['accept_length']:.2f}"


def _chains(rows: Sequence[Row]) -> Table:
    table = new_table("levels", [str(row["num_steps"]) for row in rows])
    table.add_row("accept_length", *map(_length, rows))
    rates = rows[-1]["accept_rate"]
    cells = ["-" if rate is None else f"{100 * rate:.0f} %" for rate in rates]
    table.add_row("accepted at that level", *cells, *[""] * (len(rows) - len(cells)))
    return table


def _trees(rows: Sequence[Row]) -> Table:
    by_place = {(row["num_steps"], row["num_draft_tokens"]): row for row in rows}
    nodes, steps = sorted({one for _, one in by_place}), sorted({one for one, _ in by_place})
    table = new_table("", map(str, nodes))
    for depth in steps:
        table.add_row(str(depth), *(_length(by_place.get((depth, count))) for count in nodes))
    return table


def draw_surface(record: Row, path: str | Path) -> None:
    """Write a heat map of accept_length as PNG, a panel for each top_k."""
    panels = list(_by_width(record["rows"]))
    with rc_context(fname=Path(__file__).with_name("report.mplstyle")):
        figure = Figure(figsize=(1.2 + 3.4 * len(panels), 3.4), facecolor="white")
        FigureCanvasAgg(figure)
        most = max(row["accept_length"] or 1.0 for row in record["rows"])
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, (top_k, rows) in zip(axes, panels, strict=True):
            nodes = sorted({row["num_draft_tokens"] for row in rows})
            steps = sorted({row["num_steps"] for row in rows})
            grid = [[float("nan")] * len(nodes) for _ in steps]
            for row in rows:
                x, y = nodes.index(row["num_draft_tokens"]), steps.index(row["num_steps"])
                grid[y][x] = row["accept_length"] or float("nan")
                color = "black" if (row["accept_length"] or 1.0) > 0.4 + 0.6 * most else "white"  # on yellow, on blue
                axis.text(x, y, _length(row), ha="center", va="center", fontsize=6.5, color=color)
            image: Any = axis.imshow(grid, vmin=1.0, vmax=most, cmap="viridis", aspect="auto", origin="lower")
            axis.set_title(f"top_k {top_k}", fontsize=9)
            axis.set_xticks(range(len(nodes)), [str(one) for one in nodes])
            axis.set_yticks(range(len(steps)), [str(one) for one in steps])
            axis.set_xlabel("num_draft_tokens")
            axis.grid(False)
        axes[0].set_ylabel("num_steps")
        figure.colorbar(image, ax=list(axes), label="accept_length")
        with atomic_write(path) as temporary:
            figure.savefig(temporary, format="png", dpi=150)
