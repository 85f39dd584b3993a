"""Count the tokens of corpora on several cores. A killed count goes on where it was.

Each corpus has a file of its own under counting/ with what is counted so far, and which shards that is. Weights, sizes
and other corpora do not change it, so they can change without counting again.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.data.dataset_rows import HUB, dataset_shards, is_dataset
from toolkit.errors import TokenMapError
from toolkit.log import get_logger
from toolkit.pipeline.corpus_worker import ShardCounter, run_worker
from toolkit.pipeline.stages import progress_bar
from toolkit.tokenmap.corpus import Corpus, Piece, Shard, files_of, shards_of
from toolkit.tokenmap.count import Tally
from toolkit.tokenmap.counts import CorpusCounts, Counts, load_counts, save_counts
from toolkit.weights import sha256_json

logger = get_logger(__name__)

COUNTING = "counting"
# Threads of a worker process: more would wait for each other.
THREADS = 4
# A state is saved when as many times the duration of the last save have passed.
SAVE_SHARE = 20


def count_corpora(
    corpora: Sequence[Corpus],
    held_out: Sequence[Corpus],
    counter: ShardCounter,
    folder: Path,
    num_proc: int,
) -> list[CorpusCounts]:
    """Count corpora and held-out corpora on `num_proc` cores; what `folder` has of them is kept.

    Raises `TokenMapError` for a corpus without text, a corpus that is held out as well, and a worker that was killed;
    `DataError` for a file that cannot be read or changes meanwhile.
    """
    counting = [_Counting(one, counter, folder / COUNTING) for one in (*corpora, *held_out)]
    _check_apart(counting[: len(corpora)], counting[len(corpora) :])
    todo = [(one, shard) for one in counting for shard in one.open_shards()]
    total = sum(len(one.shards) for one in counting)
    if todo:
        done = total - len(todo)
        if done:
            logger.info(f"{done} of {total} shards were counted before and are kept")
        tokens = 0
        try:
            with progress_bar("token counts", "shard", total, "tokens") as show:
                for (one, shard), tally, is_last in _counted(todo, counter, num_proc):
                    one.add(shard, tally, is_last)
                    done += is_last
                    tokens += sum(int(counted.sum()) for counted in tally.counts.values())
                    show(done, total, tokens)
        finally:
            for one in counting:
                one.save()
    for one in counting:
        one.check()
    return [CorpusCounts(one.corpus, one.tally, at >= len(corpora)) for at, one in enumerate(counting)]


def count_here(corpus: Corpus, counter: ShardCounter) -> CorpusCounts:
    """Count one corpus in this process; nothing is kept of a killed count. Raises as `count_corpora`."""
    tally = Tally(counter.vocab_size)
    for shard in _plan(corpus.spec).shards:
        for one in counter.count(shard):
            tally.merge(one)
    return CorpusCounts(corpus, tally)


class _Plan(NamedTuple):
    """The shards of a corpus, and a mark that changes when it does: with names, sizes and times of its files."""

    shards: list[Shard]
    mark: str
    files: list[Path]


class _Counting:
    """The counts of one corpus so far, and the shards that they are of."""

    def __init__(self, corpus: Corpus, counter: ShardCounter, folder: Path) -> None:
        self.corpus, self.tally = corpus, Tally(counter.vocab_size)
        self._plan = _plan(corpus.spec)
        self.shards = self._plan.shards
        self._finished: set[int] = set()
        self._documents: dict[int, int] = {}  # documents that are counted of a shard that is not finished
        self._saved_at, self._save_seconds = time.monotonic(), 0.0
        self._about: dict[str, Any] = {
            "tokenizer": counter.tokenizer,
            "tokenizer_sha256": hashlib.sha256(counter.tokenizer_json.encode()).hexdigest(),
            "roles": list(counter.roles),
            "vocab_size": counter.vocab_size,
            "files": self._plan.mark,
        }
        self._path = folder / f"{hashlib.sha256(corpus.spec.encode()).hexdigest()[:16]}.safetensors"
        if self._path.is_file():
            self._resume()

    def open_shards(self) -> Iterator[int]:
        """Yield the numbers of the shards that are not finished."""
        return (at for at in range(len(self.shards)) if at not in self._finished)

    def task(self, shard: int) -> tuple[Shard, int]:
        """Return a shard, and how many documents of it are counted already."""
        return self.shards[shard], self._documents.get(shard, 0)

    def add(self, shard: int, tally: Tally, is_last: bool) -> None:
        """Add the counts of the next documents of a shard."""
        self.tally.merge(tally)
        self._documents[shard] = self._documents.get(shard, 0) + tally.documents
        if is_last:
            self._finished.add(shard)
            del self._documents[shard]
        if time.monotonic() - self._saved_at >= SAVE_SHARE * self._save_seconds:
            self.save()

    def save(self) -> None:
        """Write the state atomically."""
        start = time.monotonic()
        state = {"finished": sorted(self._finished), "documents": sorted(self._documents.items())}
        save_counts(self._path, Counts((CorpusCounts(self.corpus, self.tally),), self._about | state))
        self._saved_at = time.monotonic()
        self._save_seconds = self._saved_at - start

    def check(self) -> None:
        """Warn about skipped rows. Raises `TokenMapError` when the corpus has no text or has changed meanwhile."""
        if self._plan.files and _mark(self._plan.files, self.shards) != self._plan.mark:
            raise TokenMapError(f"{self.corpus.spec} has changed while it was counted; type the command again")
        if self.tally.skipped:
            logger.warning(
                f"{self.corpus.spec}: {self.tally.skipped} rows without text were skipped; one of them: "
                f"{self.tally.first_skipped}"
            )
        if not self.tally.documents:
            raise TokenMapError(
                f"no text found in {self.corpus.spec} (roles: {', '.join(self._about['roles'])}); "
                "give a corpus with text or with messages of these roles"
            )

    def _resume(self) -> None:
        stored = load_counts(self._path)
        changed = [name for name, value in self._about.items() if stored.about.get(name) != value]
        if changed:
            logger.warning(f"{self.corpus.spec} is counted again: {', '.join(changed)} changed since it was counted")
            return
        self.tally = stored.corpora[0].tally
        self._finished = set(stored.about["finished"])
        self._documents = dict(stored.about["documents"])


def _plan(spec: str) -> _Plan:
    if is_dataset(spec):
        count, mark = dataset_shards(spec)
        return _Plan([(Piece(spec, at, at + 1),) for at in range(count)], mark, [])
    files = files_of(spec)
    shards = shards_of(files)
    return _Plan(shards, _mark(files, shards), files)


def _mark(files: Sequence[Path], shards: Sequence[Shard]) -> str:
    stats = [(str(path.resolve()), path.stat()) for path in files]
    return sha256_json([[(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats], shards])


def _check_apart(corpora: Iterable[_Counting], held_out: Iterable[_Counting]) -> None:
    """Raises `TokenMapError` when a source is counted and held out: its coverage would look complete."""
    both = _sources(corpora) & _sources(held_out)
    if both:
        raise TokenMapError(f"{min(both)} is counted and held out as well; leave it out of one of them")


def _sources(counting: Iterable[_Counting]) -> set[str]:
    return set(map(_place, {piece.source for one in counting for shard in one.shards for piece in shard}))


def _place(source: str) -> str:
    """Return the one spelling of a source: a path is absolute and without links, a dataset has its split."""
    if not is_dataset(source):
        return str(Path(source).resolve())
    name, _, split = source.removeprefix(HUB).partition(":")
    return f"{Path(name).resolve() if Path(name).exists() else name}:{split or 'train'}"


def _counted(
    todo: Sequence[tuple[_Counting, int]], counter: ShardCounter, num_proc: int
) -> Iterator[tuple[tuple[_Counting, int], Tally, bool]]:
    """Yield (corpus and shard, tally, whether it is the shard's last) as workers send them.

    Raises an error that a worker sends, and `TokenMapError` when one was killed.
    """
    waiting = iter(todo)
    busy: dict[Connection, tuple[_Counting, int]] = {}
    with _workers(counter, min(num_proc, len(todo))) as connections:

        def give(connection: Connection) -> None:
            task = next(waiting, None)
            if task is not None:
                busy[connection] = task
                connection.send(task[0].task(task[1]))

        try:
            for connection in connections:
                give(connection)
            while busy:
                for connection in [one for one in wait(list(busy)) if isinstance(one, Connection)]:
                    tally, is_last = connection.recv()
                    if isinstance(tally, Exception):
                        raise tally
                    task = busy[connection]
                    if is_last:
                        del busy[connection]
                        give(connection)  # before the tally is stored, so that no process waits for the disk
                    yield task, tally, is_last
        except (EOFError, ConnectionError) as error:
            raise TokenMapError(
                "a process that counts was killed, perhaps for its memory; type the command again: what is counted is "
                "kept. A smaller --num-proc needs less memory"
            ) from error


@contextmanager
def _workers(counter: ShardCounter, count: int) -> Iterator[list[Connection]]:
    """Start workers, threads in as few processes as can keep them busy, and end them when the block ends."""
    context = multiprocessing.get_context("spawn")  # a fork would copy threads of the tokenizer and of torch
    pairs = [context.Pipe() for _ in range(count)]
    step = THREADS if counter.tokenizer_json else 1  # a tokenizer in Python lets one thread work at a time
    groups = [[far for _, far in pairs[start : start + step]] for start in range(0, count, step)]
    processes = [context.Process(target=run_worker, args=(group, counter), daemon=True) for group in groups]
    try:
        for process, group in zip(processes, groups, strict=True):
            process.start()
            for far in group:
                far.close()  # the worker holds it; so its end closes the connection
        yield [near for near, _ in pairs]
    finally:
        for process in processes:
            if process.pid is not None:
                process.terminate()
                process.join()
