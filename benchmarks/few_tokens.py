"""Which recipe makes the better head of few tokens, each at its best: variants x tokens x seeds x sources of prompts.

    python benchmarks/few_tokens.py RUN_OR_ROLLOUTS ... [--tokens 50000 200000] [--minutes 60] [--jobs 2] [a.b=c ...]
    python benchmarks/few_tokens.py --show [RUN_OR_ROLLOUTS ...]

A source is a run folder, or a rollouts file, whose token map is then built. `published` is training_published.py;
`ours` is the recipe (by default the demo's) with the settings that follow as a.b=c. --variant "NAME a.b=c ..." adds
one that changes a few of them.

The held-out rollouts of a source are cut in two halves. For every variant, source and number of tokens, learning rate
and warm-up are chosen by the forecast on the validation half: all --rates (or, of Muon, as many --muon-rates) at the
first of --warmups and the first seed, then the best of them at the other warm-ups. The chosen one is trained with the
other seeds too. Only its heads see the test half, where the engine measures accept_length as well; --screen leaves
both out, so that many variants can be compared without a look at the test half. A head's warm start is fitted on the
first tokens of its own training, and its time counts.

Resumable: the row of each training and each test is appended to --rows as it ends, heads are kept beside the features,
and what stands there is not done again: few tokens come first. Killed or out of --minutes, the same command goes on,
also with more rates, seeds or variants. Another day, on another machine, needs the rollouts
file and the record, --continues. At the end, and at any time by --show, all rows together become the record.
Without a source, --show prints the records that there are.
Writes benchmarks/results/training-few-tokens-<hardware>.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from few_tokens_table import NAME, PUBLISHED, best, show, show_records, summary, tries_of, warnings
from harness import in_process_of_its_own, leave
from training_cells import TRIED, Cell, cell_of, ended_by_signal, in_processes, key_of, prepare
from training_jobs import CHAIN, ROLLOUTS, SPLITS, TEST, VALIDATION, Job
from training_jobs import DEFINITIONS as OF_TRAININGS
from training_published import published_settings

from toolkit.bench.records import command_line, make_record, read_record
from toolkit.bench.table import decimal
from toolkit.jsonl import RowAppender, cut_torn_line, read_rows
from toolkit.recipe import DEMO_RECIPE, Recipe, load_recipe, result_settings
from toolkit.threads import users_threads

VARIANTS: dict[str, tuple[str, ...]] = {PUBLISHED: (), "ours": ()}
DEFINITIONS = {
    **OF_TRAININGS,
    "split": "the half of the held-out rollouts that judged the head; of a test, columns of the training are its own",
    "asked_tokens": "supervised tokens that the training was to see; it ends with the batch that reaches them",
    "unique_tokens": "supervised tokens of the distinct rollouts it saw: beyond one epoch of a source they repeat",
    "digest": "of the target, all settings, the rollouts and the token map: rows of others are not in this record",
    "commit": "of this row, as date and machine, when its job began; the record's own are of its writing",
    "diverged": "what the trainer said of a training that ended in no finite number, else null; in rows over all "
    "seeds: how many of the tries",
    "diverged_seeds": "whose training diverged at the chosen rate and warm-up: they are in no mean of the row",
    "seed": "null: a row over all `seeds`, pooled over their verify steps; its times and tokens are means",
    "accept_length_spread": "sample standard deviation over seeds; null with fewer than two",
    "accept_length_ratio": "to the published recipe's at its own best rate and warm-up, the same tokens, source, seeds "
    "and prompts; its interval, 95 %, is a bootstrap over prompts and seeds, which both have in common",
    "tries": "rates and warm-ups among which the validation half chose",
    "at_edge": "whether the chosen rate is the lowest or highest of those tried: a better one may lie beyond",
}


def recipe_of(args: argparse.Namespace, changes: Sequence[str] = ()) -> Recipe:
    return load_recipe(args.recipe or DEMO_RECIPE, ["train.data.features=offline", *args.overrides, *changes])


class Plan:
    """All cells of the table, of which each batch depends on the rows of those before it."""

    def __init__(self, args: argparse.Namespace, folders: dict[str, Path]) -> None:
        self.args, self.folders = args, folders
        self.recipes = {name: recipe_of(args, changes) for name, changes in args.variants.items()}
        if PUBLISHED in self.recipes:
            base = self.recipes[PUBLISHED]
            self.recipes[PUBLISHED] = replace(base, train=published_settings(base.train))
        for name, changes in args.variants.items():
            tried = (TRIED[self.recipes[name].train.optimizer.name], "warmup_ratio")
            for change in changes:
                if change.partition("=")[0] in {f"train.optimizer.{one}" for one in tried}:
                    raise SystemExit(f"variant {name!r}: {change} is chosen by validation; use --rates or --warmups")
            train = self.recipes[name].train
            if train.head.kind in ("block", "dspark") and train.unroll.ttt_steps < CHAIN:
                few = f"train.unroll.ttt_steps={train.unroll.ttt_steps}"
                raise SystemExit(f"variant {name!r}: {few} trains shorter blocks than the chain of {CHAIN} that judges")
        self._made: dict[tuple[Any, ...], Cell] = {}

    def cell(self, source: str, tokens: int, variant: str, seed: int, rate: float, warmup: float, split: str) -> Cell:
        key = (source, tokens, variant, seed, rate, warmup, split)
        if key not in self._made:
            args, recipe = self.args, replace(self.recipes[variant], seed=seed)
            job = Job(variant, recipe, self.folders[source], tokens, split, args.prompts, args.max_tokens, args.threads)
            self._made[key] = cell_of(source, job, rate, warmup)
        return self._made[key]

    def rates(self, variant: str) -> Sequence[float]:
        muon = self.recipes[variant].train.optimizer.name == "muon"
        return self.args.muon_rates if muon else self.args.rates

    def known(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows of this command's sources, variants and settings, whatever rate and warm-up they tried."""
        found = [row for row in rows if self._planned(row) and self._again(row).key == key_of(row)]
        return list({key_of(row): row for row in found}.values())

    def _planned(self, row: dict[str, Any]) -> bool:
        return row["source"] in self.folders and row["variant"] in self.recipes and row.get("split") in SPLITS

    def _again(self, row: dict[str, Any]) -> Cell:
        about = (row["source"], row["asked_tokens"], row["variant"], row["seed"])
        return self.cell(*about, row["learning_rate"], row["warmup_ratio"], row["split"])

    def missing(self, tokens: int, rows: Sequence[dict[str, Any]]) -> list[Cell]:
        """What can be done next for so many tokens; empty once all tests are done."""
        done = {key_of(row) for row in rows}
        found = []
        for source in self.folders:
            for variant in self.recipes:
                for batch in self._batches(source, tokens, variant, rows):
                    left = [cell for cell in batch if cell.key not in done]
                    found += left
                    if left:
                        break
        return found

    def _batches(self, source: str, tokens: int, variant: str, rows: Sequence[dict[str, Any]]) -> Iterator[list[Cell]]:
        """Of one variant: the rates, the warm-ups of the best, its other seeds, its tests."""
        of, (seed, *_) = (source, tokens, variant), self.args.seeds
        first, *others = self.args.warmups
        yield [self.cell(*of, seed, rate, first, VALIDATION) for rate in self.rates(variant)]
        won = best([row for row in tries_of(rows, *of) if row["warmup_ratio"] == first])
        if won is None:
            return
        yield [self.cell(*of, seed, won["learning_rate"], warmup, VALIDATION) for warmup in others]
        if self.args.screen:
            return
        won = best(tries_of(rows, *of))
        assert won is not None, "there was one"
        chosen = won["learning_rate"], won["warmup_ratio"]
        trained = [self.cell(*of, seed, *chosen, VALIDATION) for seed in self.args.seeds]
        yield trained
        by_key = {key_of(row): row for row in rows}
        judged = [by_key[cell.key] for cell in trained if by_key[cell.key]["diverged"] is None]
        yield [replace(self.cell(*of, row["seed"], *chosen, TEST), known=row) for row in judged]


