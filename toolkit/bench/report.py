"""The report of a pipeline run: report.json (one record) and report.html (one self-contained page)."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

from jinja2 import Environment
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from toolkit.bench import table
from toolkit.bench.records import RecordError, command_line, make_record, read_record, write_record
from toolkit.bench.rows import ALL, headline_row, is_slower, recommended_row
from toolkit.bench.table import shape_name
from toolkit.jsonl import parse_row
from toolkit.weights import atomic_write, read_json


def write_report(run_dir: str | Path) -> tuple[Path, Path]:
    """Write `<run>/report.json` and `<run>/report.html` from the outputs of the stages; return both paths.

    Both list the parts that are missing. Raises FileNotFoundError when the folder does not exist, `RecordError`,
    `DataError` or `WeightsError` for a damaged file in it.
    """
    data = read_run(run_dir)
    json_path, html_path = data.run_dir / "report.json", data.run_dir / "report.html"
    write_record(json_path, report_record(data))
    write_page(html_path, data)
    return json_path, html_path


def report_record(data: RunData) -> dict[str, Any]:
    """Make a record of kind "acceptance". Date, commit, hardware and versions are those of the measurement, if any."""
    record = data.acceptance or make_record("acceptance", command_line(), {}, [])
    return {
        **record,
        "run": data.run_dir.resolve().name,
        "further_temperatures": [{key: one[key] for key in ("date", "settings", "rows")} for one in data.further],
        "reported": datetime.now(UTC).isoformat(timespec="seconds"),
        "training": training_summary(data),
        "token_map": data.token_map,
        "stages": data.stages,
        "missing": data.missing,
    }


def write_page(path: Path, data: RunData) -> None:
    """Write the page of the data: `report.html.j2`, filled in."""
    record = report_record(data)
    filled = (
        _environment()
        .from_string(Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8"))
        .render(
            record=record,
            best=headline_row(record) if data.acceptance else None,
            recommended=recommended_row(record) if data.acceptance and not table.forced_text(record) else None,
            measured=[_measured(one) for one in (data.acceptance, *data.further) if one],
            pictures=draw_all(data),
            draft=(record.get("draft") or {}).get("path") or data.run_dir / "ckpt",
            facts=_facts(record),
        )
    )
    with atomic_write(path) as temporary:
        temporary.write_text(filled, encoding="utf-8")


def _environment() -> Environment:
    made = Environment(autoescape=True)
    of_rows = ("decimal", "equal_text", "fixed_name", "length_text", "rates_text", "shape_name", "share_text")
    of_records = ("drafted_line", "forced_text", "outcome_line", "prompts_phrase", "verdict_line")
    for name in (*of_rows, "speedup_text", "times", *of_records):
        made.filters[name] = getattr(table, name)
    made.tests["slower"] = is_slower
    made.globals["enough_steps"] = table.ENOUGH_STEPS
    return made


def _measured(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of the tables of one temperature: all settings, and the tasks of the headline's."""
    best = headline_row(dict(record))
    name = table.shape_name(best)
    return {
        "temperature": record["settings"]["temperature"],
        "best": best,
        "shapes": [(table.shape_name(row), row) for row in record["rows"] if row["task"] == ALL],
        "tasks": [(row["task"], row) for row in record["rows"] if row["task"] != ALL and table.shape_name(row) == name],
    }


