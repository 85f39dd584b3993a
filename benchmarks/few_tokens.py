"""Which recipe makes the better head of few tokens, each at its best: variants x tokens x seeds x sources of prompts.

    python benchmarks/few_tokens.py RUN_OR_ROLLOUTS ... [--tokens 50000 200000] [--minutes 60] [--jobs 2] [a.b=c ...]

A source is a run folder, or a rollouts file, whose token map is then built. `published` is that of training.py;
`ours` is the recipe (by default the demo's) with the settings that follow as a.b=c. --variant "NAME a.b=c ..." adds
one that changes a few of them.

The held-out rollouts of a source are cut in two halves. For every variant, source and number of tokens, learning rate
and warm-up are chosen by the forecast on the validation half: all --rates (or, of Muon, as many --muon-rates) at the
first of --warmups and the first seed, then the best of them at the other warm-ups. The chosen one is trained with the
other seeds too. Only its heads see the test half, where the engine measures accept_length as well. A head's warm start
is fitted on the first tokens of its own training, and its time counts.

Resumable: the row of each training and each test is appended to --rows as it ends, heads are kept beside the features,
and what stands there is not done again: few tokens come first. Killed or out of --minutes, the same command goes on,
also with more rates, seeds or variants. At the end, and at any time by --show, all rows together become the record.
Writes benchmarks/results/training-few-tokens-<hardware>.json.

Shapes: S seeds, P prompts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from harness import Row, end_with_parent, in_process_of_its_own, leave, parser_of, set_threads, show
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
from toolkit.pipeline.token_map import map_rollouts
from toolkit.recipe import DEMO_RECIPE, Recipe, load_recipe, result_settings
from toolkit.targets.facts import served_target
from toolkit.train.accelerator import DivergedError
from toolkit.train.training_data import read_data, stored_layer_ids, texts_of, write_features
from toolkit.train_settings import TrainSettings
from toolkit.weights import atomic_write, sha256_file, sha256_json

PUBLISHED = "published"
COLUMNS = ("variant", "source", "asked_tokens", "learning_rate", "warmup_ratio", "tries", "accept_length", "interval",
           "accept_length_ratio", "accept_length_ratio_interval", "seconds")  # fmt: skip
COUNTS = {"accept_length": "by_prompt", "forecast": "forecast_by_prompt"}
SUMMED = ("tokens", "start_tokens", "start_seconds", "seconds", "processor_seconds", "seconds_per_step")
# Settings of a training that a job of so many tokens does not ask: what ends it and what it measures meanwhile.
IDLE = ("epochs", "max_steps", "eval_every", "patience", "real_prompts", "rollout_prompts", "rollout_temperatures")
TRIED = {"adamw": "learning_rate", "muon": "muon_learning_rate"}  # by optimizer, the rate that is chosen
Key = tuple[str, str, int, int, float, float, str, str]


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


@dataclass(frozen=True)
class Cell:
    """One training of the table, judged by one half of the held-out rollouts. source: the name of the prompts; digest:
    of all that decides its row beside the key; known: of a test, the row of its training."""

    source: str
    job: Job
    digest: str
    known: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def key(self) -> Key:
        job, optimizer = self.job, self.job.recipe.train.optimizer
        assert job.split is not None, "a cell is judged by one half"
        tried = rate_of(optimizer), optimizer.warmup_ratio
        return (self.source, job.variant, job.tokens, job.recipe.seed, *tried, job.split, self.digest)


def key_of(row: dict[str, Any]) -> Key:
    tried = row["learning_rate"], row["warmup_ratio"]
    return (row["source"], row["variant"], row["asked_tokens"], row["seed"], *tried, row["split"], row["digest"])


def cell_of(source: str, job: Job, rate: float, warmup: float) -> Cell:
    """The cell of a job at a learning rate and a warm-up, whose head is kept in the job's run folder.

    A row counts as done while the target, the rollouts, the token map and every other setting of the training are the
    same, whether they were chosen or are the defaults of the day.
    """
    optimizer = job.recipe.train.optimizer
    tried = {TRIED[optimizer.name]: rate, "warmup_ratio": warmup}
    train = replace(job.recipe.train, optimizer=replace(optimizer, **tried))
    job = replace(job, recipe=replace(job.recipe, train=train))
    files = [sha256_file(job.run / name) for name in (ROLLOUTS, TOKEN_MAP)]
    decides = _without(result_settings(benched(job)), (*IDLE, *tried))
    digest = sha256_json([result_settings(job.recipe.target), decides, *files, job.prompts])[:16]
    name = f"{job.variant}-{job.tokens}-{job.recipe.seed}-{rate:g}-{warmup:g}-{digest}".replace(" ", "-")
    return Cell(source, replace(job, head=job.run / "heads" / f"{name}.safetensors"), digest)


def _without(settings: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Settings in sections, without those of these names."""
    left = {name: value for name, value in settings.items() if name not in names}
    return {name: _without(value, names) if isinstance(value, dict) else value for name, value in left.items()}


