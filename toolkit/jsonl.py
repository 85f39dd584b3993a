"""Files of one JSON object per line: errors name file:line, and a killed writer costs one line at most."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TextIO

# A gzip file that is none, is cut short, or has damaged bytes.
GZIP_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)


class DataError(ValueError):
    """A data file or row is not what is needed; the message names the place, what came and what is needed."""


def read_rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) of a .jsonl or .jsonl.gz file; empty lines are passed over.

    Raises `DataError` for a file that is absent, not UTF-8 or damaged (gzip), and for a line that is no JSON object.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path} does not exist; a .jsonl or .jsonl.gz file is needed there")
    opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
    number = 0
    with opened as handle:
        try:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    yield number, parse_row(line, f"{path}:{number}")
        except (UnicodeDecodeError, *GZIP_ERRORS) as error:
            raise DataError(f"{path}:{number + 1}: {error}; whole UTF-8 text is needed, copy the file again") from error


def parse_row(line: str, where: str) -> dict[str, Any]:
    """One line as a JSON object. Raises `DataError` that begins with `where`."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not valid JSON ({error}): {line.strip()[:80]!r}; one JSON object per line is needed"
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: a {type(row).__name__} came, a JSON object (one per line) is needed: {line.strip()[:80]!r}"
        )
    return row


class StoredRows:
    """The rows of a .jsonl file, each read from it when it is asked for.

    Memory: 16 bytes a row, whatever it holds (where it begins, its line number, a checksum). The file is opened for
    every row, and once for a pass over all, so threads and forked processes may read side by side.
    Raises `DataError` for a file that is absent or packed, a line that is no JSON object, and a row whose bytes are no
    longer what they were at first; rows that are added behind do no harm. limit: of rows, from the first.
    """

    def __init__(self, path: str | Path, limit: int | None = None) -> None:
        self.path = Path(path)
        if self.path.suffix == ".gz":
            raise DataError(f"{path} is packed, and its rows are read where they lie; unpack it first (gunzip)")
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
        """file:line of a row."""
        return f"{self.path}:{self._numbers[index]}"

    def keep(self, order: Sequence[int]) -> None:
        """Go on with these rows alone, in this order."""
        self._offsets, self._numbers, self._checksums = (
            array(column.typecode, (column[index] for index in order))
            for column in (self._offsets, self._numbers, self._checksums)
        )

    def _opened(self) -> BinaryIO:
        if not self.path.is_file():
            raise DataError(f"{self.path} does not exist; a .jsonl file is needed there")
        return self.path.open("rb")

    def _row(self, handle: BinaryIO, index: int) -> dict[str, Any]:
        handle.seek(self._offsets[index])
        line, where = handle.readline(), self.where(index)
        if zlib.crc32(line) != self._checksums[index]:
            raise DataError(f"{where} was changed while the file was in use; start again, and leave it alone meanwhile")
        try:
            return parse_row(line.decode("utf-8"), where)
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: {error}; whole UTF-8 text is needed, copy the file again") from error


def cut_torn_line(path: str | Path) -> bool:
    """Cut what follows the last newline: the rest of a write that was killed. Returns whether anything was cut."""
    path = Path(path)
    if not path.exists():
        return False
    with path.open("rb+") as handle:
        end = handle.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            start = max(0, keep - 65536)
            handle.seek(start)
            found = handle.read(keep - start).rfind(b"\n")
            if found >= 0:
                keep = start + found + 1
                break
            keep = start
        if keep == end:
            return False
        handle.truncate(keep)
    return True


class RowAppender:
    """Append rows to a .jsonl file, each flushed when written. Opening it cuts a torn last line.

    Use as a context manager. A killed writer leaves whole lines and at most one torn one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._handle: TextIO | None = None

    def __enter__(self) -> RowAppender:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(self.path)
        self._handle = self.path.open("a", encoding="utf-8")
        return self

    def append(self, row: dict[str, Any]) -> None:
        """Write one row as one line and flush it to the system."""
        assert self._handle is not None, "RowAppender is used inside its with block"
        self._handle.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._handle.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._handle is not None, "RowAppender is used inside its with block"
        self._handle.close()
