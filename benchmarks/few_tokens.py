"""Which recipe makes the better head of few tokens, each at its best rate: variants x tokens x seeds x sources.

    python benchmarks/few_tokens.py RUN ... [--tokens 50000 200000] [--minutes 60] [--jobs 2] [a.b=c ...]

A source is a run folder with rollouts and a token map. `published` is that of training.py; `ours` is the recipe (by
default the demo's) with the settings that follow as a.b=c. --variant "NAME a.b=c ..." adds one that changes a few of
them.

The held-out rollouts of a source are cut in two halves. For every variant, source and number of tokens, the learning
rate is chosen by the forecast on the validation half: all --rates (or, of Muon, all --muon-rates) at the first seed.
The chosen one is trained with the other seeds too. Only its heads see the test half, where the engine measures
accept_length as well. A head's warm start is fitted on the first tokens of its own training, and its time counts.

Resumable: the row of each training and each test is appended to --rows as it ends, heads are kept beside the features,
and what stands there is not done again: few tokens come first. Killed or out of --minutes, the same command goes on,
also with more rates, seeds or variants. At the end, and at any time by --show, all rows together become the record.
Writes benchmarks/results/training-few-tokens-<hardware>.json.

Shapes: S seeds, P prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from harness import Row, in_process_of_its_own, leave, parser_of, processes, set_threads, show
from numpy.typing import NDArray
from training import (
    CHAIN,
    ROLLOUTS,
    SPLITS,
    TEST,
    TOKEN_MAP,
    VALIDATION,
    Job,
    benched,
    borrow_features,
    published_settings,
    rate_of,
    work,
)
from training import DEFINITIONS as OF_TRAININGS

from toolkit.bench.bootstrap import RESAMPLES
from toolkit.bench.records import git_commit, hardware, machine_name
from toolkit.bench.table import decimal
from toolkit.data.feature_store import FeatureSpec, FeatureStore
from toolkit.infer.engine.cpu_door import load_target
from toolkit.jsonl import RowAppender, cut_torn_line, read_rows
from toolkit.pipeline.run import best_device
from toolkit.recipe import DEMO_RECIPE, Recipe, load_recipe, result_settings
from toolkit.train.accelerator import DivergedError
from toolkit.train.training_data import read_data, stored_layer_ids, texts_of, write_features
from toolkit.train_settings import TrainSettings
from toolkit.weights import atomic_write, sha256_file, sha256_json

PUBLISHED = "published"
COLUMNS = ("variant", "source", "asked_tokens", "learning_rate", "tries", "accept_length", "interval",
           "accept_length_ratio", "accept_length_ratio_interval", "seconds")  # fmt: skip
SUMMED = ("tokens", "start_seconds", "seconds", "processor_seconds", "seconds_per_step")
# Settings of a training that a job of so many tokens does not ask: what ends it and what it measures meanwhile.
IDLE = ("epochs", "max_steps", "eval_every", "patience", "real_prompts", "rollout_prompts", "rollout_temperatures")
TRIED = {"adamw": "learning_rate", "muon": "muon_learning_rate"}  # by optimizer, the rate that is chosen
DEFINITIONS = {
    **OF_TRAININGS,
    "split": "the half of the held-out rollouts that judged the head; of a test, columns of the training are its own",
    "asked_tokens": "supervised tokens that the training was to see; it ends with the batch that reaches them",
    "unique_tokens": "supervised tokens of the distinct rollouts it saw: beyond one epoch of a source they repeat",
    "digest": "of the target, all settings, the rollouts and the token map: rows of others are not in this record",
    "commit": "of this row, as date and machine, when its job began; the record's own are of its writing",
    "diverged": "what the trainer said of a training that ended in no finite number, else null; in rows over all "
    "seeds: how many of the tries",
    "diverged_seeds": "whose training diverged at the chosen rate: they are in no mean of the row",
    "seed": "null: a row over all `seeds`, pooled over their verify steps; its times and tokens are means",
    "accept_length_ratio": "to the published recipe's at its own best rate, the same tokens, source, seeds and "
    "prompts; its interval, 95 %, is a bootstrap over prompts and seeds, which both have in common",
    "tries": "rates among which the validation half chose",
    "at_edge": "whether the chosen rate is the lowest or highest of those tried: a better one may lie beyond",
}


@dataclass(frozen=True)
class Cell:
    """One training of the table, judged by one half of the held-out rollouts. source: the name of the prompts; digest:
    of all that decides its row beside the key; known: of a test, the row of its training."""

    source: str
    job: Job
    digest: str
    known: Row = field(default_factory=dict, compare=False)

    @property
    def about(self) -> Row:
        """The columns that tell its row from others."""
        job, optimizer = self.job, self.job.recipe.train.optimizer
        return {
            "source": self.source,
            "variant": job.variant,
            "asked_tokens": job.tokens,
            "seed": job.recipe.seed,
            "learning_rate": rate_of(optimizer),
            "split": job.split,
            "digest": self.digest,
        }

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(self.about.values())


def key_of(row: Row) -> tuple[Any, ...]:
    return tuple(
        row[name] for name in ("source", "variant", "asked_tokens", "seed", "learning_rate", "split", "digest")
    )


def prepare(place: Path, run: Path, recipe: Recipe, trainings: Sequence[TrainSettings]) -> str:
    """The folder that all cells of a source read: the run's rollouts and token map, the halves of the held-out
    rollouts, and the features of all its texts, stored once. Meant for a process of its own.

    trainings: whose features are stored. Raises `ValueError` where the folder is that of other rollouts.
    """
    place.mkdir(parents=True, exist_ok=True)
    for name in (Path(ROLLOUTS).parent, Path(TOKEN_MAP).parent):
        if not (place / name).exists():
            (place / name).symlink_to((run / name).resolve())
    if (place / ROLLOUTS).resolve() != (run / ROLLOUTS).resolve():
        raise ValueError(f"{place} is of {(place / ROLLOUTS).resolve()}; call {run} otherwise, or delete that folder")
    halve(place)
    if not (place / "features").exists():
        borrow_features(run / "features", place / "features")
    chosen = recipe.target
    named = {"dtype": chosen.dtype, "revision": chosen.revision, "quantization": chosen.quantization}
    target = load_target(chosen.model, device=best_device(), use="training", **named)
    data = read_data(recipe.train, place / ROLLOUTS, target, recipe.seed)
    layers = {layer for train in trainings for layer in stored_layer_ids(train, target)}
    store = FeatureStore.start(place / "features", FeatureSpec.of(target, tuple(sorted(layers))))
    missing = [text for text in texts_of(data) if text not in store]
    if missing:
        store.check_room(sum(len(text) - 1 for text in missing))
        write_features(store, target, missing)
    return f"{len(data.train)} rollouts to train on, features of {len(missing)} texts stored"


def halve(place: Path) -> None:
    """Write the held-out rollouts in two files, every other one of the order of their ids in each.

    Raises `ValueError` where there are fewer than two.
    """
    rows = [row for _, row in read_rows(place / ROLLOUTS) if row.get("split") == "held_out"]
    if len(rows) < len(SPLITS):
        raise ValueError(f"{place / ROLLOUTS} has {len(rows)} held-out rollouts; 2 are needed, raise rollouts.held_out")
    rows.sort(key=lambda row: str(row["id"]))
    for first, split in enumerate(SPLITS):
        with atomic_write(place / f"{split}.jsonl") as file:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows[first :: len(SPLITS)]), encoding="utf-8")


def trained(cell: Cell, ends: float) -> Row | None:
    """The row of a cell; of a training that ended in no number, what it said. commit, date: at its start. None: it is
    past `ends`, in seconds of the clock."""
    if time.time() > ends:
        return None
    row = cell.known | cell.about | {"diverged": None, "machine": machine_name(hardware())}
    row |= {"commit": git_commit(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    try:
        return row | work(cell.job)
    except DivergedError as error:
        return row | {"diverged": str(error).split(",")[0]}


def in_processes(cells: Sequence[Cell], at_once: int, ends: float) -> Iterator[tuple[Cell, Row | BaseException | None]]:
    """Every cell with its row, as they end, each from a process of its own; with the error of one that failed."""
    with processes(at_once) as pool:
        running = {pool.submit(trained, cell, ends): cell for cell in cells}
        for one in as_completed(running):
            yield running[one], one.exception() or one.result()


def best(tries: Sequence[Row]) -> Row | None:
    """The row of the highest forecast; None where every training diverged."""
    return max((row for row in tries if row["diverged"] is None), key=lambda row: row["forecast"], default=None)


def tries_of(rows: Sequence[Row], source: str, tokens: int, variant: str) -> list[Row]:
    """The validation rows of the first seed that has any: those among which the rate is chosen."""
    group = (source, tokens, variant, VALIDATION)
    names = ("source", "asked_tokens", "variant", "split")
    mine = [row for row in rows if tuple(row[name] for name in names) == group]
    return [row for row in mine if row["seed"] == mine[0]["seed"]]


def summary(rows: Sequence[Row]) -> list[Row]:
    """A row over all seeds for each variant, number of tokens and source that has been tested."""
    found = []
    for source, tokens, variant in dict.fromkeys((row["source"], row["asked_tokens"], row["variant"]) for row in rows):
        tests = chosen_tests(rows, source, tokens, variant)
        if not tests:
            continue
        base = chosen_tests(rows, source, tokens, PUBLISHED) if variant != PUBLISHED else []
        tries = tries_of(rows, source, tokens, variant)
        rates = sorted({row["learning_rate"] for row in tries})
        row = over_seeds(tests, base) | {"tries": len(tries), "validation_forecast": best(tries)["forecast"]}
        row["at_edge"] = len(rates) > 1 and row["learning_rate"] in (rates[0], rates[-1])
        row["diverged"] = sum(one["diverged"] is not None for one in tries)
        found.append(row | {"diverged_seeds": [one["seed"] for one in same_try(rows, row) if one["diverged"]]})
    return found


def chosen_tests(rows: Sequence[Row], source: str, tokens: int, variant: str) -> list[Row]:
    """The test rows of the best try; of others, which were chosen before it was tried, none."""
    won = best(tries_of(rows, source, tokens, variant))
    tests = [row for row in rows if row["split"] == TEST and row["diverged"] is None]
    return [] if won is None else same_try(tests, won)


def same_try(rows: Sequence[Row], row: Row) -> list[Row]:
    """Rows of the same training but for the seed."""
    names = ("source", "asked_tokens", "variant", "learning_rate", "digest")
    return [one for one in rows if all(one[name] == row[name] for name in names)]


def over_seeds(tests: Sequence[Row], base: Sequence[Row]) -> Row:
    """One row of the tests of all seeds: pooled over verify steps, intervals over prompts and seeds, and the ratio to
    the tests of `base` with the same seeds and prompts."""
    kept = ("source", "asked_tokens", "variant", "digest", "learning_rate", "warmup_ratio", "optimizer", "split",
            "prompts")  # fmt: skip
    row = {name: tests[0][name] for name in kept} | {"seed": None, "seeds": [one["seed"] for one in tests]}
    row |= {name: statistics.mean(one[name] for one in tests) for name in SUMMED}
    row["accept_length"], row["interval"] = crossed([counted(tests)])
    pairs = [(one, other) for one in tests for other in base if one["seed"] == other["seed"]]
    sides = [counted(side) for side in zip(*pairs, strict=True)]
    row["accept_length_ratio"], row["accept_length_ratio_interval"] = crossed(sides) if pairs else (None, None)
    return row


def counted(rows: Sequence[Row]) -> NDArray[np.float64]:
    """[S, P, 2]: tokens and verify steps of each seed's row and each prompt."""
    return np.asarray([row["by_prompt"] for row in rows], dtype=np.float64)