def until(cells: Sequence[Cell], began: float, minutes: float | None) -> Iterator[Cell]:
    """The cells, as long as there is time to start one."""
    for number, cell in enumerate(cells):
        if minutes is not None and time.monotonic() - began >= 60 * minutes:
            print(f"out of minutes: {len(cells) - number} cells and what follows them are left", file=sys.stderr)
            return
        yield cell


def train_missing(args: argparse.Namespace, plan: Plan) -> int:
    """Append the rows that are missing, batch by batch; returns how many failed of the batch it then ended with."""
    began, ended = time.monotonic(), 0
    for tokens in sorted(args.tokens):
        while cells := plan.missing(tokens, plan.known(rows_of(args))):
            before, failed = ended, 0
            with ended_by_signal(), RowAppender(args.rows) as kept:
                for cell, row in in_processes(until(cells, began, args.minutes), args.jobs):
                    *key, _ = cell.key
                    ended += 1
                    if row is None:
                        failed += 1
                        print(f"failed: {key}", file=sys.stderr, flush=True)
                        continue
                    kept.append(row)
                    each = (time.monotonic() - began) / 60 / ended
                    said = row["diverged"] or f"forecast {decimal(row['forecast'])}"
                    print(f"{ended} done, {each:.1f} min each: {key} {said}", file=sys.stderr, flush=True)
            if failed or ended - before < len(cells):
                return failed
    return 0


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of the file, and of the record that is continued, without what that says over all seeds."""
    before = read_record(args.continues, "training")["rows"] if args.continues else []
    return [row for row in before if row["seed"] is not None] + [row for _, row in read_rows(args.rows)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "given", nargs="*", metavar="SOURCE | a.b=c", help="[NAME:]run folder or rollouts file; settings"
    )
    parser.add_argument("--recipe", default=None, help="of `ours` (default: the demo recipe)")
    parser.add_argument(
        "--rows", type=Path, default=Path("few_tokens.jsonl"), help="where rows are kept (default: %(default)s)"
    )
    parser.add_argument("--continues", type=Path, metavar="RECORD", help="whose rows count as done too")
    parser.add_argument(
        "--features", type=Path, help="folder for what is stored once a source, and heads (default: beside --rows)"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[50_000, 200_000], help="supervised, seen")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="rate and warm-up are of the first")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3, 2e-3], help="of AdamW, tried")
    parser.add_argument("--muon-rates", type=float, nargs="+", default=[5e-3, 0.01, 0.02, 0.04], help="of Muon")
    parser.add_argument("--warmups", type=float, nargs="+", default=[0.015, 0.1], help="shares of the steps, tried")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="these alone (default: all)")
    parser.add_argument("--variant", action="append", default=[], metavar='"NAME a.b=c ..."', help="one more")
    parser.add_argument("--screen", action="store_true", help="the first seed's tries alone, and no tests")
    parser.add_argument("--prompts", type=int, default=64, help="of the test half that the engine answers, at most")
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
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: at least 1 is needed")
    if len(args.rates) != len(args.muon_rates):
        parser.error(
            f"{len(args.rates)} --rates, {len(args.muon_rates)} --muon-rates: each optimizer has as many tries"
        )
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
    return found


def chosen_variants(more: Sequence[str], only: Sequence[str] | None) -> dict[str, tuple[str, ...]]:
    """Of the command line: a name may have several words, settings have a `=`."""
    every = dict(VARIANTS)
    for one in more:
        words = one.split()
        changes = tuple(word for word in words if "=" in word)
        name = " ".join(word for word in words if "=" not in word)
        if not name or not changes or name in VARIANTS:
            raise SystemExit(f"--variant {one!r}: a new name and settings such as train.unroll.ttt_steps=3 are needed")
        idle = [word for word in changes if not word.startswith("train.")]
        if idle:
            raise SystemExit(f"--variant {one!r}: {idle[0]} is no setting of the training, train.a=b")
        every[name] = changes
    unknown = [name for name in only or () if name not in every]
    if unknown:
        raise SystemExit(f"no variant is called {', '.join(unknown)}; there are {', '.join(every)}")
    return {name: every[name] for name in only or every}


def write_record(args: argparse.Namespace, plan: Plan) -> None:
    rows = plan.known(rows_of(args))
    names = ("rates", "muon_rates", "warmups", "variants", "prompts", "max_tokens", "jobs", "threads")
    settings = {name: getattr(args, name) for name in names} | {"sources": list(args.sources)}
    base = recipe_of(args)
    settings |= {"recipe": base.name, "target": base.target.model}
    settings["train"] = {name: result_settings(recipe.train) for name, recipe in plan.recipes.items()}
    for warning in warnings(rows):
        print(f"warning: {warning}", file=sys.stderr)
    tested = summary(rows)
    show(rows, tested)
    command = f"python benchmarks/{command_line()}"
    record = make_record("training", command, settings, tested + rows, definitions=DEFINITIONS, note=args.note)
    leave(record, NAME, args.out)


def main() -> int:
    args = arguments()
    if not args.sources:
        if args.show:
            show_records()
            return 0
        raise SystemExit("no source came; name run folders or rollouts files")
    torch.set_num_threads(args.threads)
    if not args.show:  # others may be writing
        args.rows.parent.mkdir(parents=True, exist_ok=True)
        args.rows.touch()
        cut_torn_line(args.rows)
    folders = {name: args.features / name for name in args.sources}
    if not args.show:
        for name, given in args.sources.items():
            trainings = [recipe.train for recipe in Plan(args, folders).recipes.values()]
            said = in_process_of_its_own(prepare, folders[name], given, recipe_of(args), trainings)
            print(f"{name}: {said}", file=sys.stderr, flush=True)
    unprepared = [name for name, folder in folders.items() if not folder.is_dir()]
    if unprepared:
        raise SystemExit(f"nothing was trained on {', '.join(unprepared)} yet; call this without --show")
    plan = Plan(args, folders)
    failed = 0 if args.show else train_missing(args, plan)
    write_record(args, plan)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
