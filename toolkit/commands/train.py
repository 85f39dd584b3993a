"""`toolkit train`: the training stage, in processes of its own under `accelerate launch`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from toolkit.commands.recipe_arguments import add_recipe_arguments, run_of
from toolkit.pipeline.launch import set_threads
from toolkit.pipeline.run import put_by_hand, recipe_stages
from toolkit.pipeline.stages import PipelineError, run_stages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument(
        "--num-processes", type=int, metavar="N", help="training processes (default: one a GPU or part of a row)"
    )
    parser.add_argument(
        "--config-file",
        type=Path,
        metavar="FILE",
        help="settings of accelerate and DeepSpeed (default: recipes/accelerate/zero2.yaml)",
    )
    parser.add_argument("--force", action="store_true", help="train again, even when the head is up to date")
    parser.epilog = "Rollouts and token map come from the recipe's run folder; missing or outdated ones are made first."


def run(args: argparse.Namespace) -> int:
    """Trains; the exit status is that of the training processes."""
    job = run_of(args)
    job.processes, job.accelerate_config, job.trains = args.num_processes, args.config_file, True
    set_threads()
    try:
        run_stages(
            job.folder,
            recipe_stages(job),
            only="train" if put_by_hand(job.folder) else None,
            until="train",
            force="train" if args.force else None,
        )
    except PipelineError as error:
        # The training processes' own status, for scripts.
        print(f"toolkit: error: {error}", file=sys.stderr)
        return error.status
    return 0