def crossed(sides: Sequence[NDArray[np.float64]], seed: int = 0) -> tuple[float, tuple[float, float]]:
    """The mean of tokens over verify steps, or of two sides the ratio of theirs, with its 95 % bootstrap interval.

    sides: [S, P, 2] each, of the same seeds and prompts in the same order. Every resample draws seeds and prompts, both
    with replacement, and both sides have what it drew: what a prompt or an order of the data does to all heads is in
    neither interval of a ratio. With three seeds, what they add to an interval is a rough guess.
    """
    seeds, prompts, _ = sides[0].shape
    assert all(side.shape == sides[0].shape for side in sides), "both sides have the same seeds and prompts"
    random = np.random.default_rng(seed)
    drawn = [random.multinomial(count, np.full(count, 1 / count), size=RESAMPLES) for count in (seeds, prompts)]

    def value(of_seeds: NDArray[Any], of_prompts: NDArray[Any]) -> NDArray[np.float64]:
        sums = [np.einsum("rs,rp,spc->cr", of_seeds, of_prompts, side) for side in sides]
        means = [tokens / np.maximum(steps, 1) for tokens, steps in sums]
        return means[0] if len(means) == 1 else means[0] / means[1]

    low, high = np.quantile(value(*drawn), [0.025, 0.975])
    return float(value(np.ones((1, seeds)), np.ones((1, prompts)))[0]), (float(low), float(high))


