"""`toolkit synthesize`: the prompts of a run, from sources or written by the target itself."""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.commands.recipe_arguments import ArgumentsError, add_recipe_arguments, run_of, run_one_stage
from toolkit.pipeline.launch import set_threads
from toolkit.pipeline.run import recipe_stages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--force", action="store_true", help="collect again, even when the prompts are up to date")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the prompts to this file, not into the recipe's run folder"
    )
    parser.epilog = "For example: toolkit synthesize prompts.synthesize=100 --out prompts/prompts.jsonl"


def run(args: argparse.Namespace) -> int:
    """Writes prompts: the run folder's stage, or --out."""
    job = run_of(args)
    recipe_stages(job)  # a recipe without prompts is refused before the target is loaded
    set_threads()
    if args.out is None:
        run_one_stage(job, "prompts", args.force)
        return 0
    if args.force:
        raise ArgumentsError(f"--force is for the recipe's run folder; remove {args.out.parent} to start over")
    from toolkit.pipeline.rollouts import write_prompts  # loads torch

    print(write_prompts(job.target, job.recipe.prompts, job.recipe.seed, args.out))
    return 0
