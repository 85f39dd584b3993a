"""The cells of `few_tokens.py`'s table: what a row depends on, what is prepared, how each gets a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from harness import end_with_parent
from training_jobs import ROLLOUTS, SPLITS, TOKEN_MAP, Job, benched, borrow_features, rate_of, work

from toolkit.bench.records import git_commit, hardware, machine_name
from toolkit.data.feature_store import FeatureSpec, FeatureStore
from toolkit.infer.engine.cpu_door import load_target
from toolkit.jsonl import read_rows
from toolkit.pipeline.run_target import best_device
from toolkit.pipeline.token_map import map_rollouts
from toolkit.recipe import Recipe, result_settings, training_settings
from toolkit.tokenmap.files import load_token_map
from toolkit.train.failures import DivergedError
from toolkit.train.offline_features import stored_layer_ids, texts_of, write_features
from toolkit.train.training_data import read_data
from toolkit.train_settings import TrainSettings
from toolkit.weights import atomic_write, sha256_file, sha256_json

# Settings of a training that a job of so many tokens does not ask: what ends it and what it measures meanwhile.
IDLE = ("epochs", "max_steps", "eval_every", "patience", "real_prompts", "rollout_prompts", "rollout_temperatures")
TRIED = {"adamw": "learning_rate", "muon": "muon_learning_rate"}  # by optimizer, the rate that is chosen
Key = tuple[str, str, int, int, float, float, str, str]


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
    decides = {name: value for name, value in training_settings(benched(job)).items() if name not in (*IDLE, *tried)}
    digest = sha256_json([result_settings(job.recipe.target), decides, *files, job.prompts])[:16]
    name = f"{job.variant}-{job.tokens}-{job.recipe.seed}-{rate:g}-{warmup:g}-{digest}".replace(" ", "-")
    return Cell(source, replace(job, head=job.run / "heads" / f"{name}.safetensors"), digest)


def prepare(place: Path, given: Path, recipe: Recipe, trainings: Sequence[TrainSettings] = ()) -> str:
    """The folder that all cells of a source read: its rollouts and token map, the halves of the held-out rollouts, and
    the features of all its texts, stored once. Meant for a process of its own.

    given: a run folder, or a rollouts file, whose token map is built as the recipe says. Nothing is written in it.
    trainings: whose features are stored (default: the recipe's).
    Raises `ValueError` where the folder is that of other rollouts, or its token map of another size than the recipe's.
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
    if (place / TOKEN_MAP).is_file():
        check_size(place / TOKEN_MAP, recipe.token_map.size)
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
        map_rollouts(
            target, place / ROLLOUTS, (place / TOKEN_MAP).parent, recipe.token_map.size, recipe.token_map.coverage
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


def check_size(file: Path, wanted: int | None) -> None:
    """Raises `ValueError` for a map of another size: heads of other vocabularies would stand in one table."""
    found = load_token_map(file)
    if wanted is not None and found.size != min(wanted, found.vocab_size):
        raise ValueError(
            f"{file.resolve()} keeps {found.size} ids, token_map.size is {wanted}: set token_map.size={found.size}, or "
            "give the rollouts file under another name, whose map is then built"
        )


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


@contextmanager
def ended_by_signal() -> Iterator[None]:
    """SIGTERM ends the program as Ctrl-C does: by an exception, behind which `finally` blocks still run."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
