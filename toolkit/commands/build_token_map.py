"""`toolkit build-token-map`: which target ids a draft vocabulary keeps, counted over rollouts or any corpora."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from toolkit.commands.recipe_arguments import ArgumentsError, add_recipe_arguments, run_of, run_one_stage
from toolkit.pipeline.launch import set_threads
from toolkit.threads import physical_cores
from toolkit.weights import read_json

EPILOG = (
    "Give --corpus after the overrides, or separate them with --. A SPEC is a text file, .json, .jsonl (each gzipped "
    "or not) or .parquet; a folder or a glob of them; or a dataset: hub:org/name[/config][:split]. Rollouts are "
    "recognised by their keys: their response tokens are counted, those of the split held_out as held-out text."
)
# What is done, by the flag that says so, and the flags that go with it.
ALLOWED = {
    "diff": ("counts", "tokenizer"),
    "repair": ("counts", "tokenizer", "out"),
    "counts": ("size", "coverage", "out"),
    "corpus": ("held_out", "roles", "tokenizer", "vocab_size", "num_proc", "size", "coverage", "out"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--force", action="store_true", help="count again, even when the map is up to date")
    group = parser.add_argument_group("any corpora instead of the recipe's rollouts")
    for flag, text in (
        ("--corpus", "what is counted; each token counts WEIGHT times, a whole number, 1 if it is left out"),
        ("--held-out", "what is counted only to say how much of it the map covers"),
    ):
        group.add_argument(flag, nargs="+", action="extend", metavar="SPEC[:WEIGHT]", help=text)
    group.add_argument("--roles", nargs="+", help="whose turns are counted in conversations (default: assistant)")
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
    group.add_argument(
        "--num-proc", type=int, metavar="N", help="workers that count, one core each (default: all cores)"
    )
    group.add_argument(
        "--counts", type=Path, metavar="DIR", help="take the counts of this folder; no corpus is read again"
    )
    size = group.add_mutually_exclusive_group()
    size.add_argument("--size", type=int, metavar="N", help="keep the N most common ids")
    size.add_argument(
        "--coverage",
        type=float,
        metavar="SHARE",
        help="keep the fewest ids that cover this share of the counted tokens, e.g. 0.95",
    )
    group.add_argument("--out", type=Path, metavar="DIR", help="output folder")
    other = parser.add_argument_group("existing maps: freq_N.pt, token_map.safetensors, or a folder with one")
    other.add_argument(
        "--diff",
        type=Path,
        nargs=2,
        metavar=("A", "B"),
        help="say in which ids two maps differ; with --counts also what each covers",
    )
    other.add_argument(
        "--repair",
        type=Path,
        metavar="MAP",
        help="write to --out a map without its duplicates and wrong ids, with the special ids of --tokenizer; with "
        "--counts it keeps its size",
    )
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Builds, compares or repairs a map, and prints how much each vocabulary size covers."""
    mode = _mode(args)
    if mode is None:
        job = run_of(args)
        run_one_stage(job, "token_map", args.force)
        _print_report(job.folder / "token_map")
        return 0
    set_threads()  # before torch computes
    from toolkit.pipeline.token_map import counts_of, describe_difference, repair_map, write_map  # loads torch
    from toolkit.tokenmap.counts import load_counts

    if mode == "diff":
        first, second = args.diff
        print(describe_difference(first, second, args.tokenizer, args.counts))
        return 0
    if mode == "repair":
        found, token_map = repair_map(args.repair, args.tokenizer, args.out, args.counts)
        print("\n".join([f"{args.repair}:", *(f"  {one}" for one in found or ["nothing is wrong"])]))
        print(f"\n{args.out}/freq_{token_map.size}.pt has {token_map.size:,} ids")
        return 0
    recipe = run_of(args).recipe
    if mode == "counts":
        counts = load_counts(args.counts)
    else:
        counts = counts_of(
            args.corpus,
            args.held_out or (),
            args.tokenizer or recipe.target.model,
            args.out,
            roles=args.roles or ("assistant",),
            vocab_size=args.vocab_size,
            num_proc=physical_cores() if args.num_proc is None else max(1, args.num_proc),
        )
    size, coverage = args.size, args.coverage
    if size is None and coverage is None:
        size, coverage = recipe.token_map.size, recipe.token_map.coverage
    write_map(counts, args.out, size, coverage)
    _print_report(args.out)
    return 0


def _mode(args: argparse.Namespace) -> str | None:
    """The flag in ALLOWED that says what is done; None: the recipe's own map.

    Raises `ArgumentsError` for arguments that contradict each other or lack another one.
    """
    flags = {*ALLOWED, *(name for names in ALLOWED.values() for name in names)}
    given = [name for name in sorted(flags) if getattr(args, name) is not None]
    mode = next((name for name in ALLOWED if name in given), None)
    for name in given:
        if mode is None:
            raise ArgumentsError(
                f"{_flag(name)} needs --corpus or --counts; the recipe's own map is set by overrides: "
                "token_map.size=N, or token_map.size=null token_map.coverage=0.95"
            )
        if name != mode and name not in ALLOWED[mode]:
            raise ArgumentsError(f"{_flag(name)} does not go with {_flag(mode)}; leave it out")
    if mode not in (None, "diff") and args.out is None:
        raise ArgumentsError(f"{_flag(str(mode))} needs --out DIR, the folder that is written")
    return mode


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _print_report(directory: Path) -> None:
    from rich.text import Text

    from toolkit.bench.table import new_table, wide_console

    report: dict[str, Any] = read_json(directory / "coverage.json")
    held_out = ["held out"] if "held_out_coverage" in report else []
    sizes = new_table("size", ["coverage", "occurring", *held_out])
    for row in report["rows"]:
        mark = "  <- the map" if row["size"] == report["size"] else ""
        unseen = [f"{100 * row['held_out_coverage']:.2f}%"] if held_out else []
        sizes.add_row(f"{row['size']:>9,}{mark}", f"{100 * row['coverage']:.2f}%", f"{row['distinct']:,}", *unseen)
    corpora = new_table("corpus", ["weight", "tokens", "in the map"])
    for one in report["corpora"]:
        name = one["spec"] + (" (held out)" if one["held_out"] else "")
        tasks = [("  " + task["task"], "", task) for task in one["tasks"]]
        for title, weight, part in [(name, str(one["weight"]), one), *tasks]:
            corpora.add_row(Text(title), weight, f"{part['tokens']:,}", f"{100 * part['coverage']:.2f}%")
    print(f"{report['tokens']:,} tokens, {report['distinct']:,} distinct of {report['vocab_size']:,} ids")
    wide_console().print(sizes, corpora)
    if not held_out:
        print("no held-out text was given (--held-out), so the coverage of unseen text is lower than these\n")
    print(f"{directory}/: freq_{report['size']}.pt, token_map.safetensors, coverage.svg, counts.safetensors, ...")