def prepare(place: Path, given: Path, recipe: Recipe, trainings: Sequence[TrainSettings] = ()) -> str:
    """The folder that all cells of a source read: its rollouts and token map, the halves of the held-out rollouts, and
    the features of all its texts, stored once. Meant for a process of its own.

    given: a run folder, or a rollouts file, whose token map is built as the recipe says. Nothing is written in it.
    trainings: whose features are stored (default: the recipe's).
    Raises `ValueError` where the folder is that of other rollouts.
    """
    run = given if given.is_dir() else None
    found = {ROLLOUTS: run / ROLLOUTS, TOKEN_MAP: run / TOKEN_MAP} if run else {ROLLOUTS: given}
    for name, file in found.items():
        if file.is_file() and not (place / name).exists():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).symlink_to(file.resolve())
    if (place / ROLLOUTS).resolve() != found[ROLLOUTS].resolve():
        raise ValueError(f"{place} is of {(place / ROLLOUTS).resolve()}; call {given} otherwise, or delete that folder")
    halve(place)
    if not (place / "features").exists():
        borrow_features((run or place) / "features", place / "features")
    chosen = recipe.target
    target = load_target(
        chosen.model,
        dtype=chosen.dtype,
        revision=chosen.revision,
        device=best_device(),
        quantization=chosen.quantization,
        use="training",
    )
    if not (place / TOKEN_MAP).is_file():
        facts = served_target(chosen.model, chosen.revision, ())
        map_rollouts(
            facts, place / ROLLOUTS, (place / TOKEN_MAP).parent, recipe.token_map.size, recipe.token_map.coverage
        )
    data = read_data(recipe.train, place / ROLLOUTS, target, recipe.seed)
    layers = {layer for train in trainings or [recipe.train] for layer in stored_layer_ids(train, target)}
    spec = FeatureSpec.of(target, tuple(sorted(layers)))
    store = FeatureStore.start(place / "features", spec)
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


def trained(cell: Cell) -> dict[str, Any]:
    """The row of a cell; of a training that ended in no number, what it said. commit, date: at its start."""
    row = cell.known | {"source": cell.source, "asked_tokens": cell.job.tokens, "digest": cell.digest, "diverged": None}
    row |= {"commit": git_commit(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    row |= {"machine": machine_name(hardware())}
    try:
        return row | work(cell.job)
    except DivergedError as error:
        _, variant, _, seed, rate, warmup, split, _ = cell.key
        tried = {"variant": variant, "seed": seed, "learning_rate": rate, "warmup_ratio": warmup, "split": split}
        return row | tried | {"diverged": str(error).split(",")[0]}


def in_processes(cells: Iterable[Cell], at_once: int) -> Iterator[tuple[Cell, dict[str, Any] | None]]:
    """Every cell with its row, as they end, each from a process of its own; None for one that failed, whose reason
    stands above. Cells are taken when a process is free. Ended from outside, none of them is left behind."""
    cells, running = iter(cells), {}
    try:
        while True:
            while len(running) < at_once and (cell := next(cells, None)) is not None:
                receiver, process = _start(cell)
                running[receiver] = cell, process
            if not running:
                return
            for receiver in wait(list(running)):
                assert isinstance(receiver, Connection), "pipes are waited for"
                cell, process = running.pop(receiver)
                yield cell, _row(receiver)
                process.join()
    finally:
        for _, process in running.values():
            process.kill()


def _start(cell: Cell) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, cell), daemon=True)
    process.start()
    sender.close()  # so that the end of the process is the end of the pipe
    return receiver, process


def _send(sender: Connection, cell: Cell) -> None:
    end_with_parent()
    sender.send(trained(cell))


def _row(receiver: Connection) -> dict[str, Any] | None:
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        receiver.close()


