"""Read rows through `datasets`: from a dataset of the hub, or from a directory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from toolkit.errors import TokenMapError, optional_package
from toolkit.jsonl import GZIP_ERRORS, DataError
from toolkit.log import get_logger

logger = get_logger(__name__)

R = TypeVar("R")
T = TypeVar("T")

HUB = "hub:"
# A streamed dataset is shuffled within a window of this many rows.
SHUFFLE_WINDOW = 10_000
# A dataset whose first rows, this many, are of no use is of another kind.
MAX_OTHER_ROWS = 100

Row = tuple[str, Mapping[str, Any]]
"""(place for error messages, content)"""


def dataset_name(source: str) -> str:
    """Return the name in `hub:org/name[/config][:split]`, or the directory."""
    return _name_and_config(source)[0]


def load_rows(source: str, streamed: bool, seed: int | None) -> Any:
    """Load a `Dataset`, or with `streamed` an `IterableDataset`, shuffled when `seed` is given.

    Raises `DataError` with source and split.
    """
    datasets = optional_package("datasets", source)  # takes seconds to import

    (name, config), split = _name_and_config(source), source.removeprefix(HUB).partition(":")[2] or "train"
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=streamed)
        return rows.shuffle(seed=seed, buffer_size=SHUFFLE_WINDOW) if streamed and seed is not None else rows
    except _loading_errors() as error:
        raise DataError(
            f"{source}: split {split!r} of {name!r} cannot be loaded ({type(error).__name__}: {error}); "
            "check the name, the split and the network"
        ) from error


def streamed_rows(source: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield the rows of a dataset. Raises `DataError` when one cannot be read: a download may fail at any row."""
    at = 0
    try:
        for at, row in enumerate(rows, 1):
            yield f"{source} row {at - 1}", dict(row)
    except _loading_errors() as error:
        raise DataError(
            f"{source}: reading failed after {at} rows ({type(error).__name__}: {error}); check the network and try "
            "again, or download the dataset and give its directory"
        ) from error


def valid_rows(
    source: str, rows: Iterable[R], parse: Callable[[R], T], holds: str
) -> Generator[tuple[R, T], None, None]:
    """Yield (row, what `parse` makes of it). Rows for which it raises an error are skipped, and counted in a warning:
    users cannot correct them. Close the generator where it does not end, so that the warning comes.

    holds: what a row must have, for the `DataError` when none of the first hundred does.
    """
    seen, skipped, first = 0, 0, ""
    try:
        for row in rows:
            seen += 1
            try:
                found = parse(row)
            except (DataError, TokenMapError) as error:
                skipped, first = skipped + 1, first or str(error)
                if skipped == seen == MAX_OTHER_ROWS:
                    raise DataError(f"none of the first {seen} rows holds a {holds}: {error}") from error
            else:
                yield row, found
    finally:
        if skipped:
            logger.warning(f"{source}: {skipped} of {seen} rows were skipped; the first: {first}")


def _name_and_config(source: str) -> tuple[str, str | None]:
    """Return org/name and the configuration of `org/name/config`; a path has none."""
    name = source.removeprefix(HUB).partition(":")[0]
    owner, _, rest = name.partition("/")
    if source.startswith(HUB) and owner and rest.count("/") == 1 and not Path(name).exists():
        repository, _, config = rest.partition("/")
        return f"{owner}/{repository}", config
    return name, None


def _loading_errors() -> tuple[type[Exception], ...]:
    """Return what `datasets` raises for network, disk and parser errors (pyarrow's are ValueErrors or OSErrors)."""
    from datasets.exceptions import DatasetsError

    return (OSError, ValueError, KeyError, RuntimeError, DatasetsError, *GZIP_ERRORS)
