"""The four figures of the report, as inline SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from toolkit.bench.rows import ALL, is_slower
from toolkit.bench.run_folder import RunData, is_number
from toolkit.bench.table import shape_name

INK, QUIET, PLAIN_COLOUR = "#1f2933", "#64748b", "#a3adba"
COLOURS = ("#0f766e", "#c2570c", "#4f46a5", "#9d174d", "#4d7c0f", "#0369a1")
SMOOTHING = 0.9
STYLE = Path(__file__).with_name("report.mplstyle")


def draw_all(data: RunData) -> dict[str, str]:
    """Return SVG text by name (training, depth, coverage, speed); figures without data are omitted."""
    with rc_context(fname=STYLE):
        return _drawn(data)


def coverage_figure(token_map: dict[str, Any]) -> str:
    """Return SVG text of what a token map covers by its size, from the content of coverage.json."""
    with rc_context(fname=STYLE):
        return _coverage(token_map)


def _drawn(data: RunData) -> dict[str, str]:
    rows = [row for row in (data.acceptance or {}).get("rows", []) if row["task"] == ALL]
    timed = [row for row in rows if row["tokens_per_s"] is not None]
    pictures: dict[str, str] = {}
    if data.training or data.forecasts:
        pictures["training"] = _training(data.training, data.forecasts, data.real)
    if any(row["accept_rate"] for row in rows):
        pictures["depth"] = _depth([row for row in rows if row["accept_rate"]])
    if data.token_map and data.token_map["rows"]:
        pictures["coverage"] = _coverage(data.token_map)
    if timed:
        pictures["speed"] = _speed(timed)
    return pictures


def smoothed(values: Sequence[float], weight: float = SMOOTHING) -> list[float]:
    """Return the exponential moving average with bias correction, as in Adam."""
    mean, share, out = 0.0, 1.0, []
    for value in values:
        mean = weight * mean + (1 - weight) * value
        share *= weight
        out.append(mean / (1 - share))
    return out


def _training(
    training: Sequence[dict[str, Any]], forecasts: Sequence[dict[str, Any]], real: Sequence[dict[str, Any]]
) -> str:
    """Draw the loss above; below, the forecast and the engine's measurements (dotted, by shape and temperature)."""
    figure = Figure()
    axes: list[Axes] = list(figure.subplots(bool(training) + bool(forecasts), 1, sharex=True, squeeze=False)[:, 0])
    last = axes[-1]
    figure.set_layout_engine("constrained", h_pad=0.12)
    if training:
        axis = axes.pop(0)
        # Loss of the first step only: the sum over steps jumps when a curriculum adds a step.
        steps = [row["step"] for row in training]
        losses = [row.get("loss_by_step", [row["loss"]])[0] for row in training]
        axis.plot(steps, losses, color=COLOURS[0], alpha=0.3, linewidth=1)
        axis.plot(steps, smoothed(losses), color=COLOURS[0])
        axis.set_ylabel("loss,\nfirst step")
    if forecasts:
        axis = axes.pop(0)
        steps = [row["step"] for row in forecasts]
        lengths = [row["forecast_accept_length"] for row in forecasts]
        axis.plot(steps, lengths, color=COLOURS[1], marker="o")
        measured: dict[str, list[tuple[int, float]]] = {}
        for row in real:
            for one in row.get("real", ()):
                if one["accept_length"] is not None:
                    measured.setdefault(one["name"], []).append((row["step"], one["accept_length"]))
        for colour, (name, points) in zip(cycle((*COLOURS[2:], *COLOURS[:2])), measured.items()):
            axis.plot(*zip(*points, strict=True), ":", color=colour, marker="s", label=name)
        if measured:
            axis.legend(fontsize=6.5, ncols=2)
        axis.annotate(
            f"{lengths[-1]:.2f}",
            (steps[-1], lengths[-1]),
            xytext=(-2, -12),
            textcoords="offset points",
            ha="right",
            color=COLOURS[1],
            fontweight="bold",
            fontsize=9,
        )
        axis.set_ylabel("forecast\naccept_length")
    last.set_xlabel("optimizer step")
    last.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    return _svg(figure, "Training loss and forecast accept_length over optimizer steps")


def _depth(rows: Sequence[dict[str, Any]]) -> str:
    """Draw conditional (solid) and unconditional (dashed) acceptance at each depth, one colour per shape."""
    figure = Figure()
    axis = figure.subplots()
    for place, row in enumerate(rows):
        colour = COLOURS[place % len(COLOURS)]
        for key, line, width in (("accept_rate", "-", 2), ("accept_rate_unconditional", "--", 1.4)):
            points = [(depth, 100 * rate) for depth, rate in enumerate(row[key], start=1) if rate is not None]
            if points:
                label = shape_name(row) if key == "accept_rate" else None
                axis.plot(*zip(*points, strict=True), line, color=colour, linewidth=width, marker="o", label=label)
    axis.plot([], [], "-", color=QUIET, label="of the steps that reached this depth")
    axis.plot([], [], "--", color=QUIET, linewidth=1.4, label="of all steps")
    axis.set_ylim(0, 100)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend()
    axis.set(xlabel="depth in the draft", ylabel="accepted, %")
    return _svg(figure, "Share of drafted tokens accepted at each depth, conditional and unconditional, by draft shape")


