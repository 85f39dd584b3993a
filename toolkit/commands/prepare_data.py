"""`toolkit prepare-data`: the stages of a recipe that come before training."""

from __future__ import annotations

import argparse

from toolkit.commands import preview
from toolkit.commands.recipe_arguments import ArgumentsError, add_recipe_arguments, run_of
from toolkit.pipeline.launch import set_threads
from toolkit.pipeline.recipe_stages import recipe_stages
from toolkit.pipeline.run import ROLLOUTS
from toolkit.pipeline.stages import run_stages, summary

HELP = "bring the training data of a recipe up to date: prompts, rollouts and token map"


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
    if args.preview is not None and args.preview < 1:
        raise ArgumentsError(f"--preview is {args.preview}; at least 1 is needed")
    described = run_of(args)
    set_threads()
    outcomes = run_stages(described.folder, recipe_stages(described), until="token_map")
    print("\n" + summary(outcomes))
    if args.preview is not None:
        print()
        target, longest = described.recipe.target, described.recipe.train.data.max_length
        preview.show(
            described.folder / ROLLOUTS, target.model, "train", args.preview, longest, revision=target.revision
        )
    return 0
