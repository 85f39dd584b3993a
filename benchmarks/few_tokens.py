"""Which settings make a good head of few tokens: variants x tokens x seeds x sources of prompts, one training each.

    python benchmarks/few_tokens.py RUN_OR_ROLLOUTS ... [--rows few_tokens.jsonl] [--minutes 60] [--jobs 2]
    python benchmarks/few_tokens.py RUN_OR_ROLLOUTS ... --show

A source is a run folder, or a rollouts file, whose token map is then built. `ours` is the recipe (by default the
demo's) with the settings that follow as a.b=c; other variants change a few of its settings, and `published` is
training_published.py, whose rate was not chosen for few tokens. --variant "NAME a.b=c ..." adds one. Every cell is one
training in a process of its own, of features that are stored once a source, and then the forecast on the source's
held-out rollouts; for the variants of --engine the engine's own accept_length on their prompts too.

Resumable: the row of each cell is appended to --rows as it ends, and what stands there is not trained again. Cells come
in an order in which a table that is cut off is of use: few tokens first, then seed by seed. Killed or out of --minutes,
the same command goes on. At the end, and at any time by --show, all rows together become the record.
Writes benchmarks/results/training-few-tokens-<hardware>.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from results_folder import leave
from rich.console import Console
from rich.table import Table
from training import DEFINITIONS as OF_TRAININGS
from training_cells import Cell, cell_of, ended_by_signal, in_processes, key_of, ordered, prepare
from training_jobs import CHAIN, ROLLOUTS, Job, in_process_of_its_own
from training_published import published_settings

from toolkit.bench.records import command_line, make_record
from toolkit.bench.table import decimal
from toolkit.jsonl import RowAppender, cut_torn_line, read_rows
from toolkit.recipe import DEMO_RECIPE, Recipe, load_recipe, result_settings
from toolkit.threads import users_threads

MUON = ("train.optimizer.name=muon", "train.optimizer.learning_rate=1.5e-3", "train.optimizer.muon_learning_rate=0.02")
# What each changes of `ours`. "published" and "fading features" are other trainers (training_published.py, and
# training_features.py); so is what --variant calls by such a name and a comma.
VARIANTS: dict[str, tuple[str, ...]] = {
    "published": (),
    "ours": (),
    "random start": ("train.head.init=random",),
    "copied, no ridge": ("train.head.init=copied",),
    "rate 2e-3": ("train.optimizer.learning_rate=2e-3",),
    "muon": MUON,
    "no curriculum": ("train.unroll.curriculum=[]",),
    "no curriculum, muon": ("train.unroll.curriculum=[]", *MUON),  # the defaults of a recipe
    "trained lm_head": ("train.head.lm_head=target",),
    "fading features": (),
}
ENGINE = ("published", "ours")
DEFINITIONS = {
    **OF_TRAININGS,
    "asked_tokens": "supervised tokens that the training was to see; it ends with the batch that reaches them",
    "unique_tokens": "supervised tokens of the distinct rollouts it saw: beyond one epoch of a source they repeat",
    "digest": "of the target, all settings, the rollouts and the token map: rows of others are not in this record",
    "commit": "of this row, as date and machine, when its training began; the record's own are of its writing",
    "mean": "over seeds",
    "spread": "sample standard deviation over seeds; null with fewer than two",
    "diverged": "what the trainer said of a training that ended in no finite number; else null",
}


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and spread over seeds of each variant, number of tokens and source, in the order of the rows."""
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["source"], row["asked_tokens"], row["variant"]), []).append(row)
    found = []
    for (source, tokens, variant), group in groups.items():
        values = {}
        for name in ("forecast", "accept_length"):
            known = [row[name] for row in group if row.get(name) is not None]
            spread = statistics.stdev(known) if len(known) > 1 else None
            values[name] = {"mean": statistics.mean(known) if known else None, "spread": spread, "seeds": len(known)}
        diverged = sum(row["diverged"] is not None for row in group)
        found.append({"source": source, "tokens": tokens, "variant": variant, **values, "diverged": diverged})
    return found


