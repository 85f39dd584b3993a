"""Read and append files of JSON objects. Errors name file:line; a killed writer loses at most one line."""

from __future__ import annotations

import gzip
import json
import mmap
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

# Raised for files that are not gzip, truncated or damaged.
GZIP_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)


class DataError(ValueError):
    """A data file or row is invalid; the message has the place, what was given and what is needed."""


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line) of a text file, gzipped or not.

    Raises `DataError` for a file that is missing, not UTF-8 or damaged (gzip).
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path} does not exist; give the path of an existing file")
    number = 0
    coding = "utf-8-sig"  # without the mark that some editors put first
    with gzip.open(path, "rt", encoding=coding) if path.suffix == ".gz" else path.open(encoding=coding) as handle:
        try:
            for number, line in enumerate(handle, 1):
                yield number, line
        except (UnicodeDecodeError, *GZIP_ERRORS) as error:
            raise DataError(f"{path}:{number + 1}: {error}; expected UTF-8 text, copy the file again") from error


def read_rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) from a .jsonl or .jsonl.gz file; empty lines are skipped.

    Raises `DataError` as `read_lines`, and for a line that is no JSON object.
    """
    for number, line in read_lines(path):
        if line.strip():
            yield number, parse_row(line, f"{path}:{number}")


def read_placed_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place for error messages, object) of the rows of a .jsonl file, or of a .json file that holds one list.

    Both may be gzipped. A .json file is read at once. Raises `DataError`.
    """
    if not Path(path).name.removesuffix(".gz").endswith(".json"):
        yield from ((f"{path}:{number}", row) for number, row in read_rows(path))
        return
    try:
        rows = json.loads("".join(line for _, line in read_lines(path)))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}:{getattr(error, 'lineno', 1)}: not valid JSON ({error}); expected a list (use .jsonl "
            "for one object per line)"
        ) from error
    if not isinstance(rows, list):
        raise DataError(f"{path}:1: is a {type(rows).__name__}; expected a list of rows")
    for at, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{path}[{at}]: is a {type(row).__name__}; expected an object")
        yield f"{path}[{at}]", row


def parse_row(line: str, where: object) -> dict[str, Any]:
    """Parse one line as a JSON object. Raises `DataError` that begins with `where` as text."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a plain ValueError
        raise DataError(
            f"{where}: not valid JSON ({error}): {line.strip()[:80]!r}; expected one JSON object per line"
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: is a {type(row).__name__}; expected a JSON object (one per line): {line.strip()[:80]!r}"
        )
    return row


class StoredRows:
    """The rows of a .jsonl file, which are read from the file on access.

    Memory: 16 bytes per row (offset, line number, checksum). The file is opened for each access to a row, and once for
    an iteration, so threads and forked processes may read at the same time.
    Raises `DataError` for a file that is missing or gzipped, a line that is no JSON object, and a row that has changed
    since the file was opened; rows may be appended meanwhile. limit: number of rows to read, from the first.
    """

    def __init__(self, path: str | Path, limit: int | None = None) -> None:
        self.path = Path(path)
        if self.path.suffix == ".gz":
            raise DataError(f"{path} is gzipped, but its rows are read at random; unpack it first (gunzip)")
        self._offsets, self._numbers, self._checksums = array("q"), array("I"), array("I")
        offset = 0
        with self._opened() as handle:
            for number, line in enumerate(handle, 1):
                if len(self) == limit:
                    break
                if line.strip():
                    self._offsets.append(offset)
                    self._numbers.append(number)
                    self._checksums.append(zlib.crc32(line))
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self._opened() as handle:
            return self._row(handle, index)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self._opened() as handle:
            for index in range(len(self)):
                yield self._row(handle, index)

    def where(self, index: int) -> str:
        """Return file:line of a row."""
        return f"{self.path}:{self._numbers[index]}"

    def keep(self, order: Sequence[int]) -> None:
        """Keep only the rows with these indices, in this order."""
        self._offsets, self._numbers, self._checksums = (
            array(column.typecode, (column[index] for index in order))
            for column in (self._offsets, self._numbers, self._checksums)
        )

    def _opened(self) -> BinaryIO:
        if not self.path.is_file():
            raise DataError(f"{self.path} does not exist; expected a .jsonl file")
        return self.path.open("rb")

    def _row(self, handle: BinaryIO, index: int) -> dict[str, Any]:
        handle.seek(self._offsets[index])
        line, where = handle.readline(), self.where(index)
        if zlib.crc32(line) != self._checksums[index]:
            raise DataError(f"{where} was changed while the file was in use; start again, and do not edit it meanwhile")
        try:
            return parse_row(line.decode("utf-8-sig"), where)
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: {error}; expected UTF-8 text, copy the file again") from error


def cut_torn_line(path: str | Path) -> bool:
    """Remove the text after the last newline, which a killed writer left. Return whether the file was changed."""
    path = Path(path)
    size = path.stat().st_size if path.exists() else 0
    if size == 0:
        return False
    with path.open("rb+") as handle:
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as text:
            keep = text.rfind(b"\n") + 1
        handle.truncate(keep)
    return keep < size


class RowAppender:
    """Append rows to a .jsonl file; each row is flushed at once. Opening the file removes an incomplete last line.

    Use as a context manager. A killed writer leaves complete lines and at most one incomplete line.
    """

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)
        self._handle = Path(path).open("a", encoding="utf-8")

    def append(self, row: dict[str, Any]) -> None:
        """Write one row as one line and flush it to the operating system."""
        self._handle.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._handle.flush()

    def __enter__(self) -> RowAppender:
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.close()
