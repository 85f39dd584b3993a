"""Count one shard of a corpus, in this process or in a worker. Imports no torch: workers start in a moment."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from multiprocessing.connection import Connection
from typing import Any

from toolkit.data.dataset_rows import is_dataset, shard_rows
from toolkit.errors import TokenMapError
from toolkit.tokenmap.corpus import Piece, Shard
from toolkit.tokenmap.count import Tally, count_documents
from toolkit.tokenmap.documents import Document, documents_of, row_documents

# A dataset whose first rows, this many of a shard, hold no text is of another kind.
MAX_ROWS_WITHOUT_TEXT = 100


@dataclass(frozen=True)
class ShardCounter:
    """How shards are counted.

    tokenizer: its name. tokenizer_json: what `tokenizers` reads; "" for a tokenizer that is written in Python.
    """

    tokenizer: str
    tokenizer_json: str
    roles: tuple[str, ...]
    vocab_size: int

    def count(self, shard: Shard, skip: int = 0) -> Iterator[Tally]:
        """Yield tallies of the successive documents of a shard, without the first `skip` ones."""
        bad: list[str] = []
        documents = chain.from_iterable(self._documents(piece, bad) for piece in shard)
        for _ in islice(documents, skip):
            bad.clear()  # they were noted when these documents were counted
        for tally in count_documents(documents, self.encode, self.vocab_size):
            tally.skipped, tally.first_skipped = len(bad), next(iter(bad), "")
            bad.clear()
            yield tally

    def encode(self, texts: list[str]) -> Iterable[Sequence[int]]:
        """Return the ids of each text, without special tokens that the tokenizer would add."""
        return self._encoder(texts)

    def _documents(self, piece: Piece, bad: list[str]) -> Iterator[Document]:
        if not is_dataset(piece.source):
            yield from documents_of(piece, self.roles)
            return
        found = False

        def note(error: Exception) -> None:
            # Users cannot correct a row of a hub dataset, so it is skipped and counted.
            bad.append(str(error))
            if not found and len(bad) >= MAX_ROWS_WITHOUT_TEXT:
                raise TokenMapError(f"none of the first {len(bad)} rows holds a text: {error}") from error

        for document in row_documents(shard_rows(piece.source, piece.start), self.roles, note):
            found = True
            yield document

    @cached_property
    def _encoder(self) -> Any:
        """Made when a text comes: rollouts need none."""
        if not self.tokenizer_json:
            from toolkit.targets.load import load_tokenizer  # loads torch, for the few tokenizers written in Python

            slow = load_tokenizer(self.tokenizer)
            return lambda texts: slow(texts, add_special_tokens=False)["input_ids"]
        from tokenizers import Tokenizer

        fast = Tokenizer.from_str(self.tokenizer_json)
        fast.no_truncation()
        fast.no_padding()
        return lambda texts: [one.ids for one in fast.encode_batch_fast(texts, add_special_tokens=False)]


def run_worker(connections: Sequence[Connection], counter: ShardCounter) -> None:
    """Serve each connection by a thread, until all are told to end or the process at their other end does.

    Threads share the tokenizer's tables and its cache of words. Processes would have a copy each, which compete for the
    CPU's caches: on two cores that costs a third of the speed. Threads wait for each other only outside the tokenizer.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a thread has one core
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the other process, which ends this one
    if len(connections) > 1:
        counter.encode([])  # makes the tokenizer once, for all
    threads = [threading.Thread(target=_serve, args=(one, counter)) for one in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _serve(connection: Connection, counter: ShardCounter) -> None:
    """Receive (shard, skip) until None comes, and send each tally and whether it is the shard's last, or the error."""
    try:
        while (task := connection.recv()) is not None:
            try:
                waiting = None
                for tally in counter.count(*task):
                    if waiting is not None:
                        connection.send((waiting, False))
                    waiting = tally
                connection.send((waiting, True))
            except Exception as error:
                connection.send((error, True))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    finally:
        connection.close()  # the other end then learns of a thread that died
