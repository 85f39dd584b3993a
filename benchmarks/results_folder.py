"""Where the records of benchmarks lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.bench.records import machine_name, write_record

RESULTS = Path(__file__).resolve().parent / "results"


def leave(record: dict[str, Any], name: str, out: Path | None = None) -> None:
    """Write a record as `out`, or where nobody named a file as <name>-<hardware>.json of the results; say where."""
    out = out or RESULTS / f"{name}-{machine_name(record['hardware'])}.json"
    write_record(out, record)
    print(f"written: {out}")
