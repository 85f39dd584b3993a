"""`toolkit preview`: what a training on rollouts will supervise, in colour."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from toolkit.commands.recipe_arguments import ArgumentsError

HELP = "show which tokens of rollouts a training supervises"
LEGEND = (
    "Green (or in [brackets] without colours): the head is trained to predict it. Yellow (or in parentheses): the "
    "first token of an answer, which always comes from the target. Dim: read, never predicted."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rollouts", type=Path, help="rollouts.jsonl, e.g. runs/smollm2-135m/rollouts/rollouts.jsonl")
    parser.add_argument(
        "--target", help="model whose tokenizer turns the ids into text (default: the target that wrote the rollouts)"
    )
    parser.add_argument(
        "--split",
        choices=("train", "held_out"),
        default="train",
        help="which rollouts: those that are trained on, or those kept for evaluation (default: train)",
    )
    parser.add_argument("--limit", type=int, default=3, metavar="N", help="show N rollouts (default: 3)")
    parser.add_argument(
        "--max-length",
        type=int,
        default=512,
        metavar="N",
        help="longest sequence in tokens, as train.data.max_length (default: 512)",
    )
    parser.epilog = LEGEND


def run(args: argparse.Namespace) -> int:
    if args.limit < 1:
        raise ArgumentsError(f"--limit is {args.limit}; at least 1 is needed")
    show(args.rollouts, args.target, args.split, args.limit, args.max_length)
    return 0


def show(
    rollouts: Path, target: str | None, split: str, limit: int, max_length: int, *, revision: str | None = None
) -> None:
    """Prints the first rollouts of a split, in colours on a terminal. Raises `DataError`."""
    from toolkit.data.preview import preview  # loads torch

    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for line in preview(rollouts, target, split, limit, max_length, revision=revision, coloured=coloured):
        print(line)
