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
# Documents are encoded in batches of at most so many characters and documents.
BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 18, 1024
# A tally is handed over after this many characters, so that a killed count loses no more.
PART_CHARACTERS = 1 << 26

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
        np.add.at(self._of(key), found, 1)  # a bincount for each of many tasks would take longer than the tokenizer

    def merge(self, other: Tally) -> None:
        """Add another tally."""
        self.documents += other.documents
        self.skipped += other.skipped
        self.first_skipped = self.first_skipped or other.first_skipped
        if other.many_tasks and not self.many_tasks:
            self._drop_tasks()
        self._add_all(other.counts)

    def total(self, held_out: bool) -> np.ndarray:
        """Return the counts [V] of all tasks."""
        found = [counts for key, counts in self.counts.items() if key[0] == held_out]
        return np.sum(found, axis=0) if found else np.zeros(self.vocab_size, np.int64)

    def _of(self, key: Key) -> np.ndarray:
        """Return the counts to which those of `key` are added."""
        key = (key[0], "" if self.many_tasks else key[1])
        if key not in self.counts:
            self.counts[key] = np.zeros(self.vocab_size, np.int64)
            if len({task for _, task in self.counts}) > MAX_TASKS:
                self._drop_tasks()
                return self._of(key)
        return self.counts[key]

    def _drop_tasks(self) -> None:
        self.many_tasks, earlier, self.counts = True, self.counts, {}
        self._add_all(earlier)

    def _add_all(self, counts: dict[Key, np.ndarray]) -> None:
        for key, one in counts.items():
            found = self._of(key)
            found += one


def count_documents(documents: Iterable[Document], encode: Encode, vocab_size: int) -> Iterator[Tally]:
    """Yield tallies of successive documents; their sum counts all. `encode` must add no special tokens.

    Memory: one batch of documents and its ids. Raises `TokenMapError` as `Tally.add`.
    """
    tally, characters = Tally(vocab_size), 0
    for batch in _batches(documents):
        texts = [one.content for one in batch if isinstance(one.content, str)]
        encoded = iter(encode(texts) if texts else ())
        ids: dict[Key, array[int]] = {}
        for one in batch:
            own = next(encoded) if isinstance(one.content, str) else one.content
            ids.setdefault((one.held_out, one.task), array("q")).extend(own)
        for key, found in ids.items():
            tally.add(key, found)
        tally.documents += len(batch)
        characters += sum(len(one.content) for one in batch)
        if characters >= PART_CHARACTERS:
            yield tally
            tally, characters = Tally(vocab_size), 0
    yield tally


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for one in documents:
        batch.append(one)
        characters += len(one.content)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    yield batch