def _coverage(token_map: dict[str, Any]) -> str:
    """Draw the share of tokens in the map over its size, thin lines by corpus, and mark the chosen size."""
    figure = Figure()
    axis = figure.subplots()
    rows = token_map["rows"]
    sizes, shares = [row["size"] for row in rows], [100 * row["coverage"] for row in rows]
    axis.plot(sizes, shares, color=COLOURS[0], marker="o", label="counted text")
    held_out = [100 * row["held_out_coverage"] for row in rows if is_number(row.get("held_out_coverage"))]
    if len(held_out) == len(rows):
        axis.plot(sizes, held_out, color=COLOURS[0], linewidth=1.5, linestyle="--", label="held-out text")
    for colour, name in zip(cycle((*COLOURS[2:], QUIET)), rows[0].get("by_corpus", ())):
        label = name if len(name) <= 30 else f"...{name[-27:]}"
        axis.plot(sizes, [100 * row["by_corpus"][name] for row in rows], color=colour, linewidth=1, label=label)
    if len(axis.get_lines()) > 1:
        axis.legend(loc="lower right")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(octaves(sizes, 7)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    size, coverage = token_map["size"], token_map["coverage"]
    if len(held_out) == len(rows) and is_number(token_map.get("held_out_coverage")):
        coverage = token_map["held_out_coverage"]
    axis.axvline(size, color=COLOURS[1], linewidth=1.2, linestyle=":")
    axis.plot([size], [100 * coverage], "o", color=COLOURS[1], markersize=8, zorder=5)
    # The curves are above and to the left of the marker; near the right edge only the left side has space.
    right = size <= sizes[-1] / 4
    axis.annotate(
        f"chosen: {size:,} ids\n{100 * coverage:.1f} %",
        (size, 100 * coverage),
        fontsize=9,
        xytext=(10 if right else -10, -48),
        textcoords="offset points",
        color=COLOURS[1],
        ha="left" if right else "right",
        fontweight="bold",
    )
    axis.set(xlabel="ids in the draft vocabulary", ylabel="tokens covered, %")
    return _svg(figure, "Share of tokens covered by the draft vocabulary, by its size")


def _speed(rows: Sequence[dict[str, Any]]) -> str:
    """Draw tokens per second of plain decoding and of each shape, on the same prompts."""
    figure = Figure()
    axis = figure.subplots()
    names = ["plain", *(shape_name(row) for row in rows)]
    speeds = [rows[0]["plain_tokens_per_s"], *(row["tokens_per_s"] for row in rows)]
    notes = ["", *(f"  {row['speedup']:.2f}x{', slower' if is_slower(row) else ''}" for row in rows)]
    colours = [PLAIN_COLOUR, *(COLOURS[place % len(COLOURS)] for place in range(len(rows)))]
    bars = axis.barh(names, speeds, color=colours, height=0.62)
    for bar, speed, note in zip(bars, speeds, notes, strict=True):
        axis.annotate(
            f"{speed:.1f}{note}",
            (speed, bar.get_y() + bar.get_height() / 2),
            xytext=(5, 0),
            va="center",
            textcoords="offset points",
            color=INK,
            fontsize=9.5,
            fontweight="bold",
        )
    axis.set_xlim(0, max(speeds) * 1.28)
    axis.invert_yaxis()
    axis.set_xlabel("tokens per second in the decode phase")
    axis.spines[:].set_visible(False)
    axis.grid(False, axis="y")
    axis.grid(True, axis="x")
    axis.tick_params(axis="y", labelsize=10, labelcolor=INK)
    return _svg(figure, "Tokens per second of plain decoding and of each draft shape")


def octaves(sizes: Sequence[int], most: int) -> list[int]:
    """Return powers of two from the smallest to the largest size; every 2nd or 4th if there are more than `most`."""
    powers = [1 << bits for bits in range((sizes[0] - 1).bit_length(), sizes[-1].bit_length())]
    stride = 1
    while len(powers[::stride]) > most:
        stride *= 2
    return powers[::stride]


def _svg(figure: Figure, description: str) -> str:
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Without fixed width and height the figure can shrink on narrow screens; the viewBox keeps the proportions.
    for fixed in ("width", "height"):
        text = re.sub(rf'(<svg[^>]*?) {fixed}="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)
