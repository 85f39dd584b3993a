"""`toolkit run`: the whole pipeline of a recipe."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from toolkit.commands.launch import set_threads
from toolkit.commands.pipeline import REPORT_PAGE, Run
from toolkit.commands.recipe_arguments import say
from toolkit.commands.stages import Outcome, run_stages
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
        "Stages: prompts, rollouts, token_map, train, measure, report. A run that was cut off goes on where it was; "
        "files of changed settings are moved to <run>/replaced, never mixed with new ones."
    )


def run(args: argparse.Namespace) -> int:
    """Runs the stages and says what came out and what to type next."""
    recipe = load_recipe(args.recipe, args.overrides)
    if args.print_config:
        print_config(recipe)
        return 0
    trains = args.until not in ("prompts", "rollouts", "token_map")
    pipeline = Run(recipe, args.recipe, tuple(args.overrides), processes=args.num_processes, trains=trains)
    stages = pipeline.stages()
    threads = set_threads()
    say(f"{recipe.name}: {args.recipe} -> {pipeline.folder} ({threads} threads, OMP_NUM_THREADS)")
    outcomes = run_stages(pipeline.folder, stages, force=args.force, until=args.until, say=say)
    print("\n" + summary(outcomes))
    if len(outcomes) == len(stages):
        print(next_steps(pipeline.folder, outcomes))
    return 0


def summary(outcomes: Sequence[Outcome]) -> str:
    """Minutes by stage; those of stages that were up to date are from the time they were made."""
    rows = [
        f"  {one.stage:<10} {one.seconds / 60:6.1f} min  {one.headline}{'' if one.worked else '  (earlier)'}"
        for one in outcomes
    ]
    total = f"  {'total':<10} {sum(one.seconds for one in outcomes) / 60:6.1f} min"
    return "\n".join([*rows, total])


def next_steps(folder: Path, outcomes: Sequence[Outcome]) -> str:
    """What was measured, where the report is, and the commands that use the head."""
    measured = next(one.headline for one in outcomes if one.stage == "measure")
    ckpt = shlex.quote(str(folder / "ckpt"))
    return (
        f"\n{measured}\nreport: {folder / REPORT_PAGE}\n\nnext:\n"
        f"  toolkit chat --draft {ckpt}\n  toolkit serve --draft {ckpt}"
    )