def recipe_of(args: argparse.Namespace, changes: Sequence[str] = ()) -> Recipe:
    return load_recipe(args.recipe, ["train.data.features=offline", *args.overrides, *changes])


class Plan:
    """All cells of the table, of which each batch depends on the rows of those before it. folders: by source."""

    def __init__(self, args: argparse.Namespace, folders: dict[str, Path]) -> None:
        self.args, self.folders = args, folders
        self.recipes = {name: recipe_of(args, changes) for name, changes in args.variants.items()}
        if PUBLISHED in self.recipes:
            base = self.recipes[PUBLISHED]
            self.recipes[PUBLISHED] = replace(base, train=published_settings(base.train))
        self.digest = cache(self._digest)

    def job(self, source: str, tokens: int, variant: str, split: str) -> Job:
        args, recipe = self.args, self.recipes[variant]
        return Job(variant, recipe, self.folders[source], tokens, split, args.prompts, args.max_tokens, args.threads)

    def _digest(self, source: str, tokens: int, variant: str) -> str:
        """A row counts as done while the target, the rollouts, the token map and every other setting of the training
        but its rate are the same, whether they were chosen or are the defaults of the day."""
        job = self.job(source, tokens, variant, VALIDATION)
        decides = _without(result_settings(benched(job)), (*IDLE, *TRIED.values()))
        files = [sha256_file(job.run / name) for name in (ROLLOUTS, TOKEN_MAP)]
        return sha256_json([result_settings(job.recipe.target), decides, *files, job.prompts])[:16]

    def cell(self, source: str, tokens: int, variant: str, seed: int, rate: float, split: str) -> Cell:
        """At a learning rate; its head is kept in the source's folder."""
        job, digest = self.job(source, tokens, variant, split), self.digest(source, tokens, variant)
        train = job.recipe.train
        optimizer = replace(train.optimizer, **{TRIED[train.optimizer.name]: rate})
        recipe = replace(job.recipe, seed=seed, train=replace(train, optimizer=optimizer))
        name = f"{variant}-{tokens}-{seed}-{rate:g}-{digest}".replace(" ", "-")
        return Cell(source, replace(job, recipe=recipe, head=job.run / "heads" / f"{name}.safetensors"), digest)

    def known(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of this command's sources, variants and settings, whatever rate they tried."""
        mine = [row for row in rows if row["source"] in self.folders and row["variant"] in self.recipes]
        of = ("source", "asked_tokens", "variant")
        mine = [row for row in mine if row["digest"] == self.digest(*(row[name] for name in of))]
        return list({key_of(row): row for row in mine}.values())

    def missing(self, tokens: int, rows: Sequence[Row]) -> list[Cell]:
        """What can be done next for so many tokens; empty once all tests are done."""
        done, found = {key_of(row) for row in rows}, []
        for source in self.folders:
            for variant in self.recipes:
                lefts = ([cell for cell in batch if cell.key not in done]
                         for batch in self._batches(source, tokens, variant, rows))  # fmt: skip
                found += next(filter(None, lefts), [])
        return found

    def _batches(self, source: str, tokens: int, variant: str, rows: Sequence[Row]) -> Iterator[list[Cell]]:
        """Of one variant: the rates, the other seeds of the best, its tests."""
        of, seeds = (source, tokens, variant), self.args.seeds
        muon = self.recipes[variant].train.optimizer.name == "muon"
        rates = self.args.muon_rates if muon else self.args.rates
        yield [self.cell(*of, seeds[0], rate, VALIDATION) for rate in rates]
        won = best(tries_of(rows, *of))
        if won is None:
            return
        trained = [self.cell(*of, seed, won["learning_rate"], VALIDATION) for seed in seeds]
        yield trained
        by_key = {key_of(row): row for row in rows}
        judged = [by_key[cell.key] for cell in trained if by_key[cell.key]["diverged"] is None]
        yield [replace(self.cell(*of, row["seed"], row["learning_rate"], TEST), known=row) for row in judged]


def _without(settings: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Settings in sections, without those of these names."""
    left = {name: value for name, value in settings.items() if name not in names}
    return {name: _without(value, names) if isinstance(value, dict) else value for name, value in left.items()}


def train_missing(args: argparse.Namespace, plan: Plan) -> int:
    """Append the rows that are missing, batch by batch; returns how many failed of the batch it then ended with."""
    ends = time.time() + 60 * args.minutes
    for tokens in sorted(args.tokens):
        while cells := plan.missing(tokens, plan.known(rows_of(args))):
            failed = late = 0
            with RowAppender(args.rows) as kept:
                for cell, row in in_processes(cells, args.jobs, ends):
                    if isinstance(row, BaseException):
                        failed, said = failed + 1, f"failed: {row}"
                    elif row is None:
                        late, said = late + 1, "out of minutes"
                    else:
                        kept.append(row)
                        said = row["diverged"] or f"forecast {decimal(row['forecast'])}"
                    print(f"{cell.about}: {said}", file=sys.stderr, flush=True)
            if failed or late:
                return failed
    return 0


def rows_of(args: argparse.Namespace) -> list[Row]:
    return [row for _, row in read_rows(args.rows)]


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, max_tokens=96)
    parser.add_argument("given", nargs="+", metavar="SOURCE | a.b=c", help="[NAME:]run folder")
    parser.add_argument("--recipe", default=DEMO_RECIPE, help="of `ours` (default: the demo recipe)")
    parser.add_argument("--rows", type=Path, default=Path("few_tokens.jsonl"), help="where rows are kept")
    parser.add_argument("--features", type=Path, help="folder of features and heads (default: beside --rows)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[50_000, 200_000], help="supervised, seen")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the rate is of the first")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3, 2e-3], help="of AdamW, tried")
    parser.add_argument("--muon-rates", type=float, nargs="+", default=[5e-3, 0.01, 0.02, 0.04], help="of Muon")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="these alone (default: all)")
    parser.add_argument("--variant", action="append", default=[], metavar='"NAME a.b=c ..."', help="one more")
    parser.add_argument("--prompts", type=int, default=64, help="of the test half that the engine answers, at most")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no cell after so many")
    parser.add_argument("--jobs", type=int, default=1, help="cells trained at a time, which then share the machine")
    parser.add_argument("--show", action="store_true", help="train nothing: the record and table of what is there")
    args = parser.parse_intermixed_args()
    args.overrides = [one for one in args.given if "=" in one]
    args.sources = named_sources([one for one in args.given if "=" not in one])
    every: dict[str, tuple[str, ...]] = {PUBLISHED: (), "ours": ()}
    for one in args.variant:  # a name may have several words, settings have a `=`
        words = one.split()
        every[" ".join(word for word in words if "=" not in word)] = tuple(word for word in words if "=" in word)
    args.variants = {name: every[name] for name in args.only or every}
    args.features = args.features or args.rows.with_name(f"{args.rows.stem}-sources")
    args.threads = set_threads(1)
    return args


def named_sources(given: Sequence[str]) -> dict[str, Path]:
    """By name: what stands before a colon, else the folder's."""
    found: dict[str, Path] = {}
    for one in given:
        name, colon, path = one.partition(":")
        where = Path(path if colon else one)
        if not (where / ROLLOUTS).is_file() or not (where / TOKEN_MAP).is_file():
            raise SystemExit(f"{where}: a run folder with {ROLLOUTS} and {TOKEN_MAP} is needed")
        found[name if colon else where.resolve().name] = where
    return found


def write_record(args: argparse.Namespace, plan: Plan) -> None:
    rows, base = plan.known(rows_of(args)), recipe_of(args)
    names = ("rates", "muon_rates", "variants", "prompts", "max_tokens", "jobs", "threads")
    settings = {name: getattr(args, name) for name in names}
    settings |= {"sources": list(args.sources), "recipe": base.name, "target": base.target.model}
    settings["train"] = {name: result_settings(recipe.train) for name, recipe in plan.recipes.items()}
    tested = summary(rows)
    show(tested, COLUMNS, f"chain of {CHAIN}, test half, pooled over seeds [95 % over prompts and seeds]")
    leave(args, "training", "training-few-tokens", settings, tested + rows, definitions=DEFINITIONS)


def main() -> int:
    args = arguments()
    folders = {name: args.features / name for name in args.sources}
    plan, failed = Plan(args, folders), 0
    if not args.show:  # others may be writing
        args.rows.parent.mkdir(parents=True, exist_ok=True)
        args.rows.touch()
        cut_torn_line(args.rows)
        for name, given in args.sources.items():
            trainings = [recipe.train for recipe in plan.recipes.values()]
            said = in_process_of_its_own(prepare, folders[name], given, recipe_of(args), trainings)
            print(f"{name}: {said}", file=sys.stderr, flush=True)
        failed = train_missing(args, plan)
    write_record(args, plan)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
