"""`toolkit build-token-map`: which target ids a draft vocabulary keeps, counted over rollouts or any text."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.commands.recipe_arguments import ArgumentsError, add_recipe_arguments, run_of, run_one_stage

if TYPE_CHECKING:
    from toolkit.targets.load import Target

HELP = "count tokens of rollouts, or of any text with any tokenizer, and keep the most common for the draft"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--force", action="store_true", help="count again, even when the map is up to date")
    group = parser.add_argument_group("any corpus instead of the recipe's rollouts")
    group.add_argument("--rollouts", type=Path, metavar="FILE", help="rollouts.jsonl; its response tokens are counted")
    group.add_argument(
        "--text", nargs="+", action="extend", metavar="FILE", help="text, .json or .jsonl files, .gz or not"
    )
    group.add_argument("--roles", nargs="+", default=["assistant"], help="turns counted in files of conversations")
    group.add_argument(
        "--tokenizer", metavar="MODEL", help="target's name, hub id, directory or .gguf (default: recipe's)"
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="V",
        help="rows of the target's output embedding (default: the tokenizer's size)",
    )
    size = group.add_mutually_exclusive_group()
    size.add_argument("--size", type=int, metavar="N", help="keep N ids")
    size.add_argument(
        "--coverage", type=float, metavar="SHARE", help="keep the fewest ids that cover this share, e.g. 0.95"
    )
    group.add_argument("--out", type=Path, metavar="DIR", help="where the map goes (needed with --rollouts or --text)")
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
                f"--{stray[0].replace('_', '-')} came without --rollouts or --text; the recipe's own map is set by "
                "overrides: token_map.size=N, or token_map.size=null token_map.coverage=0.95"
            )
        run_one_stage(job, "token_map", args.force)
        _print_table(job.folder / "token_map")
        return 0
    if args.out is None or (args.rollouts is not None and args.text):
        raise ArgumentsError("one of --rollouts and --text, and --out DIR, are needed to build a map of any corpus")
    size, coverage = args.size, args.coverage
    if size is None and coverage is None:
        size, coverage = job.recipe.token_map.size, job.recipe.token_map.coverage
    _map_corpus(args, job.recipe.target.model, size, coverage)
    _print_table(args.out)
    return 0


def map_rollouts(target: Target, rollouts: Path, out: Path, size: int | None, coverage: float | None) -> str:
    """The map of a run: over the response tokens of the training split. Returns a headline."""
    from toolkit.tokenmap.corpus import rollout_responses

    return _build(
        rollout_responses(rollouts),
        target.tokenizer,
        target.vocab_size,
        target.stop_ids,
        out,
        size,
        coverage,
        {"rollouts": rollouts.name, "split": "train"},
        held_out=rollout_responses(rollouts, split="held_out"),
    )


def _map_corpus(args: argparse.Namespace, default_tokenizer: str, size: int | None, coverage: float | None) -> None:
    from toolkit.targets.load import load_tokenizer
    from toolkit.tokenmap.corpus import corpus_ids, rollout_responses

    name = args.tokenizer or default_tokenizer
    tokenizer = load_tokenizer(name)
    vocab_size = args.vocab_size or len(tokenizer)
    if args.rollouts is not None:
        sequences: Iterable[Sequence[int]] = rollout_responses(args.rollouts, split=None)
        corpus: dict[str, Any] = {"rollouts": str(args.rollouts), "split": None}
    else:
        sequences = corpus_ids(
            args.text, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], roles=args.roles
        )
        corpus = {"text": args.text, "roles": args.roles}
    _build(sequences, tokenizer, vocab_size, (), args.out, size, coverage, {**corpus, "tokenizer": name})


def _build(
    sequences: Iterable[Sequence[int]],
    tokenizer: Any,
    vocab_size: int,
    stop_ids: Iterable[int],
    out: Path,
    size: int | None,
    coverage: float | None,
    corpus: dict[str, Any],
    held_out: Iterable[Sequence[int]] | None = None,
) -> str:
    from toolkit.tokenmap.build import build_token_map, forced_ids_for
    from toolkit.tokenmap.counts import count_tokens
    from toolkit.tokenmap.files import write_stage

    counts = count_tokens(sequences, vocab_size)
    forced = forced_ids_for(tokenizer, stop_ids, vocab_size)
    # A vocabulary smaller than the size asked for is kept whole.
    wanted = None if size is None else min(size, vocab_size)
    token_map = build_token_map(counts, size=wanted, coverage=coverage, forced_ids=forced)
    unseen = None if held_out is None else count_tokens(held_out, vocab_size)
    report = write_stage(out, token_map, counts, forced_ids=forced, corpus=corpus, held_out=unseen)
    told = f"{report['size']} of {vocab_size} ids cover {100 * report['coverage']:.1f} % of {report['tokens']} tokens"
    if unseen is None or not report["held_out_tokens"]:
        return told
    return f"{told}, {100 * report['held_out_coverage']:.1f} % of {report['held_out_tokens']} held out"


def _print_table(directory: Path) -> None:
    from toolkit.weights import read_json

    report = read_json(directory / "coverage.json")
    print(f"{report['tokens']} tokens, {report['distinct']} distinct of {report['vocab_size']} ids\n")
    unseen = "held_out_coverage" in report
    print(f"  {'size':>7}  {'coverage':>8}  {'occurring':>9}" + ("  held out" if unseen else ""))
    for row in report["rows"]:
        mark = "  <- the map" if row["size"] == report["size"] else ""
        more = f"  {100 * row['held_out_coverage']:>7.2f}%" if unseen else ""
        print(f"  {row['size']:>7}  {100 * row['coverage']:>7.2f}%  {row['distinct']:>9}{more}{mark}")
    print(f"\n{directory}/freq_{report['size']}.pt  {directory / 'token_map.safetensors'}")
