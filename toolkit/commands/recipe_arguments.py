"""The arguments that all commands over a recipe share."""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.pipeline.recipe_stages import recipe_stages
from toolkit.pipeline.run import Run
from toolkit.pipeline.stages import Outcome, run_stages
from toolkit.recipe import DEMO_RECIPE, load_recipe


class ArgumentsError(ValueError):
    """Arguments of a command that contradict each other, or lack another one."""


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """--recipe and dotted overrides."""
    parser.add_argument("--recipe", metavar="FILE", help="recipe file (default: the demo recipe)")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the recipe's")


def run_of(args: argparse.Namespace) -> Run:
    """The run that --recipe and the overrides describe. Raises `RecipeError`, FileNotFoundError."""
    path = Path(args.recipe) if args.recipe else DEMO_RECIPE
    return Run(load_recipe(path, args.overrides), path, tuple(args.overrides))


def run_one_stage(run: Run, stage: str, force: bool = False) -> Outcome:
    """Bring one stage of the run folder up to date; its input must be there."""
    return run_stages(run.folder, recipe_stages(run), only=stage, force=stage if force else None)[-1]


def step_seconds(text: str) -> dict[int, float]:
    """--step-ms 1:7.1,32:9 -> seconds by requests a rank. Raises `ArgumentsError`."""
    found = {}
    for pair in text.split(","):
        requests, colon, value = pair.partition(":")
        try:
            found[int(requests)] = float(value) / 1000
        except ValueError:
            colon = ""
        if not colon or int(requests) < 1 or found[int(requests)] <= 0:
            raise ArgumentsError(f"--step-ms {pair!r}: REQUESTS:MS is needed, both above 0, such as 1:7.1,32:9")
    return found
