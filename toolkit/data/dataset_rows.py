"""Read rows through `datasets`: from a dataset of the hub, or from a directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.jsonl import GZIP_ERRORS, DataError

HUB = "hub:"
# A streamed dataset is shuffled within a window of this many rows.
SHUFFLE_WINDOW = 10_000

Row = tuple[str, Mapping[str, Any]]
"""(place for error messages, content)"""


def dataset_name(source: str) -> str:
    """Return the name in `hub:org/name[:split]`, or the directory."""
    return source.removeprefix(HUB).partition(":")[0]


def load_rows(source: str, streamed: bool, seed: int | None) -> Any:
    """Load a `Dataset`, or with `streamed` an `IterableDataset`, shuffled when `seed` is given.

    A folder that `save_to_disk` wrote is always loaded as a `Dataset`. Raises `DataError` with source and split.
    """
    import datasets  # takes seconds to import, and only this source needs it

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
    """Read row `at` of a `Dataset`. Raises `DataError` when it cannot be read."""
    try:
        return f"{source} row {at}", dict(rows[at])
    except _loading_errors() as error:
        raise DataError(
            f"{source}: row {at} cannot be read ({type(error).__name__}: {error}); download the dataset again"
        ) from error


def streamed_rows(source: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield the rows of a streamed dataset. Raises `DataError` when the download fails, which may happen at any row."""
    at = 0
    try:
        for at, row in enumerate(rows, 1):
            yield f"{source} row {at - 1}", dict(row)
    except _loading_errors() as error:
        raise DataError(
            f"{source}: reading failed after {at} rows ({type(error).__name__}: {error}); check the network and try "
            "again, or download the dataset and give its directory"
        ) from error


def _loading_errors() -> tuple[type[Exception], ...]:
    """Return what `datasets` raises for network, disk and parser errors (pyarrow's are ValueErrors or OSErrors)."""
    from datasets.exceptions import DatasetsError

    return (OSError, ValueError, KeyError, RuntimeError, DatasetsError, *GZIP_ERRORS)
