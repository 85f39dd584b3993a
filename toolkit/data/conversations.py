"""Conversations from ShareGPT and OpenAI-messages files, MT-bench prompts, plain prompts, and hub datasets.

A row is one of
    {"conversations": [{"from": "human" | "gpt" | "system", "value": ...}, ...]}      ShareGPT
    {"messages": [{"role": "user" | "assistant" | "system", "content": ...}, ...]}    OpenAI
    {"turns": ["first user turn", ...]}                                               MT-bench
    {"prompt": "..."}
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.chat_roles import ROLES
from toolkit.data.chat_template import Message
from toolkit.jsonl import GZIP_ERRORS, DataError, read_rows
from toolkit.log import get_logger
from toolkit.weights import atomic_write

logger = get_logger(__name__)

HUB = "hub:"
# A streamed dataset is shuffled within a window of this many rows.
SHUFFLE_WINDOW = 10_000


@dataclass(frozen=True)
class Conversation:
    """An id, unique among those read together, and the messages: perhaps a system one first, at least one user's."""

    id: str
    messages: tuple[Message, ...]


def read_conversations(
    source: str | Path | Sequence[str | Path], limit: int | None = None, seed: int | None = None
) -> list[Conversation]:
    """Conversations of one source or several.

    A source is a .jsonl, .jsonl.gz, .json or .json.gz file, a directory that `datasets` can load (or wrote with
    `save_to_disk`), or `hub:org/name[:split]` (split "train" by default; a local path in place of org/name works too).
    `limit` takes the first ones, or a sample drawn with `seed` when one is given; several sources take turns.
    Ids met a second time get a number (`id#2`). Raises `DataError` naming file:line, what came and what is needed.
    """
    sources = [source] if isinstance(source, str | Path) else list(source)
    if limit is not None and limit < 1:
        raise DataError(f"limit {limit} came; at least 1 conversation is needed (or no limit)")
    each = [_read_one(str(one), limit, seed) for one in sources]
    turns = (conversation for row in itertools.zip_longest(*each) for conversation in row if conversation is not None)
    chosen = list(itertools.islice(turns, limit))
    if not chosen:
        raise DataError(f"no conversations in {', '.join(map(str, sources)) or 'an empty list of sources'}")
    return _with_unique_ids(chosen)


def user_turns(conversation: Conversation) -> Conversation:
    """The conversation without its answers: the system message, if any, and the user's messages."""
    asked = tuple(message for message in conversation.messages if message["role"] != "assistant")
    return Conversation(conversation.id, asked)


def write_conversations(
    path: str | Path, conversations: Iterable[Conversation], provenance: Mapping[str, Mapping[str, Any]] | None = None
) -> int:
    """Write {"id", "messages", "provenance"} rows atomically; `provenance` maps ids. Returns the number of rows."""
    known = provenance or {}
    count = 0
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as handle:
        for one in conversations:
            row = {"id": one.id, "messages": list(one.messages), "provenance": dict(known.get(one.id, {}))}
            handle.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def conversation_from_row(row: Mapping[str, Any], where: str, default_id: str) -> Conversation:
    """One row of any of the four forms. Raises `DataError` beginning with `where`."""
    form = next((name for name in ("conversations", "messages", "turns", "prompt") if row.get(name) is not None), None)
    if form is None:
        raise DataError(
            f"{where}: keys {', '.join(map(str, row)) or '(none)'} came; "
            "one of conversations, messages, turns or prompt is needed"
        )
    value = row[form]
    if form == "prompt" and isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        raise DataError(f"{where}: {form!r} holds a {type(value).__name__}; a list is needed")
    if form == "turns" or all(isinstance(entry, str) for entry in value):
        value = [{"role": "user", "content": entry} for entry in value]
    messages = tuple(_message(entry, f"{where}, {form}[{at}]") for at, entry in enumerate(value))
    if not any(message["role"] == "user" for message in messages):
        raise DataError(f"{where}: no message of the user among {len(messages)}; at least one is needed")
    if any(message["role"] == "system" for message in messages[1:]):
        raise DataError(f"{where}: a system message comes after others; it must be the first")
    return Conversation(_id(row, default_id), messages)


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, Mapping):
        raise DataError(f"{where}: a {type(entry).__name__} came; an object with role and content is needed")
    role = entry.get("from", entry.get("role"))
    content = entry.get("value", entry.get("content"))
    if role not in ROLES:
        raise DataError(f"{where}: role {role!r} came; one of {', '.join(ROLES)} is needed")
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content]
        if any(kind != "text" for kind in kinds):
            raise DataError(f"{where}: content parts of types {kinds} came; only text is supported")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise DataError(f"{where}: content is a {type(content).__name__}; text is needed")
    if ROLES[role] == "user" and not content.strip():
        raise DataError(f"{where}: the user's message is empty; remove the row or write the message")
    return {"role": ROLES[role], "content": content}