def show(cells: Sequence[dict[str, Any]]) -> None:
    """One table a source: variants by tokens, the forecast's mean and spread over seeds, the engine's mean behind."""
    amounts = sorted({one["tokens"] for one in cells})
    for source in dict.fromkeys(one["source"] for one in cells):
        table = Table(
            title=f"{source}: forecast of a chain of {CHAIN} (engine), mean ± spread over seeds", title_justify="left"
        )
        table.add_column("variant")
        for amount in amounts:
            table.add_column(f"{amount:,} tokens", justify="right")
        mine = {(one["variant"], one["tokens"]): one for one in cells if one["source"] == source}
        for variant in dict.fromkeys(name for name, _ in mine):
            table.add_row(variant, *(in_words(mine.get((variant, amount))) for amount in amounts))
        Console(width=110).print(table)


def in_words(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    forecast, engine = cell["forecast"], cell["accept_length"]
    spread = "" if forecast["spread"] is None else f" ± {forecast['spread']:.2f}"
    real = "" if engine["mean"] is None else f" ({engine['mean']:.2f})"
    failed = f", {cell['diverged']} diverged" if cell["diverged"] else ""
    return f"{decimal(forecast['mean'])}{spread}{real} n={forecast['seeds']}{failed}"


def planned(args: argparse.Namespace, folders: dict[str, Path]) -> list[Cell]:
    """All cells of the table, in the order in which they are trained."""
    cells = []
    for source, folder in folders.items():
        for tokens in args.tokens:
            for seed in args.seeds:
                for variant, changes in args.variants.items():
                    recipe = replace(recipe_of(args, changes), seed=seed)
                    prompts = args.prompts if variant in args.engine else 0
                    job = Job(variant, recipe, folder, tokens, None, 0, prompts, args.max_tokens, args.threads)
                    cells.append(cell_of(source, job))
    return ordered(cells)


def recipe_of(args: argparse.Namespace, changes: Sequence[str] = ()) -> Recipe:
    return load_recipe(args.recipe or DEMO_RECIPE, ["train.data.features=offline", *args.overrides, *changes])


def until(cells: Sequence[Cell], minutes: float | None) -> Iterator[Cell]:
    """The cells, as long as there is time to start one."""
    began = time.monotonic()
    for number, cell in enumerate(cells):
        if minutes is not None and time.monotonic() - began >= 60 * minutes:
            print(f"out of minutes: {len(cells) - number} cells are left", file=sys.stderr, flush=True)
            return
        yield cell


def train_missing(args: argparse.Namespace, cells: Sequence[Cell]) -> int:
    """Append the row of each cell that has none yet; returns how many failed."""
    done = {key_of(row) for _, row in read_rows(args.rows)}
    missing = [cell for cell in cells if cell.key not in done]
    print(f"{len(cells) - len(missing)} of {len(cells)} cells are done", file=sys.stderr, flush=True)
    failed, began = 0, time.monotonic()
    with ended_by_signal(), RowAppender(args.rows) as kept:
        for number, (cell, row) in enumerate(in_processes(until(missing, args.minutes), args.jobs), 1):
            *key, _ = cell.key
            if row is None:
                failed += 1
                print(f"failed: {key}", file=sys.stderr, flush=True)
                continue
            kept.append(row)
            each = (time.monotonic() - began) / 60 / number
            said = row["diverged"] or f"forecast {decimal(row['forecast'])}"
            print(f"{number} of {len(missing)}, {each:.1f} min each: {key} {said}", file=sys.stderr, flush=True)
    return failed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "given", nargs="+", metavar="SOURCE | a.b=c", help="[NAME:]run folder or rollouts file; settings"
    )
    parser.add_argument("--recipe", default=None, help="of `ours` (default: the demo recipe)")
    parser.add_argument(
        "--rows", type=Path, default=Path("few_tokens.jsonl"), help="where rows are kept (default: %(default)s)"
    )
    parser.add_argument(
        "--features", type=Path, help="folder for what is stored once a source (default: beside --rows)"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[50_000, 200_000, 1_000_000], help="supervised, seen")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="these alone (default: all)")
    parser.add_argument("--variant", action="append", default=[], metavar='"NAME a.b=c ..."', help="one more")
    parser.add_argument("--engine", nargs="*", default=list(ENGINE), help="variants that the engine measures too")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts that the engine answers, at most")
    parser.add_argument("--max-tokens", type=int, default=96, help="of the engine's answers")
    parser.add_argument("--minutes", type=float, help="start no cell after so many")
    parser.add_argument("--jobs", type=int, default=1, help="cells trained at a time, which then share the machine")
    parser.add_argument("--show", action="store_true", help="train nothing: the record and table of what is there")
    parser.add_argument("--note", help="what else the machine did, for the record")
    parser.add_argument("--out", type=Path)
    args = parser.parse_intermixed_args()
    args.overrides = [one for one in args.given if "=" in one]
    args.sources = named_sources([one for one in args.given if "=" not in one])
    args.variants = chosen_variants(args.variant, args.only)
    check_names(args.engine, VARIANTS | args.variants)
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: at least 1 is needed")
    args.features = args.features or args.rows.with_name(f"{args.rows.stem}-sources")
    args.threads = int(users_threads() or 1)
    return args


