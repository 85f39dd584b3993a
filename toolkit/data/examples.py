"""Training examples from rollouts: one pass checks the file, then each batch reads its examples from it."""

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
    """Examples that are read from their file on access. lengths: the number of ids of each, after truncation.

    Memory: 20 bytes per example of any length. Raises `DataError` for a row that changed since it was checked.
    """

    def __init__(self, rows: StoredRows, lengths: Sequence[int], target: str | None) -> None:
        self._rows, self._target = rows, target
        self.lengths = array("I", lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]  # no slices
        return _truncated(_example(self._rows[index], self._rows.where(index), self._target), self.lengths[index])


def load_examples(
    path: str | Path,
    split: str,
    max_length: int,
    target: str | None = None,
    check: Callable[[Example], None] | None = None,
) -> tuple[Examples, int]:
    """Load the examples of one split ("train" or "held_out") of a rollouts.jsonl, and the number of truncated ones.

    target: the model whose answers at temperature 0 count as greedy (None: no answer does). check: called with every
    example; it may raise an error.

    An example of more than `max_length` ids ends after its last answer that fits; if no answer fits, within the first
    answer. A warning counts what is lost.
    Examples are sorted by id, since their order in the file depends on the batch size of the rollouts.
    An example without supervised ids (two neighbouring response ids) is skipped with a warning.
    Memory: see `Examples`; during this call, one rollout and about 200 bytes per example.
    Raises `DataError` for rows that are no rollouts, and when no example of the split is left.
    """
    if max_length < 3:
        raise DataError(f"max_length is {max_length}; at least 3 ids are required, to predict one id from two")
    rows = StoredRows(path)
    found: list[tuple[str, int, int]] = []  # id, place among the rows, length
    truncated = empty = other = inside = lost = 0
    for at, row in enumerate(rows):
        full = _example(row, rows.where(at), target)
        if row["split"] != split:
            other += 1
            continue
        end = _turn_end(full.response, max_length)
        truncated += end < len(full.response)
        inside += end < len(full.response) and full.response[end]
        lost += sum(full.response[end:])
        example = _truncated(full, end)
        if not any(a and b for a, b in zip(example.response, example.response[1:], strict=False)):
            empty += 1
            continue
        if check is not None:
            check(example)
        found.append((example.id, at, end))
    if truncated:
        logger.warning(
            f"{path}: {truncated} {split} rollouts are longer than {max_length} ids: {truncated - inside} were cut at "
            f"the end of a turn, {inside} within their first answer; {lost} response ids are not used"
        )
    if empty:
        logger.warning(f"{path}: skipped {empty} {split} rollouts without supervised ids within {max_length} ids")
    if not found:
        raise DataError(
            f"{path} has no usable {split!r} rollouts ({empty} without supervised ids within {max_length}, "
            f"{other} of other splits); write more rollouts, raise max_length, or change the held-out share"
        )
    found.sort(key=itemgetter(0))
    rows.keep([at for _, at, _ in found])
    return Examples(rows, [end for *_, end in found], target), truncated


def _truncated(example: Example, end: int) -> Example:
    return replace(example, input_ids=example.input_ids[:end], response=example.response[:end])


def _turn_end(response: list[bool], max_length: int) -> int:
    """Return where to truncate: nowhere if all fits, else after the last answer that fits, else at `max_length`."""
    if len(response) <= max_length:
        return len(response)
    ends = (at for at in range(max_length, 1, -1) if response[at - 1] and response[at - 2] and not response[at])
    return next(ends, max_length)


def _example(row: dict[str, Any], where: str, target: str | None) -> Example:
    absent = [name for name in ("id", "input_ids", "response_spans", "split") if name not in row]
    if absent:
        raise DataError(f"{where}: {', '.join(absent)} missing; keys are {', '.join(row) or '(none)'}")
    ids = row["input_ids"]
    response = [False] * len(ids)
    for start, end in row["response_spans"]:
        if not 0 <= start < end <= len(ids):
            raise DataError(f"{where}: response span [{start}, {end}) is empty or outside the {len(ids)} input_ids")
        response[start:end] = [True] * (end - start)
    written = row.get("provenance") or {}
    own = target is not None and written.get("target") == target and written.get("temperature") == 0
    own = own and "server" not in written  # another engine rounds in its own way
    # In earlier turns the template renders the answers again, so their ids may differ from those the target wrote.
    return Example(str(row["id"]), ids, response, own and len(row["response_spans"]) == 1)
