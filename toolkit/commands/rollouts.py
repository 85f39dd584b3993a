"""`toolkit rollouts`: the target answers the prompts itself, in the bundled engine or on servers."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from toolkit.commands.recipe_arguments import ArgumentsError, add_recipe_arguments, run_of, run_one_stage
from toolkit.log import get_logger
from toolkit.pipeline.launch import set_threads

log = get_logger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--force", action="store_true", help="answer again, even when the rollouts are up to date")
    group = parser.add_argument_group("other prompts than the recipe's run has (both are needed)")
    group.add_argument(
        "--prompts",
        metavar="SOURCE",
        help="answer these conversations: a file (.jsonl, .json, .gz or not), a directory or hub:org/name[:split]",
    )
    group.add_argument(
        "--out", type=Path, metavar="FILE", help="rollouts.jsonl to write; one that was interrupted is continued"
    )
    group.add_argument(
        "--draft",
        type=Path,
        metavar="DIR",
        help="draft head that drafts while the answers are written, to write them sooner",
    )


def run(args: argparse.Namespace) -> int:
    """Writes rollouts: the run folder's stage, or --prompts into --out."""
    job = run_of(args)
    set_threads()
    if (args.prompts is None) != (args.out is None) or (args.draft is not None and args.out is None):
        raise ArgumentsError(
            "--prompts SOURCE and --out FILE must be given together, and --draft needs both; add what is missing"
        )
    if args.out is None:
        run_one_stage(job, "rollouts", args.force)
        return 0
    if args.force:
        raise ArgumentsError(f"--force is for the recipe's own rollouts; remove {args.out} to answer again")
    if job.recipe.rollouts.keep_features:
        log.info("rollouts.keep_features is for the recipe's own rollouts; none are kept of %s", args.out)
        job.recipe = replace(job.recipe, rollouts=replace(job.recipe.rollouts, keep_features=False))
    from toolkit.pipeline.rollouts import answer_prompts  # loads torch

    print(answer_prompts(job.target, job.recipe.rollouts, job.recipe.seed, args.prompts, args.out, args.draft))
    return 0
