"""`toolkit build-token-map`: which target ids a draft vocabulary keeps, counted over rollouts or any text."""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.commands.recipe_arguments import ArgumentsError, add_recipe_arguments, run_of, run_one_stage
from toolkit.weights import read_json

HELP = "count tokens of rollouts, or of any text with any tokenizer, and keep the most common for the draft"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--force", action="store_true", help="count again, even when the map is up to date")
    group = parser.add_argument_group("any corpus instead of the recipe's rollouts")
    group.add_argument("--rollouts", type=Path, metavar="FILE", help="rollouts.jsonl; its response tokens are counted")
    group.add_argument(
        "--text",
        nargs="+",
        action="extend",
        metavar="FILE",
        help="files whose tokens are counted: text, .json or .jsonl, .gz or not",
    )
    group.add_argument(
        "--roles",
        nargs="+",
        default=["assistant"],
        help="whose turns are counted in files of conversations (default: assistant)",
    )
    group.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="tokenizer of this model: demo name, hub id, directory or .gguf (default: the recipe's target)",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="V",
        help="size of the target's vocabulary: rows of its output matrix (default: the tokenizer's size)",
    )
    size = group.add_mutually_exclusive_group()
    size.add_argument("--size", type=int, metavar="N", help="keep the N most common ids")
    size.add_argument(
        "--coverage",
        type=float,
        metavar="SHARE",
        help="keep the fewest ids that cover this share of the counted tokens, e.g. 0.95",
    )
    group.add_argument("--out", type=Path, metavar="DIR", help="output folder (needed with --rollouts or --text)")
    parser.epilog = "Give --text or --rollouts after the overrides, or separate them with --."


def run(args: argparse.Namespace) -> int:
    """Builds the map and prints how much each vocabulary size covers."""
    job = run_of(args)
    if args.rollouts is None and not args.text:
        stray = [
            name for name in ("tokenizer", "vocab_size", "size", "coverage", "out") if getattr(args, name) is not None
        ]
        if stray:
            raise ArgumentsError(
                f"--{stray[0].replace('_', '-')} needs --rollouts or --text; the recipe's own map is set by "
                "overrides: token_map.size=N, or token_map.size=null token_map.coverage=0.95"
            )
        run_one_stage(job, "token_map", args.force)
        _print_table(job.folder / "token_map")
        return 0
    if args.out is None or (args.rollouts is not None and args.text):
        raise ArgumentsError("a map of another corpus needs either --rollouts or --text, and --out DIR")
    size, coverage = args.size, args.coverage
    if size is None and coverage is None:
        size, coverage = job.recipe.token_map.size, job.recipe.token_map.coverage
    from toolkit.pipeline.token_map import map_corpus  # loads torch

    tokenizer, text = args.tokenizer or job.recipe.target.model, args.text or ()
    map_corpus(
        tokenizer,
        args.out,
        size,
        coverage,
        rollouts=args.rollouts,
        text=text,
        roles=args.roles,
        vocab_size=args.vocab_size,
    )
    _print_table(args.out)
    return 0


def _print_table(directory: Path) -> None:
    report = read_json(directory / "coverage.json")
    print(f"{report['tokens']} tokens, {report['distinct']} distinct of {report['vocab_size']} ids\n")
    unseen = "held_out_coverage" in report
    print(f"  {'size':>7}  {'coverage':>8}  {'occurring':>9}" + ("  held out" if unseen else ""))
    for row in report["rows"]:
        mark = "  <- the map" if row["size"] == report["size"] else ""
        more = f"  {100 * row['held_out_coverage']:>7.2f}%" if unseen else ""
        print(f"  {row['size']:>7}  {100 * row['coverage']:>7.2f}%  {row['distinct']:>9}{more}{mark}")
    print(f"\n{directory}/freq_{report['size']}.pt  {directory / 'token_map.safetensors'}")
