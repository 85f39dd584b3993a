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
DEFAULT_ROLES = ("assistant",)
# What is done, by the flag that says so, and the flags that go with it.
ALLOWED = {
    "diff": ("counts", "tokenizer"),
    "repair": ("counts", "tokenizer", "vocab_size", "out"),
    "counts": ("size", "coverage", "out", "tokenizer"),
    "corpus": ("held_out", "roles", "tokenizer", "vocab_size", "num_proc", "size", "coverage", "out"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--force", action="store_true", help="count again, even when the map is up to date")
    group = parser.add_argument_group("any corpora instead of the recipe's rollouts")
    group.add_argument(
        "--corpus",
        nargs="+",
        action="extend",
        metavar="SPEC[:WEIGHT]",
        help="what is counted; each token counts WEIGHT times, a whole number, 1 if it is left out",
    )
    group.add_argument(
        "--held-out",
        nargs="+",
        action="extend",
        metavar="SPEC[:WEIGHT]",
        help="what is counted only to say how much of it the map covers",
    )
    group.add_argument(
        "--roles",
        nargs="+",
        help="whose turns are counted in conversations (default: assistant)",
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
    group.add_argument(
        "--num-proc", type=int, metavar="N", help="workers that count, one core each (default: all cores)"
    )
    group.add_argument(
        "--counts", type=Path, metavar="DIR", help="take the counts of this folder; no corpus is read again"
    )
    _size_arguments(group)
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


def _size_arguments(group: Any) -> None:
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--size",
        type=int,
        metavar="N",
        help="keep the N most common ids",
    )
    size.add_argument(
        "--coverage",
        type=float,
        metavar="SHARE",
        help="keep the fewest ids that cover this share of the counted tokens, e.g. 0.95",
    )


def run(args: argparse.Namespace) -> int:
    """Builds, compares or repairs a map, and prints how much each vocabulary size covers."""
    _check(args)
    if args.diff:
        from toolkit.pipeline.token_map import describe_difference  # loads torch

        first, second = args.diff
        print(describe_difference(first, second, args.tokenizer, args.counts))
        return 0
    job = run_of(args)
    tokenizer = args.tokenizer or job.recipe.target.model
    if args.repair:
        from toolkit.pipeline.token_map import repair_map  # loads torch

        found, token_map = repair_map(args.repair, args.tokenizer, args.vocab_size, args.out, args.counts)
        print("\n".join([f"{args.repair}:", *(f"  {one}" for one in found or ["nothing is wrong"])]))
        print(f"\n{args.out}/freq_{token_map.size}.pt has {token_map.size:,} ids")
        return 0
    if not args.counts and not args.corpus:
        run_one_stage(job, "token_map", args.force)
        _print_report(job.folder / "token_map")
        return 0
    size, coverage = args.size, args.coverage
    if size is None and coverage is None:
        size, coverage = job.recipe.token_map.size, job.recipe.token_map.coverage
    _write_map(args, tokenizer, size, coverage)
    _print_report(args.out)
    return 0


def _write_map(args: argparse.Namespace, tokenizer: str, size: int | None, coverage: float | None) -> None:
    """Writes the map of --counts or --corpus."""
    set_threads()  # before torch computes
    from toolkit.pipeline.token_map import counts_of, write_map  # loads torch
    from toolkit.tokenmap.counts import load_counts

    if args.counts:
        counts = load_counts(args.counts)
    else:
        counts = counts_of(
            args.corpus,
            args.held_out or (),
            tokenizer,
            args.out,
            roles=args.roles or DEFAULT_ROLES,
            vocab_size=args.vocab_size,
            num_proc=args.num_proc or physical_cores(),
        )
    write_map(counts, args.out, size, coverage)


def _check(args: argparse.Namespace) -> None:
    """Raises `ArgumentsError` for arguments that contradict each other or lack another one."""
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
    if mode == "repair" and args.counts is not None and args.vocab_size is not None:
        raise ArgumentsError("--vocab-size and --counts are both given; the counts state the size of the vocabulary")
    if args.num_proc is not None and args.num_proc < 1:
        raise ArgumentsError(f"--num-proc is {args.num_proc}; at least 1 is needed")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _print_report(directory: Path) -> None:
    report = read_json(directory / "coverage.json")
    held_out = "held_out_coverage" in report
    print(f"{report['tokens']:,} tokens, {report['distinct']:,} distinct of {report['vocab_size']:,} ids\n")
    print(f"  {'size':>9}  {'coverage':>8}  {'occurring':>9}" + ("  held out" if held_out else ""))
    for row in report["rows"]:
        mark = "  <- the map" if row["size"] == report["size"] else ""
        more = f"  {100 * row['held_out_coverage']:>7.2f}%" if held_out else ""
        print(f"  {row['size']:>9,}  {100 * row['coverage']:>7.2f}%  {row['distinct']:>9,}{more}{mark}")
    print()
    for line in _table(list(_corpus_rows(report))):
        print(f"  {line}")
    if not held_out:
        print("\nno held-out text was given (--held-out), so the coverage of unseen text is lower than these")
    files = [f"freq_{report['size']}.pt", "token_map.safetensors", "coverage.svg", "counts.safetensors"]
    print(f"\n{directory}/: {', '.join(files)}, ...")


def _corpus_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("corpus", "weight", "documents", "tokens", "in the map")]
    for one in report["corpora"]:
        name = one["spec"] + (" (held out)" if one["held_out"] else "")
        rows.append((name, str(one["weight"]), f"{one['documents']:,}", *_tokens(one)))
        rows += [(f"  {task['task']}", "", "", *_tokens(task)) for task in one["tasks"]]
        if "held_out_tokens" in one:
            rows.append(("  its held-out rows", "", "", *_tokens(one, "held_out_")))
    return rows


def _tokens(entry: dict[str, Any], prefix: str = "") -> tuple[str, str]:
    return f"{entry[prefix + 'tokens']:,}", f"{100 * entry[prefix + 'coverage']:.2f}%"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
