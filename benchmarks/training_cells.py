"""The cells of `few_tokens.py`'s table: which there are, in which order, and how each gets a process of its own."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import training_features
from training_jobs import ROLLOUTS, TOKEN_MAP, Job, benched, borrow_features, end_with_parent, trainer_of, work
from training_published import published_settings

from toolkit.bench.records import git_commit, hardware, machine_name
from toolkit.data.feature_store import FeatureSpec, FeatureStore
from toolkit.infer.engine.cpu_door import load_target
from toolkit.pipeline.run_target import best_device
from toolkit.pipeline.token_map import map_rollouts
from toolkit.recipe import Recipe, result_settings
from toolkit.tokenmap.files import load_token_map
from toolkit.train.failures import DivergedError
from toolkit.train.offline_features import stored_layer_ids, texts_of, write_features
from toolkit.train.training_data import read_data
from toolkit.weights import sha256_file, sha256_json

# Settings of a training that a job of so many tokens does not ask: what ends it and what it measures meanwhile.
IDLE = ("epochs", "max_steps", "eval_every", "patience", "real_prompts", "rollout_prompts", "rollout_temperatures")


@dataclass(frozen=True)
class Cell:
    """One training of the table. source: the name of the prompts; digest: of all that decides its row beside."""

    source: str
    job: Job
    digest: str

    @property
    def key(self) -> tuple[str, str, int, int, str]:
        return (self.source, self.job.variant, self.job.tokens, self.job.recipe.seed, self.digest)


def cell_of(source: str, job: Job) -> Cell:
    """The cell of a job. A row counts as done while the target, the rollouts, the token map, every setting of the
    training and its trainer's constants are the same, whether they were chosen or are the defaults of the day."""
    files = [sha256_file(job.run / name) for name in (ROLLOUTS, TOKEN_MAP)]
    decides = [result_settings(job.recipe.target), training_of(job), *files, job.prompts, job.max_tokens]
    return Cell(source, job, sha256_json(decides)[:16])


def training_of(job: Job) -> dict[str, Any]:
    """What decides the head that a job trains, beside its data: resolved settings and constants of the trainer."""
    train = benched(job)
    kind = trainer_of(job.variant)
    if kind == "published":
        train = published_settings(train)
    found = {name: value for name, value in result_settings(train).items() if name not in IDLE}
    if kind == "fading features":
        found |= {"feature weight": training_features.WEIGHT, "fades": training_features.FADES}
    return found


def key_of(row: dict[str, Any]) -> tuple[str, str, int, int, str]:
    return (row["source"], row["variant"], row["asked_tokens"], row["seed"], row["digest"])


def prepare(place: Path, given: Path, recipe: Recipe) -> str:
    """The folder that all cells of a source read: its rollouts and token map, and the features of all its texts, stored
    once. Meant for a process of its own.

    given: a run folder, or a rollouts file, whose token map is built as the recipe says. Nothing is written in it.
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
    spec = FeatureSpec.of(target, stored_layer_ids(recipe.train, target))
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


def trained(cell: Cell) -> dict[str, Any]:
    """The row of a cell; of a training that ended in no number, what it said. commit, date: at its start."""
    about = {"source": cell.source, "asked_tokens": cell.job.tokens, "digest": cell.digest, "diverged": None}
    about |= {"commit": git_commit(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    about |= {"machine": machine_name(hardware())}
    try:
        return about | work(cell.job)
    except DivergedError as error:
        said = str(error).split(",")[0]
        return about | {"variant": cell.job.variant, "seed": cell.job.recipe.seed, "diverged": said}


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


def ordered(cells: Sequence[Cell]) -> list[Cell]:
    """So that a table cut off anywhere is still of use: few tokens first, then seed by seed, all variants of it."""
    seeds = list(dict.fromkeys(cell.job.recipe.seed for cell in cells))
    return sorted(cells, key=lambda cell: (cell.job.tokens, seeds.index(cell.job.recipe.seed)))
