"""`toolkit forecast`: accept_length of every draft shape, without serving."""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.commands.model_arguments import engine_config, errors_with_flags, flag_of
from toolkit.commands.recipe_arguments import (
    ArgumentsError,
    add_head_arguments,
    add_prompt_arguments,
    add_size_arguments,
    prompt_settings,
)
from toolkit.pipeline.launch import set_threads

BATCH = 8
ANSWERS = ("prompts", "max_tokens", "temperature")  # options of the answers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_head_arguments(parser)
    add_prompt_arguments(parser)
    parser.add_argument(
        "--rollouts",
        type=Path,
        metavar="FILE",
        help="replay the last answer of each row of this file of `toolkit rollouts`, in place of answers to prompts; "
        "--limit takes its first N rows",
    )
    parser.add_argument(
        "--top-k", type=int, nargs="+", metavar="K", help="branches per node, one pass each (default: 1 2 4 8)"
    )
    add_size_arguments(parser)
    parser.add_argument(
        "--batch",
        "--max-running-requests",
        dest="max_running_requests",
        type=int,
        default=argparse.SUPPRESS,
        help=f"prompts decoded at once (default: {BATCH})",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="record to write (default: runs/forecast-...)",
    )
    parser.epilog = (
        "The target answers the prompts, and for each top_k the head drafts the largest tree after every token of "
        "these answers. The accept_length of every smaller tree follows by replay; greedy and in float32 it is exactly "
        "the engine's."
    )


def run(args: argparse.Namespace) -> int:
    """Prints the surface and writes the record."""
    given = [name for name in ANSWERS if getattr(args, name) is not None]
    if args.rollouts is not None and given:
        raise ArgumentsError(f"{flag_of(given[0])} is for answers that are written here; --rollouts has its answers")
    wanted = prompt_settings(args)
    set_threads()  # before torch loads
    from toolkit.pipeline.measure import forecast_head, largest_shapes

    with errors_with_flags():
        path = forecast_head(
            engine_config(args, max_running_requests=BATCH),
            wanted,
            args.seed,
            largest_shapes(args.top_k, args.num_steps, args.num_draft_tokens),
            rollouts=args.rollouts,
            out=args.out,
        )
    print(path)
    return 0
