"""`toolkit report`: report.json and a one-page report.html of a run folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.commands.recipe_arguments import ArgumentsError, run_of, run_one_stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="*",
        metavar="RUN | a.b=c",
        help="a run folder, e.g. runs/smollm2-135m, with whatever it holds; or settings that replace the recipe's",
    )
    parser.add_argument("--recipe", metavar="FILE", help="the stage of this recipe's run folder (default without RUN: "
                        "the demo recipe)")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="write again, even when the stage is up to date")


def run(args: argparse.Namespace) -> int:
    """Writes the report of the recipe's run, or of a folder; missing parts are listed in it."""
    folders = [one for one in args.run if "=" not in one or Path(one).is_dir()]
    if not folders:
        args.overrides = args.run
        run_one_stage(run_of(args), "report", args.force)
        return 0
    if args.recipe or args.force or len(args.run) > 1:
        raise ArgumentsError(
            f"the folder {folders[0]} takes no other argument; give one folder, or --recipe with overrides"
        )
    from toolkit.bench.report import write_report  # loads torch

    for path in write_report(folders[0]):
        print(path)
    return 0