def named_sources(given: Sequence[str]) -> dict[str, Path]:
    """By name: what stands before a colon, else the folder's (of a rollouts file: the file's)."""
    found: dict[str, Path] = {}
    for one in given:
        name, colon, path = one.partition(":")
        where = Path(path if colon else one)
        name = name if colon else (where.resolve().name if where.is_dir() else where.stem)
        if not (where / ROLLOUTS if where.is_dir() else where).is_file():
            raise SystemExit(f"{where}: a run folder with {ROLLOUTS}, or a rollouts file, is needed")
        if name in found:
            raise SystemExit(f"two sources are called {name}; write OTHER-NAME:{where}")
        found[name] = where
    if not found:
        raise SystemExit("no source came; name run folders or rollouts files")
    return found


def chosen_variants(more: Sequence[str], only: Sequence[str] | None) -> dict[str, tuple[str, ...]]:
    """Of the command line: a name may have several words, settings have a `=`."""
    every = dict(VARIANTS)
    for one in more:
        words = one.split()
        changes = tuple(word for word in words if "=" in word)
        name = " ".join(word for word in words if "=" not in word)
        if not name or not changes or name in VARIANTS:
            raise SystemExit(
                f"--variant {one!r}: a new name and settings such as train.optimizer.learning_rate=2e-3 are needed"
            )
        idle = [word for word in changes if not word.startswith("train.")]
        if idle:
            raise SystemExit(f"--variant {one!r}: {idle[0]} is no setting of the training, train.a=b")
        every[name] = changes
    check_names(only or (), every)
    return {name: every[name] for name in only or every}


def check_names(names: Sequence[str], every: Mapping[str, Any]) -> None:
    unknown = [name for name in names if name not in every]
    if unknown:
        raise SystemExit(f"no variant is called {', '.join(unknown)}; there are {', '.join(every)}")


def warn_of_mixed(rows: Sequence[dict[str, Any]]) -> None:
    """Rows of several sessions may come from other code, or from a machine that rounds otherwise."""
    for name in ("commit", "machine"):
        found = sorted({str(row.get(name, "unknown")) for row in rows})
        if len(found) > 1:
            print(f"warning: rows of several {name}s stand side by side: {', '.join(found)}", file=sys.stderr)


def write_record(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    base = recipe_of(args)
    names = ("tokens", "seeds", "variants", "engine", "prompts", "max_tokens", "jobs", "threads")
    settings = {name: getattr(args, name) for name in names} | {"sources": list(args.sources)}
    settings |= {"recipe": base.name, "target": base.target.model}
    settings["train"] = {
        "published": result_settings(published_settings(base.train)),
        "ours": result_settings(base.train),
    }
    warn_of_mixed(rows)
    cells = summary(rows)
    command = f"python benchmarks/{command_line()}"
    record = make_record("training", command, settings, rows, cells=cells, definitions=DEFINITIONS, note=args.note)
    show(cells)
    leave(record, "training-few-tokens", args.out)


def main() -> int:
    args = arguments()
    torch.set_num_threads(args.threads)
    if not args.show:  # others may be writing
        args.rows.parent.mkdir(parents=True, exist_ok=True)
        args.rows.touch()
        cut_torn_line(args.rows)
    folders = {name: args.features / name for name in args.sources}
    if not args.show:
        for name, given in args.sources.items():
            print(
                f"{name}: {in_process_of_its_own(prepare, folders[name], given, recipe_of(args))}",
                file=sys.stderr,
                flush=True,
            )
    unprepared = [name for name, folder in folders.items() if not folder.is_dir()]
    if unprepared:
        raise SystemExit(f"nothing was trained on {', '.join(unprepared)} yet; call this without --show")
    cells = planned(args, folders)
    failed = 0 if args.show else train_missing(args, cells)
    place = {cell.key: number for number, cell in enumerate(cells)}
    rows = [row for _, row in read_rows(args.rows) if key_of(row) in place]
    write_record(args, sorted(rows, key=lambda row: place[key_of(row)]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
