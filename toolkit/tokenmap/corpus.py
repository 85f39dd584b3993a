"""Token ids of what is counted: the answers in rollouts, or any text and jsonl files through a tokenizer handed in."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from toolkit.chat_roles import ROLES
from toolkit.jsonl import GZIP_ERRORS
from toolkit.tokenmap.token_map import TokenMapError

TEXT_FIELDS = ("text", "content", "response", "output", "completion", "answer", "prompt")
MESSAGE_FIELDS = ("messages", "conversations")
# A text file is cut at line ends into documents of about this many characters: a large file is never one string.
TEXT_CHARACTERS = 1 << 16


def rollout_responses(path: str | Path, split: str | None = "train") -> Iterator[list[int]]:
    """The response ids of each rollout, span by span.

    Reads `input_ids` and `response_spans` [[start, end), ...]. Rows of another `split` are left out (None: all rows),
    so that a held-out answer does not shape the vocabulary it is judged with.
    """
    for where, row in _rows(Path(path)):
        if split is not None and row.get("split", split) != split:
            continue
        ids, spans = row.get("input_ids"), row.get("response_spans")
        if not isinstance(ids, list) or not isinstance(spans, list):
            raise TokenMapError(f"{where}: input_ids and response_spans are needed in a rollout, {sorted(row)} came")
        for start, end in spans:
            if not 0 <= start <= end <= len(ids):
                raise TokenMapError(f"{where}: response span [{start}, {end}) lies outside the {len(ids)} ids")
            yield ids[start:end]


def corpus_ids(
    paths: Iterable[str | Path],
    encode: Callable[[str], Sequence[int]],
    *,
    roles: Sequence[str] = ("assistant",),
    limit: int | None = None,
) -> Iterator[Sequence[int]]:
    """Ids of each document of text (.txt, .md, other) and .jsonl/.json files, .gz or not; at most `limit` documents.

    `encode` must add no special tokens. Of a row with messages the turns of `roles` are documents, else its text.
    Memory: one document at a time, or row; only a .json file is read whole.
    Raises `TokenMapError` naming file and line for a row that has neither, and when there was no document at all.
    """
    texts = (text for path in paths for text in read_texts(path, roles))
    empty = True
    for text in islice(texts, limit):
        empty = False
        yield encode(text)
    if empty:
        raise TokenMapError(f"no text came out of {', '.join(map(str, paths))} (roles counted: {', '.join(roles)})")


def read_texts(path: str | Path, roles: Sequence[str] = ("assistant",)) -> Iterator[str]:
    """The documents of one file, in order."""
    path = Path(path)
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".json")):
        for where, row in _rows(path):
            yield from _texts_of(row, roles, where)
    else:
        yield from _pieces(path)


def _texts_of(row: dict[str, Any], roles: Sequence[str], where: str) -> Iterator[str]:
    for field in MESSAGE_FIELDS:
        if isinstance(row.get(field), list):
            yield from _turns(row[field], roles, where)
            return
    for field in TEXT_FIELDS:
        if isinstance(row.get(field), str):
            yield row[field]
            return
    raise TokenMapError(
        f"{where}: no text in the fields {', '.join(map(str, row)) or '(none)'}; "
        f"one of {', '.join(TEXT_FIELDS)} or a list under {' or '.join(MESSAGE_FIELDS)} is needed"
    )


def _turns(messages: list[Any], roles: Sequence[str], where: str) -> Iterator[str]:
    for message in messages:
        message = _object(message, f"{where}: a message")
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if not isinstance(role, str) or not isinstance(content, (str, type(None))):
            raise TokenMapError(f"{where}: a message with {sorted(message)} came; role and content (texts) are needed")
        if content and ROLES.get(role, role) in roles:
            yield content


def _pieces(path: Path) -> Iterator[str]:
    lines: list[str] = []
    size = 0
    for _, line in _lines(path):
        lines.append(line)
        size += len(line)
        if size >= TEXT_CHARACTERS:
            yield "".join(lines)
            lines, size = [], 0
    if size:
        yield "".join(lines)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, object) of a jsonl file, or of a .json file that is one list."""
    if path.name.removesuffix(".gz").endswith(".json"):
        yield from _rows_of_list(path)
        return
    for number, line in _lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        yield where, _object(_parse(line, where), where)


def _rows_of_list(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = _parse("".join(line for _, line in _lines(path)), str(path))
    if not isinstance(rows, list):
        raise TokenMapError(
            f"{path} is one JSON {type(rows).__name__}; a list of rows, or .jsonl with a row a line, is needed"
        )
    for index, row in enumerate(rows):
        yield f"{path} row {index}", _object(row, f"{path} row {index}")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TokenMapError(f"{where} is not valid JSON ({error.msg}); mend or remove it") from error


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise TokenMapError(f"{where} is a JSON {type(row).__name__}; an object is needed")
    return row


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if not path.is_file():
        raise TokenMapError(f"{path} is no file; a text, .json or .jsonl file (.gz or not) is needed")
    try:
        with _open(path) as handle:
            yield from enumerate(handle, start=1)
    except (*GZIP_ERRORS, UnicodeDecodeError) as error:
        raise TokenMapError(
            f"{path} cannot be read as UTF-8 text ({error}); it is damaged or of another format"
        ) from error


def _open(path: Path) -> TextIO:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
