"""Read the folder of a pipeline run for the report. Missing parts are listed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.bench.records import RecordError, read_record
from toolkit.jsonl import parse_row
from toolkit.weights import read_json

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
