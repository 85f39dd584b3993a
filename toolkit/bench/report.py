"""The report of a pipeline run: report.json (one record) and report.html (one self-contained page)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment

from toolkit.bench import table
from toolkit.bench.records import command_line, make_record, write_record
from toolkit.bench.report_figures import draw_all
from toolkit.bench.rows import ALL, headline_row, is_slower, recommended_row
from toolkit.bench.run_folder import RunData, read_run, training_summary
from toolkit.weights import atomic_write


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
    of_records = ("cost_line", "drafted_line", "forced_text", "outcome_line", "prompts_phrase", "verdict_line")
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
    """Return names and values of the settings, the provenance and the definitions."""
    hardware, settings = record["hardware"] or {}, record["settings"]
    memory = hardware.get("memory_bytes")
    machine = ", ".join(filter(None, (
        hardware.get("cpu"),
        " ".join(hardware.get("cpu_flags") or ()),
        f"{hardware['cores']} cores" if hardware.get("cores") else None,
        f"{hardware['torch_threads']} torch threads" if hardware.get("torch_threads") else None,
        f"{memory / 2**30:.0f} GiB" if memory else None,
        *(hardware.get("gpus") or ()),
    )))  # fmt: skip
    facts: list[tuple[str, str]] = [
        ("measured", str(record["date"])),
        ("commit", str(record["commit"] or "not run from a git checkout")),
        ("machine", machine),
        ("versions", _pairs(record["versions"])),
        ("command", str(record["command"])),
    ]
    facts += [(name, _pairs(record[name])) for name in ("target", "draft") if record.get(name)]
    facts.append(("settings", _pairs(settings) or "no measurement"))
    if record["training"]:
        facts.append(("training", _pairs(record["training"])))
    if record["token_map"]:
        facts.append(("token map", _pairs({key: value for key, value in record["token_map"].items() if key != "rows"})))
    facts += [(f"stage {stage['stage']}", _stage(stage)) for stage in record["stages"]]
    return facts + list((record.get("definitions") or {}).items())


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
