"""Count the tokens of documents, by task and apart for held-out ones. Imports no torch: worker processes start fast.

Shapes: V = target vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from toolkit.errors import TokenMapError
from toolkit.tokenmap.documents import Document

# A corpus with more tasks than this is counted as one: such a field is no small set of tasks.
MAX_TASKS = 64
BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 18, 1024
# A tally is handed over after this many characters, so that a killed count loses no more.
PART_CHARACTERS = 1 << 26
# At most so many ids wait to be counted together.
WAITING_IDS = 1 << 20

Encode = Callable[[list[str]], Iterable[Sequence[int]]]
Key = tuple[bool, str]
"""(held out, task)"""


@dataclass
class Tally:
    """Counts [V] int64 by (held out, task), and what they were counted in. Tallies add up in any order.

    many_tasks: more than `MAX_TASKS` tasks were seen, and all counts are kept under the task "".
    skipped: rows of a dataset without text; first_skipped: the error of one of them.
    """

    vocab_size: int
    counts: dict[Key, np.ndarray] = field(default_factory=dict)
    documents: int = 0
    many_tasks: bool = False
    skipped: int = 0
    first_skipped: str = ""

    def add(self, key: Key, ids: array[int]) -> None:
        """Count ids. Raises `TokenMapError` for an id outside [0, V), which means that another tokenizer wrote it."""
        if not ids:
            return
        found = np.frombuffer(ids, np.int64)
        if found.min() < 0 or found.max() >= self.vocab_size:
            raise TokenMapError(
                f"ids range from {found.min()} to {found.max()}, but the target's vocabulary is "
                f"[0, {self.vocab_size}); count with the target's own tokenizer"
            )
        self._add_counts(key, np.bincount(found, minlength=self.vocab_size))

    def merge(self, other: Tally) -> None:
        """Add another tally."""
        self.documents += other.documents
        self.skipped += other.skipped
        self.first_skipped = self.first_skipped or other.first_skipped
        if other.many_tasks:
            self._drop_tasks()
        for key, counts in other.counts.items():
            self._add_counts(key, counts)

    def total(self, held_out: bool) -> np.ndarray:
        """Return the counts [V] of all tasks."""
        found = [counts for key, counts in self.counts.items() if key[0] == held_out]
        return np.sum(found, axis=0) if found else np.zeros(self.vocab_size, np.int64)

    def _add_counts(self, key: Key, counts: np.ndarray) -> None:
        key = (key[0], "" if self.many_tasks else key[1])
        if key in self.counts:
            self.counts[key] += counts
            return
        self.counts[key] = counts.copy()
        if len({task for _, task in self.counts}) > MAX_TASKS:
            self._drop_tasks()

    def _drop_tasks(self) -> None:
        if not self.many_tasks:
            self.many_tasks, earlier, self.counts = True, self.counts, {}
            for key, counts in earlier.items():
                self._add_counts(key, counts)


def count_documents(documents: Iterable[Document], encode: Encode, vocab_size: int) -> Iterator[Tally]:
    """Yield tallies of successive documents; their sum counts all. `encode` must add no special tokens.

    Memory: one batch of documents and its ids. Raises `TokenMapError` as `Tally.add`.
    """
    counter = _Counter(encode, vocab_size)
    for document in documents:
        counter.add(document)
        if counter.characters >= PART_CHARACTERS:
            yield counter.take()
    yield counter.take()


class _Counter:
    """Collects texts into batches to encode, and ids into batches to count."""

    def __init__(self, encode: Encode, vocab_size: int) -> None:
        self.characters = 0
        self._encode, self._vocab_size = encode, vocab_size
        self._tally = Tally(vocab_size)
        self._texts: list[str] = []
        self._keys: list[Key] = []
        self._batch_characters = 0
        self._ids: dict[Key, array[int]] = {}
        self._waiting = 0

    def add(self, document: Document) -> None:
        key = (document.held_out, document.task)
        self._tally.documents += 1
        self.characters += len(document.content)
        if not isinstance(document.content, str):
            self._wait(key, document.content)
            return
        self._texts.append(document.content)
        self._keys.append(key)
        self._batch_characters += len(document.content)
        if self._batch_characters >= BATCH_CHARACTERS or len(self._texts) >= BATCH_DOCUMENTS:
            self._encode_batch()

    def take(self) -> Tally:
        """Return the tally of the documents since the last call."""
        self._encode_batch()
        self._count()
        taken, self._tally, self.characters = self._tally, Tally(self._vocab_size), 0
        return taken

    def _encode_batch(self) -> None:
        if self._texts:
            for key, ids in zip(self._keys, self._encode(self._texts), strict=True):
                self._wait(key, ids)
        self._texts, self._keys, self._batch_characters = [], [], 0

    def _wait(self, key: Key, ids: Sequence[int]) -> None:
        self._ids.setdefault(key, array("q")).extend(ids)
        self._waiting += len(ids)
        if self._waiting >= WAITING_IDS:
            self._count()

    def _count(self) -> None:
        for key, ids in self._ids.items():
            self._tally.add(key, ids)
        self._ids, self._waiting = {}, 0
