"""The documents of a corpus, one by one: texts to encode, or ids of rollouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.chat_rows import ROLES, encodable, read_message
from toolkit.errors import TokenMapError
from toolkit.jsonl import DataError, parse_row, read_lines, read_placed_rows
from toolkit.tokenmap.corpus import PARQUET, Piece, is_rows, is_whole

TEXT_FIELDS = ("text", "content", "response", "output", "completion", "answer", "prompt")
MESSAGE_FIELDS = ("messages", "conversations")
TASK_FIELDS = ("task", "category")
ROLLOUT_FIELDS = ("input_ids", "response_spans")
# Text files are read as documents of about this many characters, and of at most `LONGEST` times it: memory is bounded.
TEXT_CHARACTERS, LONGEST = 1 << 16, 16
# Where a document may end, the best first: as `may_cut` says, at a line end, before a blank.
CUTS = tuple(map(re.compile, (r"(?<=\S\n)(?=\S)", r"(?<=\n)", r"(?= )")))
PARQUET_ROWS = 1000


class Document(NamedTuple):
    """A text, or token ids. task: what the row says that it is; held_out: of a rollout that is not trained on."""

    content: str | Sequence[int]
    task: str = ""
    held_out: bool = False


class _LineAt:
    """A place for error messages, file:line, whose line number is counted when it is written."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path, self._offset = path, offset

    def __str__(self) -> str:
        step = 1 << 20
        with self._path.open("rb") as handle:
            before = (handle.read(min(step, self._offset - at)) for at in range(0, self._offset, step))
            lines = sum(block.count(b"\n") for block in before)
        return f"{self._path}:{lines + 1}"


def documents_of(piece: Piece, roles: Sequence[str]) -> Iterator[Document]:
    """Yield the documents of a piece of a file, in order.

    In a row with messages, each turn of `roles` is a document; in a rollout, each span of response ids; in other rows,
    the text field. Memory: one piece, or one row; a .json file is read at once.
    Raises `TokenMapError` with file and line for a row without any of them, `DataError` for a file that cannot be read
    and for a message that is none.
    """
    path = Path(piece.source)
    if path.suffix == PARQUET:
        yield from row_documents(_parquet_rows(path, range(piece.start, piece.end)), roles)
    elif is_rows(path):
        rows = read_placed_rows(path) if is_whole(path) else _rows_between(path, piece.start, piece.end)
        yield from row_documents(rows, roles)
    elif is_whole(path):
        yield from map(Document, _texts(line for _, line in read_lines(path)))
    else:
        yield from map(Document, _texts([_text_between(path, piece.start, piece.end)]))


def row_documents(
    rows: Iterable[tuple[object, Any]],
    roles: Sequence[str],
    on_bad_row: Callable[[Exception], None] | None = None,
) -> Iterator[Document]:
    """Yield the documents of (place, row). A row without text is handed to `on_bad_row`, or is an error without it."""
    for where, row in rows:
        task = next((row[name] for name in TASK_FIELDS if isinstance(row.get(name), str)), "")
        try:
            if all(isinstance(row.get(name), list) for name in ROLLOUT_FIELDS):
                held_out = row.get("split") == "held_out"
                found = [Document(ids, task, held_out) for ids in _responses(row, where)]
            else:
                found = [Document(text, task) for text in _texts_of_row(row, roles, where)]
        except (DataError, TokenMapError) as error:
            if on_bad_row is None:
                raise
            on_bad_row(error)
        else:
            yield from found


def _responses(row: dict[str, Any], where: object) -> Iterator[list[int]]:
    """Yield the response ids of a rollout, one list per span."""
    ids = row["input_ids"]
    for start, end in row["response_spans"]:
        if not 0 <= start <= end <= len(ids):
            raise TokenMapError(f"{where}: response span [{start}, {end}) is outside the {len(ids)} input_ids")
        yield ids[start:end]


def _texts_of_row(row: dict[str, Any], roles: Sequence[str], where: object) -> Iterator[str]:
    for field in MESSAGE_FIELDS:
        if isinstance(row.get(field), list):
            yield from _turns(row[field], roles, where)
            return
    for field in TEXT_FIELDS:
        if isinstance(row.get(field), str):
            yield encodable(row[field], f"{where}: {field}")
            return
    raise TokenMapError(
        f"{where}: no text field among {', '.join(map(str, row)) or '(none)'}; expected one of "
        f"{', '.join(TEXT_FIELDS)}, a list under {' or '.join(MESSAGE_FIELDS)}, or {' and '.join(ROLLOUT_FIELDS)}"
    )


def _turns(messages: list[Any], roles: Sequence[str], where: object) -> Iterator[str]:
    for message in messages:
        role, content = read_message(message, f"{where}: a message")
        if content and ROLES.get(role, role) in roles:
            yield content


def _parquet_rows(path: Path, groups: range) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow import ArrowException, parquet

    known = (*ROLLOUT_FIELDS, "split", *MESSAGE_FIELDS, *TEXT_FIELDS, *TASK_FIELDS)
    row = 0
    try:
        file = parquet.ParquetFile(path)
        columns = [name for name in file.schema_arrow.names if name in known] or None  # None: the error names all
        for batch in file.iter_batches(PARQUET_ROWS, row_groups=list(groups), columns=columns):
            for found in batch.to_pylist():
                yield f"{path} row group {groups.start} row {row}", found
                row += 1
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: row group {groups.start} cannot be read ({error}); copy the file again") from error


def _rows_between(path: Path, start: int, end: int) -> Iterator[tuple[object, dict[str, Any]]]:
    with path.open("rb") as handle:
        handle.seek(start)
        at = start
        while at < end:
            line = handle.readline()
            if not line:  # the file was cut since it was planned, which the caller finds by its size
                return
            where = _LineAt(path, at)
            at += len(line)
            if line.strip():
                yield where, parse_row(_decoded(line, path, at - len(line)), where)


def _text_between(path: Path, start: int, end: int) -> str:
    with path.open("rb") as handle:
        handle.seek(start)
        text = _decoded(handle.read(end - start), path, start)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _decoded(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode("utf-8" if offset else "utf-8-sig")  # without the mark that some editors put first
    except UnicodeDecodeError as error:
        where = _LineAt(path, offset + error.start)
        raise DataError(f"{where}: {error}; expected UTF-8 text, copy the file again") from error


def _texts(chunks: Iterable[str]) -> Iterator[str]:
    """Yield the documents of a text that comes in chunks. The chunks do not change them."""
    waiting: list[str] = []
    size = 0
    for chunk in chunks:
        waiting.append(chunk)
        size += len(chunk)
        if size > 2 * LONGEST * TEXT_CHARACTERS:
            *whole, rest = _cut("".join(waiting), LONGEST * TEXT_CHARACTERS)
            yield from whole
            waiting, size = [rest], len(rest)
    yield from _cut("".join(waiting), TEXT_CHARACTERS)


def _cut(text: str, left: int) -> Iterator[str]:
    """Yield documents of at least `TEXT_CHARACTERS` as long as more than `left` characters remain; then the rest."""
    start = 0
    while len(text) - start > left:
        end = min(start + LONGEST * TEXT_CHARACTERS, len(text))
        found = (pattern.search(text, start + TEXT_CHARACTERS, end) for pattern in CUTS)
        cut = next((one.start() for one in found if one), end)
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]
