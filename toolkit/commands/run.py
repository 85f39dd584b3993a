"""`toolkit run`: the whole pipeline of a recipe."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from toolkit.pipeline.recipe_stages import run_recipe
from toolkit.pipeline.run import REPORT_PAGE, Run
from toolkit.pipeline.stages import Outcome
from toolkit.recipe import load_recipe, print_config

HELP = "run a recipe from prompts to report: everything that is not up to date"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="recipe file, e.g. recipes/smollm2-135m.yaml")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the recipe's")
    parser.add_argument("--print-config", action="store_true", help="print the resolved recipe and end")
    parser.add_argument("--force", metavar="STAGE", help="redo this stage and all after it")
    parser.add_argument("--until", metavar="STAGE", help="end after this stage")
    parser.add_argument(
        "--num-processes", type=int, metavar="N", help="training processes (default: one a GPU, else 1)"
    )
    parser.epilog = (
        "Stages: prompts, rollouts, token_map, train, measure, report. An interrupted run resumes. Files of "
        "changed settings are moved to <run>/replaced, never mixed with new ones."
    )


def run(args: argparse.Namespace) -> int:
    """Runs the stages, prints their results and the commands that use the head."""
    recipe = load_recipe(args.recipe, args.overrides)
    if args.print_config:
        print_config(recipe)
        return 0
    trains = args.until not in ("prompts", "rollouts", "token_map")
    job = Run(recipe, args.recipe, tuple(args.overrides), processes=args.num_processes, trains=trains)
    outcomes = run_recipe(job, force=args.force, until=args.until)
    if outcomes[-1].stage == "report":
        print(next_steps(job.folder, outcomes))
    return 0


def next_steps(folder: Path, outcomes: Sequence[Outcome]) -> str:
    """What was measured, where the report is, and the commands that use the head."""
    measured = next(one.headline for one in outcomes if one.stage == "measure")
    ckpt = shlex.quote(str(folder / "ckpt"))
    return (
        f"\n{measured}\nreport: {folder / REPORT_PAGE}\n\nnext:\n"
        f"  toolkit chat --draft {ckpt}\n  toolkit serve --draft {ckpt}"
    )