def best(tries: Sequence[Row]) -> Row | None:
    """The row of the highest forecast on the validation half; None where every training diverged."""
    known = [row for row in tries if row["split"] == VALIDATION and row["diverged"] is None]
    return max(known, key=lambda row: row["forecast"], default=None)


def tries_of(rows: Sequence[Row], source: str, tokens: int, variant: str) -> list[Row]:
    """The validation rows of the first seed that has any: those among which rate and warm-up are chosen."""
    group = (source, tokens, variant)
    mine = [
        row for row in rows
        if (row["source"], row["asked_tokens"], row["variant"]) == group and row["split"] == VALIDATION
    ]  # fmt: skip
    return [row for row in mine if row["seed"] == mine[0]["seed"]]


def summary(rows: Sequence[Row]) -> list[Row]:
    """A row over all seeds for each variant, number of tokens and source that has been tested."""
    found = []
    for source, tokens, variant in dict.fromkeys((row["source"], row["asked_tokens"], row["variant"]) for row in rows):
        tests = chosen_tests(rows, source, tokens, variant)
        if tests:
            base = chosen_tests(rows, source, tokens, PUBLISHED) if variant != PUBLISHED else []
            row = over_seeds(tests, base) | tried(tries_of(rows, source, tokens, variant))
            found.append(row | {"diverged_seeds": [one["seed"] for one in same_try(rows, row) if one["diverged"]]})
    return found


def chosen_tests(rows: Sequence[Row], source: str, tokens: int, variant: str) -> list[Row]:
    """The test rows of the best try; of others, which were chosen before it was tried, none."""
    won = best(tries_of(rows, source, tokens, variant))
    tests = [row for row in rows if row["split"] == TEST and row["diverged"] is None]
    return [] if won is None else same_try(tests, won)


def same_try(rows: Sequence[Row], row: Row) -> list[Row]:
    """Rows of the same training but for the seed."""
    names = ("source", "asked_tokens", "variant", "learning_rate", "warmup_ratio", "digest")
    return [one for one in rows if all(one[name] == row[name] for name in names)]


def tried(tries: Sequence[Row]) -> Row:
    """How the settings were chosen. at_edge: the best rate is the lowest or highest of those tried."""
    won = best(tries)
    assert won is not None, "it was tested"
    rates = sorted({row["learning_rate"] for row in tries})
    return {
        "tries": len(tries),
        "at_edge": len(rates) > 1 and won["learning_rate"] in (rates[0], rates[-1]),
        "diverged": sum(row["diverged"] is not None for row in tries),
        "validation_forecast": won["forecast"],
    }


def over_seeds(tests: Sequence[Row], base: Sequence[Row]) -> Row:
    """One row of the tests of all seeds: pooled over verify steps, intervals over prompts and seeds, and the ratio to
    the tests of `base` with the same seeds and prompts."""
    first = tests[0]
    kept = ("source", "asked_tokens", "variant", "digest", "learning_rate", "warmup_ratio", "optimizer", "split")
    shape = ("shape", "num_steps", "top_k", "num_draft_tokens", "temperature", "prompts")
    row = {name: first[name] for name in (*kept, *shape)} | {"seed": None, "seeds": [one["seed"] for one in tests]}
    row |= {name: statistics.mean(one[name] for one in tests) for name in SUMMED}
    pairs = [(one, other) for one in tests for other in base if one["seed"] == other["seed"]]
    for name, counts in COUNTS.items():
        known = [one for one in tests if one.get(name) is not None]
        values = [one[name] for one in known]
        value, interval = crossed([counted(known, counts)]) if known else (None, None)
        spread = statistics.stdev(values) if len(values) > 1 else None
        row |= {name: value, _interval(name): interval, f"{name}_spread": spread}
        both = [pair for pair in pairs if all(one.get(name) is not None for one in pair)]
        sides = [counted(side, counts) for side in zip(*both, strict=True)]
        ratio, interval = crossed(sides) if both else (None, None)
        row |= {f"{name}_ratio": ratio, f"{name}_ratio_interval": interval}
    return row


def _interval(name: str) -> str:
    return "interval" if name == "accept_length" else f"{name}_interval"


