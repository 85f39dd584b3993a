"""`toolkit report`: report.json and a one-page report.html of a run folder."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "write report.json and report.html of a run folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, e.g. runs/smollm2-135m")


def run(args: argparse.Namespace) -> int:
    """Writes the report from whatever the folder has; what is absent is named in it."""
    from toolkit.bench.report import write_report

    for path in write_report(args.run):
        print(path)
    return 0


def report_run(folder: Path) -> str:
    """The report stage of a run. Returns a headline."""
    from toolkit.bench.report import write_report

    record, page = write_report(folder)
    return f"{record.name}, {page.name}"
