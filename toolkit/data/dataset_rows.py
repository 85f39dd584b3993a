"""Rows of what `datasets` loads: a dataset of the hub, or a directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.jsonl import GZIP_ERRORS, DataError

HUB = "hub:"
# A streamed dataset is shuffled within a window of this many rows.
SHUFFLE_WINDOW = 10_000

Row = tuple[str, Mapping[str, Any]]
"""Where it stands, for errors, and what it holds."""


def dataset_name(source: str) -> str:
    """Of `hub:org/name[:split]` or a directory, without the split."""
    return source.removeprefix(HUB).partition(":")[0]


def load_rows(source: str, streamed: bool, seed: int | None) -> Any:
    """A `Dataset`; with `streamed` an `IterableDataset` (shuffled, with a seed) of all but what `save_to_disk` wrote.

    Raises `DataError` naming the source and the split.
    """
    import datasets  # seconds to import, and only this source needs it

    name, split = dataset_name(source), source.removeprefix(HUB).partition(":")[2] or "train"
    folder = Path(name)
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(name)
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        rows = datasets.load_dataset(name, split=split, streaming=streamed)
        return rows.shuffle(seed=seed, buffer_size=SHUFFLE_WINDOW) if streamed and seed is not None else rows
    except _loading_errors() as error:
        raise DataError(
            f"{source}: split {split!r} of {name!r} cannot be loaded ({type(error).__name__}: {error}); "
            "check the name, the split and the network"
        ) from error


def row_on_disk(source: str, rows: Any, at: int) -> Row:
    """Row `at` of a `Dataset`. Raises `DataError`."""
    try:
        return f"{source} row {at}", dict(rows[at])
    except _loading_errors() as error:
        raise DataError(
            f"{source}: row {at} cannot be read ({type(error).__name__}: {error}); fetch the dataset again"
        ) from error


def rows_while_read(source: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """Of a streamed dataset, which is fetched while it is read. Raises `DataError`: the network, or a file of it, may
    fail in any row."""
    at = 0
    try:
        for at, row in enumerate(rows, 1):
            yield f"{source} row {at - 1}", dict(row)
    except _loading_errors() as error:
        raise DataError(
            f"{source}: reading ended after {at} rows ({type(error).__name__}: {error}); check the network and try "
            "again, or fetch the dataset and name its directory"
        ) from error


def _loading_errors() -> tuple[type[Exception], ...]:
    """What `datasets` lets through of the network, the disk and its parsers (pyarrow's are ValueErrors or OSErrors)."""
    from datasets.exceptions import DatasetsError

    return (OSError, ValueError, KeyError, RuntimeError, DatasetsError, *GZIP_ERRORS)
