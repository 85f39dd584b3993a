"""Read the token ids to count: response ids of rollouts, or text and JSON files encoded by a tokenizer."""

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
# Text files are split at line ends into documents of about this many characters, which bounds memory.
TEXT_CHARACTERS = 1 << 16


def rollout_responses(path: str | Path, split: str | None = "train") -> Iterator[list[int]]:
    """Yield the response ids of each rollout, one list per span.

    Reads `input_ids` and `response_spans` [[start, end), ...]. Rows of other splits are skipped (`split` None: all rows
    are read), so that held-out answers do not influence the vocabulary that is evaluated on them.
    """
    for where, row in _rows(Path(path)):
        if split is not None and row.get("split", split) != split:
            continue
        ids, spans = row.get("input_ids"), row.get("response_spans")
        if not isinstance(ids, list) or not isinstance(spans, list):
            raise TokenMapError(f"{where}: keys are {sorted(row)}; a rollout needs input_ids and response_spans")
        for start, end in spans:
            if not 0 <= start <= end <= len(ids):
                raise TokenMapError(f"{where}: response span [{start}, {end}) is outside the {len(ids)} input_ids")
            yield ids[start:end]


def corpus_ids(
    paths: Iterable[str | Path],
    encode: Callable[[str], Sequence[int]],
    *,
    roles: Sequence[str] = ("assistant",),
    limit: int | None = None,
) -> Iterator[Sequence[int]]:
    """Yield the ids of each document in text files (.txt, .md, other) and .jsonl or .json files, gzipped or not.

    At most `limit` documents are read. `encode` must add no special tokens. In a row with messages, each turn of
    `roles` is a document; in other rows the text field is. Memory: one document or row; a .json file is read at once.
    Raises `TokenMapError` with file and line for a row without messages or text, and when no document is found.
    """
    texts = (text for path in paths for text in read_texts(path, roles))
    empty = True
    for text in islice(texts, limit):
        empty = False
        yield encode(text)
    if empty:
        raise TokenMapError(
            f"no text found in {', '.join(map(str, paths))} (roles: {', '.join(roles)}); "
            "give files with text or with messages of these roles"
        )


def read_texts(path: str | Path, roles: Sequence[str] = ("assistant",)) -> Iterator[str]:
    """Yield the documents of one file, in order."""
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
        f"{where}: no text field among {', '.join(map(str, row)) or '(none)'}; "
        f"expected one of {', '.join(TEXT_FIELDS)} or a list under {' or '.join(MESSAGE_FIELDS)}"
    )


def _turns(messages: list[Any], roles: Sequence[str], where: str) -> Iterator[str]:
    for message in messages:
        message = _object(message, f"{where}: a message")
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if not isinstance(role, str) or not isinstance(content, (str, type(None))):
            raise TokenMapError(f"{where}: message has keys {sorted(message)}; expected role and content as strings")
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
    """Yield (file:line, object) from a .jsonl file, or (file row N, object) from a .json file that holds one list."""
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
            f"{path} is one JSON {type(rows).__name__}; expected a list of rows, or a .jsonl file with one row per line"
        )
    for index, row in enumerate(rows):
        yield f"{path} row {index}", _object(row, f"{path} row {index}")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TokenMapError(f"{where} is not valid JSON ({error.msg}); repair or remove it") from error


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise TokenMapError(f"{where} is a JSON {type(row).__name__}; expected an object")
    return row


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if not path.is_file():
        raise TokenMapError(f"{path} is not a file; expected a text, .json or .jsonl file, gzipped or not")
    try:
        with _open(path) as handle:
            yield from enumerate(handle, start=1)
    except (*GZIP_ERRORS, UnicodeDecodeError) as error:
        raise TokenMapError(
            f"{path} cannot be read as UTF-8 text ({error}); it is damaged or has another format, replace it"
        ) from error


def _open(path: Path) -> TextIO:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
