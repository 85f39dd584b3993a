"""Where the records of benchmarks lie, and how the record of a run gets there.

    python benchmarks/results_folder.py runs/smollm2-135m/bench/acceptance.json acceptance-smollm2-135m

copies a record to benchmarks/results/acceptance-smollm2-135m-<machine>.json, without its answers: only rows are cited.
Beside the report of a complete run, the copy also gets the seconds of each stage and the bytes of the features.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from toolkit.bench.records import machine_name, read_record, write_record

RESULTS = Path(__file__).resolve().parent / "results"


def leave(record: dict[str, Any], name: str, out: Path | None = None) -> None:
    """Write a record as `out`, or where nobody named a file as <name>-<machine>.json of the results; say where."""
    out = out or RESULTS / f"{name}-{machine_name(record['hardware'])}.json"
    write_record(out, record)
    print(f"written: {out}")


def cost_of(run: Path) -> dict[str, Any]:
    """What a run took, by its folder: `stages`, seconds by name, and `features_bytes`. Empty without a report."""
    if not (run / "report.json").is_file():
        return {}
    stages = read_record(run / "report.json")["stages"]
    return {
        "stages": {stage["stage"]: stage["seconds"] for stage in stages},
        "features_bytes": sum(path.stat().st_size for path in run.glob("features/*")),
    }


BY_PROMPT = ("answers", "times")  # long lists, which only `toolkit bench compare` reads


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("name", help="of the file, before the machine's name")
    args = parser.parse_args()
    record = {key: value for key, value in read_record(args.record).items() if key not in BY_PROMPT}
    leave({**record, **cost_of(args.record.parent.parent)}, args.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