def counted(rows: Sequence[Row], name: str) -> NDArray[np.float64]:
    """[S, P, 2]: tokens and verify steps of each seed's row and each prompt."""
    return np.asarray([row[name] for row in rows], dtype=np.float64)


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
            if train.head.kind == "dspark" and train.unroll.ttt_steps < CHAIN:
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
            with RowAppender(args.rows) as kept:
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
    return [row for _, row in read_rows(args.rows)]


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("given", nargs="+", metavar="SOURCE | a.b=c", help="[NAME:]run folder or rollouts file")
    parser.add_argument("--recipe", default=None, help="of `ours` (default: the demo recipe)")
    parser.add_argument("--rows", type=Path, default=Path("few_tokens.jsonl"), help="where rows are kept")
    parser.add_argument("--features", type=Path, help="folder of features and heads (default: beside --rows)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[50_000, 200_000], help="supervised, seen")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="rate and warm-up are of the first")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3, 2e-3], help="of AdamW, tried")
    parser.add_argument("--muon-rates", type=float, nargs="+", default=[5e-3, 0.01, 0.02, 0.04], help="of Muon")
    parser.add_argument("--warmups", type=float, nargs="+", default=[0.015, 0.1], help="shares of the steps, tried")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="these alone (default: all)")
    parser.add_argument("--variant", action="append", default=[], metavar='"NAME a.b=c ..."', help="one more")
    parser.add_argument("--prompts", type=int, default=64, help="of the test half that the engine answers, at most")
    parser.add_argument("--max-tokens", type=int, default=96, help="of the engine's answers")
    parser.add_argument("--minutes", type=float, help="start no cell after so many")
    parser.add_argument("--jobs", type=int, default=1, help="cells trained at a time, which then share the machine")
    parser.add_argument("--show", action="store_true", help="train nothing: the record and table of what is there")
    args = parser.parse_intermixed_args()
    args.overrides = [one for one in args.given if "=" in one]
    args.sources = named_sources([one for one in args.given if "=" not in one])
    args.variants = chosen_variants(args.variant, args.only)
    if len(args.rates) != len(args.muon_rates):
        parser.error(f"{len(args.rates)} --rates, {len(args.muon_rates)} --muon-rates: as many are needed")
    args.features = args.features or args.rows.with_name(f"{args.rows.stem}-sources")
    args.threads = set_threads(1)
    return args


def named_sources(given: Sequence[str]) -> dict[str, Path]:
    """By name: what stands before a colon, else the folder's (of a rollouts file: the file's)."""
    found: dict[str, Path] = {}
    for one in given:
        name, colon, path = one.partition(":")
        where = Path(path if colon else one)
        if not (where / ROLLOUTS if where.is_dir() else where).is_file():
            raise SystemExit(f"{where}: a run folder with {ROLLOUTS}, or a rollouts file, is needed")
        found[name if colon else (where.resolve().name if where.is_dir() else where.stem)] = where
    return found


def chosen_variants(more: Sequence[str], only: Sequence[str] | None) -> dict[str, tuple[str, ...]]:
    """Of the command line: a name may have several words, settings have a `=`."""
    every = dict(VARIANTS)
    for one in more:
        words = one.split()
        changes = tuple(word for word in words if "=" in word)
        every[" ".join(word for word in words if "=" not in word)] = changes
    return {name: every[name] for name in only or every}


def write_record(args: argparse.Namespace, plan: Plan) -> None:
    rows = plan.known(rows_of(args))
    base = recipe_of(args)
    names = ("rates", "muon_rates", "warmups", "variants", "prompts", "max_tokens", "jobs", "threads")
    settings = {name: getattr(args, name) for name in names}
    settings |= {"sources": list(args.sources), "recipe": base.name, "target": base.target.model}
    settings["train"] = {name: result_settings(recipe.train) for name, recipe in plan.recipes.items()}
    tested = summary(rows)
    show(tested, COLUMNS, f"chain of {CHAIN}, test half, pooled over seeds [95 % over prompts and seeds]")
    leave(args, "training", "training-few-tokens", settings, tested + rows, definitions=DEFINITIONS)


def main() -> int:
    args = arguments()
    folders = {name: args.features / name for name in args.sources}
    if not args.show:  # others may be writing
        args.rows.parent.mkdir(parents=True, exist_ok=True)
        args.rows.touch()
        cut_torn_line(args.rows)
        for name, given in args.sources.items():
            trainings = [recipe.train for recipe in Plan(args, folders).recipes.values()]
            said = in_process_of_its_own(prepare, folders[name], given, recipe_of(args), trainings)
            print(f"{name}: {said}", file=sys.stderr, flush=True)
    plan = Plan(args, folders)
    failed = 0 if args.show else train_missing(args, plan)
    write_record(args, plan)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
