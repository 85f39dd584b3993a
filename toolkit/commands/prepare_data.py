"""`toolkit prepare-data`: the stages of a recipe that come before training."""

from __future__ import annotations

import argparse

from toolkit.commands import preview
from toolkit.commands.launch import set_threads
from toolkit.commands.pipeline import ROLLOUTS
from toolkit.commands.recipe_arguments import add_recipe_arguments, run_of, say
from toolkit.commands.run import summary
from toolkit.commands.stages import run_stages

HELP = "bring the training data of a recipe up to date: prompts, rollouts and token map"
LAST = "token_map"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument(
        "--preview",
        type=int,
        nargs="?",
        const=3,
        metavar="N",
        help="then show the first N rollouts (default: 3), with what training supervises in colour",
    )
    parser.epilog = f"With --preview: {preview.LEGEND}"


def run(args: argparse.Namespace) -> int:
    """Runs what is not up to date of the stages up to the token map."""
    run = run_of(args)
    set_threads()
    outcomes = run_stages(run.folder, run.stages(), until=LAST, say=say)
    print("\n" + summary(outcomes))
    if args.preview is not None:
        print()
        preview.show(run.folder / ROLLOUTS, run.recipe.target.model, "train", args.preview, run.recipe.train.max_length)
    return 0