def _facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of the settings and the provenance."""
    facts = [
        ("measured", str(record["date"])),
        ("commit", str(record["commit"] or "not run from a git checkout")),
        ("command", str(record["command"])),
    ]
    parts = ("hardware", "versions", "target", "draft", "settings", "training")
    facts += [(name, _pairs(record[name])) for name in parts if record.get(name)]
    if record["token_map"]:
        facts.append(("token map", _pairs({key: value for key, value in record["token_map"].items() if key != "rows"})))
    facts += [(f"stage {stage['stage']}", _stage(stage)) for stage in record["stages"]]
    return facts


def _stage(stage: Mapping[str, Any]) -> str:
    seconds = stage["seconds"]
    spent = "time not recorded" if seconds is None else f"{int(seconds) // 60} min {seconds % 60:.0f} s"
    sessions = stage["sessions"] or 1
    again = f" in the last of {sessions} sessions" if sessions > 1 else ""
    unfinished = "" if stage["status"] == "done" else f" ({stage['status']})"
    return f"{spent}{again}{unfinished}" + (f"; {stage['headline']}" if stage["headline"] else "")


def _pairs(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{name} {_value(value)}" for name, value in values.items())


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return "{" + _pairs(value) + "}"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(_value(entry) for entry in value)
    return str(value)


INK, QUIET, PLAIN_COLOUR = "#1f2933", "#64748b", "#a3adba"
COLOURS = ("#0f766e", "#c2570c", "#4f46a5", "#9d174d", "#4d7c0f", "#0369a1")
SMOOTHING = 0.9
STYLE = Path(__file__).with_name("report.mplstyle")


@rc_context(fname=STYLE)
def draw_all(data: RunData) -> dict[str, str]:
    """Return SVG text by name (training, depth, coverage, speed); figures without data are omitted."""
    rows = [row for row in (data.acceptance or {}).get("rows", []) if row["task"] == ALL]
    timed = [row for row in rows if row["tokens_per_s"] is not None]
    pictures: dict[str, str] = {}
    if data.training or data.forecasts:
        pictures["training"] = _training(data.training, data.forecasts, data.real)
    if any(row["accept_rate"] for row in rows):
        pictures["depth"] = _depth([row for row in rows if row["accept_rate"]])
    if data.token_map and data.token_map["rows"]:
        pictures["coverage"] = coverage_figure(data.token_map)
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
        axis.plot(steps, lengths, color=COLOURS[1], marker="o", label=f"forecast, at the end {lengths[-1]:.2f}")
        measured: dict[str, list[tuple[int, float]]] = {}
        for row in real:
            for one in row.get("real", ()):
                if one["accept_length"] is not None:
                    measured.setdefault(one["name"], []).append((row["step"], one["accept_length"]))
        for colour, (name, points) in zip(cycle((*COLOURS[2:], *COLOURS[:2])), measured.items()):
            axis.plot(*zip(*points, strict=True), ":", color=colour, marker="s", label=name)
        axis.legend(fontsize=6.5, ncols=2)
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


@rc_context(fname=STYLE)
def coverage_figure(token_map: dict[str, Any]) -> str:
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
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(LogLocator(base=2, numticks=7))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    size, coverage = token_map["size"], token_map["coverage"]
    if len(held_out) == len(rows) and is_number(token_map.get("held_out_coverage")):
        coverage = token_map["held_out_coverage"]
    axis.axvline(size, color=COLOURS[1], linewidth=1.2, linestyle=":")
    chosen = f"chosen: {size:,} ids, {100 * coverage:.1f} %"
    axis.plot([size], [100 * coverage], "o", color=COLOURS[1], markersize=8, zorder=5, label=chosen)
    axis.legend(loc="lower right")
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
    texts = [f"{speed:.1f}{note}" for speed, note in zip(speeds, notes, strict=True)]
    axis.bar_label(bars, texts, padding=5, color=INK, fontsize=9.5, fontweight="bold")
    axis.set_xlim(0, max(speeds) * 1.28)
    axis.invert_yaxis()
    axis.set_xlabel("tokens per second in the decode phase")
    axis.spines[:].set_visible(False)
    axis.grid(False, axis="y")
    axis.grid(True, axis="x")
    axis.tick_params(axis="y", labelsize=10, labelcolor=INK)
    return _svg(figure, "Tokens per second of plain decoding and of each draft shape")


def _svg(figure: Figure, description: str) -> str:
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Without fixed width and height the figure can shrink on narrow screens; the viewBox keeps the proportions.
    for fixed in ("width", "height"):
        text = re.sub(rf'(<svg[^>]*?) {fixed}="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)


STAGES = ("prompts", "rollouts", "token_map", "train", "bench")


@dataclass
class RunData:
    """The parts of a run folder. `missing` has one sentence for each missing part."""

    run_dir: Path
    acceptance: dict[str, Any] | None = None
    further: list[dict[str, Any]] = field(default_factory=list)  # acceptance records of other temperatures, ascending
    training: list[dict[str, Any]] = field(default_factory=list)  # rows with a loss, ascending steps
    forecasts: list[dict[str, Any]] = field(default_factory=list)  # rows with forecast_accept_length, ascending steps
    real: list[dict[str, Any]] = field(default_factory=list)  # rows with real_accept_length, ascending steps
    init: dict[str, Any] | None = None  # the head of train.init with its accept_length before and after
    token_map: dict[str, Any] | None = None  # coverage.json without its forced ids
    stages: list[dict[str, Any]] = field(default_factory=list)  # {"stage", "seconds", "sessions", "headline"}
    missing: list[str] = field(default_factory=list)


def read_run(run_dir: str | Path) -> RunData:
    """Read all data of the report.

    Raises FileNotFoundError when the folder does not exist, `RecordError` or `WeightsError` for a damaged file in it.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir} is not a folder; give the folder of a run, such as runs/smollm2-135m")
    data = RunData(run_dir)
    acceptance = run_dir / "bench" / "acceptance.json"
    if acceptance.is_file():
        data.acceptance = read_record(acceptance, "acceptance")
        others = (read_record(path, "acceptance") for path in acceptance.parent.glob("acceptance-T*.json"))
        data.further = sorted(others, key=lambda record: record["settings"]["temperature"])
    else:
        data.missing.append(f"no measurement: {acceptance} does not exist; `toolkit bench acceptance` writes it")
    _read_metrics(data, run_dir / "train" / "metrics.jsonl")
    ckpt = run_dir / "ckpt" / "config.json"
    data.init = read_json(ckpt).get("toolkit", {}).get("init") if ckpt.is_file() else None
    _read_token_map(data, run_dir / "token_map")
    for stage in STAGES:
        manifest = run_dir / stage / "manifest.json"
        if manifest.is_file():
            entry = read_json(manifest)
            kept = {key: entry.get(key) for key in ("status", "seconds", "sessions", "headline")}
            data.stages.append({"stage": stage, **kept})
    if not data.stages:
        data.missing.append(f"no stage times: no {run_dir}/<stage>/manifest.json exists; `toolkit run` writes them")
    return data