def _id(row: Mapping[str, Any], default_id: str) -> str:
    given = row.get("id", row.get("conversation_id"))
    if given is not None:
        return str(given)
    # A question's number alone would collide between files.
    return f"{default_id.rsplit('-', 1)[0]}-{row['question_id']}" if row.get("question_id") is not None else default_id


def _read_one(source: str, limit: int | None, seed: int | None) -> list[Conversation]:
    """At most `limit` conversations of one source: the first, or a sample when there is a seed."""
    if source.startswith(HUB) or Path(source).is_dir():
        name, rows = _dataset_rows(source, limit, seed)
    else:
        path = Path(source)
        name = path.name.split(".")[0]
        rows = _json_list(path) if ".json" in path.suffixes else _json_lines(path)
    read = (conversation_from_row(row, where, f"{name}-{at}") for at, (where, row) in enumerate(rows))
    if limit is None or seed is None:
        return list(itertools.islice(read, limit))
    everything = list(read)
    order = random.Random(f"conversations {seed}").sample(range(len(everything)), min(limit, len(everything)))
    return [everything[index] for index in sorted(order)]


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.is_file() and ".jsonl" not in path.suffixes:
        raise DataError(f"{path} came; a .jsonl, .jsonl.gz, .json, a directory or hub:org/name is needed")
    return ((f"{path}:{number}", row) for number, row in read_rows(path))


def _json_list(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        raise DataError(f"{path} does not exist; a .json file with a list of conversations is needed there")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except GZIP_ERRORS as error:
        raise DataError(f"{path}: {error}; a whole gzip file is needed, copy the file again") from error
    try:
        rows = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        line = getattr(error, "lineno", 1)
        raise DataError(
            f"{path}:{line}: not valid JSON ({error}); a list is needed (name a file of one object per line .jsonl)"
        ) from error
    if not isinstance(rows, list):
        raise DataError(f"{path}:1: a {type(rows).__name__} came; a list of conversations is needed")
    for at, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{path}[{at}]: a {type(row).__name__} came; an object is needed")
        yield f"{path}[{at}]", row


def _dataset_rows(source: str, limit: int | None, seed: int | None) -> tuple[str, Iterator[tuple[str, dict[str, Any]]]]:
    """(short name, rows) of a hub dataset, streamed when there is a limit, or of a local directory."""
    import datasets  # seconds to import, and only this source needs it

    name, _, split = source.removeprefix(HUB).partition(":")
    split = split or "train"
    folder = Path(name)
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(name)
            rows = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            rows = datasets.load_dataset(name, split=split, streaming=limit is not None)
            if limit is not None and seed is not None:
                rows = rows.shuffle(seed=seed, buffer_size=SHUFFLE_WINDOW)
    except _loading_errors() as error:
        raise DataError(
            f"{source}: split {split!r} of {name!r} cannot be loaded ({type(error).__name__}: {error}); "
            "check the name, the split and the network"
        ) from error
    if isinstance(rows, datasets.IterableDataset):
        rows = rows.take(limit)
    return folder.name, _rows_while_read(source, rows)


def _rows_while_read(source: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A streamed dataset is fetched while it is read: the network, or a file of it, may fail in any row."""
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


def _with_unique_ids(conversations: list[Conversation]) -> list[Conversation]:
    taken: set[str] = set()
    result: list[Conversation] = []
    for one in conversations:
        name, number = one.id, 1
        while name in taken:
            number += 1
            name = f"{one.id}#{number}"
        taken.add(name)
        result.append(one if name == one.id else Conversation(name, one.messages))
    renamed = sum(a is not b for a, b in zip(conversations, result, strict=True))
    if renamed:
        logger.warning(f"{renamed} of {len(result)} conversations had an id met before; they got a number behind it")
    return result
