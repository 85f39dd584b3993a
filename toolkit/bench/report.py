"""The report of a pipeline run: report.json (one record) and report.html (one self-contained page)."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.bench.records import command_line, make_record, write_record
from toolkit.bench.report_figures import draw_all
from toolkit.bench.report_page import page
from toolkit.bench.run_folder import RunData, read_run, training_summary
from toolkit.weights import atomic_write


def write_report(run_dir: str | Path) -> tuple[Path, Path]:
    """Write `<run>/report.json` and `<run>/report.html` from the outputs of the stages; return both paths.

    Both list the parts that are missing. Raises FileNotFoundError when the folder does not exist, `RecordError` or
    `WeightsError` for a damaged file in it.
    """
    data = read_run(run_dir)
    record = report_record(data)
    json_path, html_path = data.run_dir / "report.json", data.run_dir / "report.html"
    write_record(json_path, record)
    with atomic_write(html_path) as temporary:
        temporary.write_text(page(record, data, draw_all(data)), encoding="utf-8")
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
