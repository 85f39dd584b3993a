"""Read the token ids to count: response ids of rollouts, or text and JSON files encoded by a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from toolkit.chat_roles import ROLES
from toolkit.jsonl import read_lines, read_placed_rows
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
    for where, row in read_placed_rows(path):
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
) -> Iterator[Sequence[int]]:
    """Yield the ids of each document in text files (.txt, .md, other) and .jsonl or .json files, gzipped or not.

    `encode` must add no special tokens. In a row with messages, each turn of `roles` is a document; in other rows the
    text field is. Memory: one document or row; a .json file is read at once.
    Raises `TokenMapError` with file and line for a row without messages or text, and when no document is found, and
    `DataError` for a file that cannot be read.
    """
    empty = True
    for path in paths:
        for text in read_texts(path, roles):
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
        for where, row in read_placed_rows(path):
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
        if not isinstance(message, dict):
            raise TokenMapError(f"{where}: a message is a {type(message).__name__}; expected an object")
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if not isinstance(role, str) or not isinstance(content, (str, type(None))):
            raise TokenMapError(f"{where}: message has keys {sorted(message)}; expected role and content as strings")
        if content and ROLES.get(role, role) in roles:
            yield content


def _pieces(path: Path) -> Iterator[str]:
    lines: list[str] = []
    size = 0
    for _, line in read_lines(path):
        lines.append(line)
        size += len(line)
        if size >= TEXT_CHARACTERS:
            yield "".join(lines)
            lines, size = [], 0
    if size:
        yield "".join(lines)