def training_summary(data: RunData) -> dict[str, Any] | None:
    """Summarize the training: steps, tokens, seconds, losses, forecasts, real accept_length; None without metrics.

    The real accept_length is a mean over draft shapes and temperatures. The head in ckpt/ is that of `real_best_step`,
    or of `forecast_best_step` if nothing was measured. The last loss is the mean of the last tenth of the logged rows,
    since the loss of a single batch is noisy.
    """
    if not data.training and not data.forecasts:
        return None
    losses = [row["loss"] for row in data.training]
    tail = losses[-max(1, len(losses) // 10) :]
    seconds = [row["seconds_per_step"] for row in data.training if is_number(row.get("seconds_per_step"))]
    lengths = [row["forecast_accept_length"] for row in data.forecasts]
    # Ties go to the later step, as in training.
    best = max(data.forecasts, key=lambda row: (row["forecast_accept_length"], row["step"]), default=None)
    real = max(data.real, key=lambda row: (row["real_accept_length"], row["step"]), default=None)
    return {
        "steps": max(row["step"] for row in [*data.training, *data.forecasts]),
        "supervised_tokens": data.training[-1].get("tokens") if data.training else None,
        "step_seconds": sum(seconds) if seconds else None,
        "loss_first": losses[0] if losses else None,
        "loss_last": sum(tail) / len(tail) if tail else None,
        "forecast_accept_length_last": lengths[-1] if lengths else None,
        "forecast_accept_length_best": None if best is None else best["forecast_accept_length"],
        "forecast_best_step": None if best is None else best["step"],
        "real_accept_length_best": None if real is None else real["real_accept_length"],
        "real_best_step": None if real is None else real["step"],
        **({} if data.init is None else {"init": data.init}),
    }


def _read_metrics(data: RunData, path: Path) -> None:
    if not path.is_file():
        data.missing.append(f"no training curve: {path} does not exist; `toolkit train` writes it")
        return
    complete, _, torn = path.read_text(encoding="utf-8").rpartition("\n")
    if torn:
        data.missing.append(f"the last line of {path} is incomplete; training was stopped while it wrote")
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    for number, line in enumerate(complete.splitlines(), start=1):
        row = parse_row(line, f"{path}:{number}")
        # A resumed run may log a step again: the later row is used.
        for name in ("loss", "forecast_accept_length", "real_accept_length"):
            if is_number(row.get(name)):
                latest[name, row["step"]] = row
    data.training = [latest[key] for key in sorted(latest) if key[0] == "loss"]
    data.forecasts = [latest[key] for key in sorted(latest) if key[0] == "forecast_accept_length"]
    data.real = [latest[key] for key in sorted(latest) if key[0] == "real_accept_length"]
    if not data.training:
        data.missing.append(f"no loss: no row of {path} has one")
    if not data.forecasts:
        data.missing.append(f"no forecast of accept_length: no row of {path} has one")


def _read_token_map(data: RunData, directory: Path) -> None:
    path = directory / "coverage.json"
    if not path.is_file():
        data.missing.append(f"no coverage of the token map: {path} does not exist; `toolkit build-token-map` writes it")
        return
    stored = read_json(path)
    if not isinstance(stored, dict) or "rows" not in stored:
        raise RecordError(f"{path} has no rows of size and coverage; write it again with `toolkit build-token-map`")
    kept = ("size", "coverage", "vocab_size", "tokens", "distinct", "corpus", "held_out_coverage", "held_out_tokens")
    data.token_map = {key: stored.get(key) for key in kept}
    data.token_map["rows"] = sorted(stored["rows"], key=lambda row: row["size"])


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite int or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
