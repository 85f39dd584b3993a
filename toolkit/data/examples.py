"""Rollouts as examples: checked in one pass over their file, then read from it whenever a batch asks for them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from toolkit.data.batches import Example
from toolkit.jsonl import DataError, StoredRows
from toolkit.log import get_logger

logger = get_logger(__name__)


class Examples(Sequence[Example]):
    """Examples that stay in their file until they are asked for. lengths: how many ids each has, as it is cut.

    Memory: 20 bytes an example, however long it is. Raises `DataError` for a row that was changed meanwhile.
    """

    def __init__(self, rows: StoredRows, lengths: Sequence[int], target: str | None) -> None:
        self._rows, self._target = rows, target
        self.lengths = array("I", lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]  # no slices
        return _cut(_example(self._rows[index], self._rows.where(index), self._target), self.lengths[index])


def load_examples(
    path: str | Path,
    split: str,
    max_length: int,
    target: str | None = None,
    check: Callable[[Example], None] | None = None,
) -> tuple[Examples, int]:
    """Examples of one split ("train" or "held_out") of a rollouts.jsonl, and how many were cut to `max_length` ids.

    target: whose greedy answers are known as such; None: nobody's. check: called with every example, to refuse it.

    A longer one ends after its last answer that fits whole; where not even the first does, within that. What is lost is
    counted in a warning.
    They come in the order of their ids: in the file they lie as they ended, which depends on how they were batched.
    An example with nothing to supervise (no two neighbouring response ids left) is left out with a warning.
    Memory: see `Examples`; during this call one rollout, and some 200 bytes for each (ids, to sort by).
    Raises `DataError` for rows that are no rollouts and when no example of the split is left.
    """
    if max_length < 3:
        raise DataError(f"max_length {max_length} came; at least 3 ids are needed to predict one from two")
    rows = StoredRows(path)
    found: list[tuple[str, int, int]] = []  # id, place among the rows, length
    cut = empty = other = inside = lost = 0
    for at, row in enumerate(rows):
        whole = _example(row, rows.where(at), target)
        if row["split"] != split:
            other += 1
            continue
        end = _turn_border(whole.response, max_length)
        cut += end < len(whole.response)
        inside += end < len(whole.response) and whole.response[end]
        lost += sum(whole.response[end:])
        example = _cut(whole, end)
        if not any(a and b for a, b in zip(example.response, example.response[1:], strict=False)):
            empty += 1
            continue
        if check is not None:
            check(example)
        found.append((example.id, at, end))
    if cut:
        logger.warning(
            f"{path}: {cut} {split} rollouts are longer than {max_length} ids: {cut - inside} end at the border of a "
            f"turn, {inside} within their first answer; {lost} response ids are left out"
        )
    if empty:
        logger.warning(f"{path}: {empty} {split} rollouts left out: nothing to supervise within {max_length} ids")
    if not found:
        raise DataError(
            f"{path} has no usable {split!r} rollouts ({empty} without supervised ids within {max_length}, "
            f"{other} of other splits); write more rollouts, raise max_length, or change the held-out share"
        )
    found.sort(key=itemgetter(0))
    rows.keep([at for _, at, _ in found])
    return Examples(rows, [end for *_, end in found], target), cut


def _cut(example: Example, end: int) -> Example:
    return replace(example, input_ids=example.input_ids[:end], response=example.response[:end])


def _turn_border(response: list[bool], max_length: int) -> int:
    """Where to end: whole if it fits, else behind the last answer that ends by then, else at `max_length`."""
    if len(response) <= max_length:
        return len(response)
    ends = (at for at in range(max_length, 1, -1) if response[at - 1] and response[at - 2] and not response[at])
    return next(ends, max_length)


def _example(row: dict[str, Any], where: str, target: str | None) -> Example:
    absent = [name for name in ("id", "input_ids", "response_spans", "split") if name not in row]
    if absent:
        raise DataError(f"{where}: a rollout needs {', '.join(absent)}; it has {', '.join(row) or 'nothing'}")
    ids = row["input_ids"]
    response = [False] * len(ids)
    for start, end in row["response_spans"]:
        if not 0 <= start < end <= len(ids):
            raise DataError(f"{where}: response span [{start}, {end}) is empty or outside the {len(ids)} input_ids")
        response[start:end] = [True] * (end - start)
    written = row.get("provenance") or {}
    own = target is not None and written.get("target") == target and written.get("temperature") == 0
    # Earlier turns are the template's rendering of answers, whose ids need not be those that were written.
    return Example(str(row["id"]), ids, response, own and len(row["response_spans"]) == 1)
