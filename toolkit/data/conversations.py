"""Read conversations from ShareGPT and OpenAI-messages files, MT-bench prompts, plain prompts, and hub datasets.

A row has one of these forms:
    {"conversations": [{"from": "human" | "gpt" | "system", "value": ...}, ...]}      ShareGPT
    {"messages": [{"role": "user" | "assistant" | "system", "content": ...}, ...]}    OpenAI
    {"turns": ["first user turn", ...]}                                               MT-bench
    {"prompt": "..."}                                                                 a user turn
    {"text": "..."}                                                                   what a base model continues
"""

from __future__ import annotations

import itertools
import json
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.chat_rows import ROLES, encodable, read_message
from toolkit.data.chat_template import Message
from toolkit.data.dataset_rows import HUB, Row, dataset_name, load_rows, streamed_rows, valid_rows
from toolkit.jsonl import DataError, StoredRows, read_placed_rows
from toolkit.log import get_logger
from toolkit.weights import atomic_write

logger = get_logger(__name__)

FORMS = ("conversations", "messages", "turns", "prompt", "text")


@dataclass(frozen=True)
class Conversation:
    """An id, unique within one read, and the messages: an optional system message first, at least one user message.

    is_text: the message is a plain text to continue."""

    id: str
    messages: tuple[Message, ...]
    is_text: bool = False


class Conversations(Sequence[Conversation]):
    """Conversations whose ids are in memory, and whose messages are read on access."""

    def __init__(self, ids: Sequence[str], read: Callable[[int], Conversation]) -> None:
        self.ids, self._read = ids, read

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Conversation:  # type: ignore[override]  # no slices
        return replace(self._read(index), id=self.ids[index])


def read_conversations(
    source: str | Path | Sequence[str | Path], limit: int | None = None, seed: int | None = None
) -> Conversations:
    """Read the conversations of one or more sources.

    A source is a .jsonl, .jsonl.gz, .json or .json.gz file, a directory that `datasets` can load, or
    `hub:org/name[/config][:split]` (split "train" by default; a local path works like org/name).
    `limit` takes the first conversations, or a random sample when `seed` is given. Several sources are interleaved.
    Repeated ids get a number (`id#2`). Raises `DataError` with file:line for a row of a file that is no conversation.
    Such rows of a dataset are skipped and counted in a warning, since users cannot correct them.

    Memory: the id and about 50 bytes per conversation for .jsonl files and datasets on disk, and as much again during
    the call (16 bytes per row of the file while a sample is drawn; rows outside the sample are not checked). Messages
    stay in memory for sources without random access: .gz and .json files (.json is read at once), and datasets with a
    limit.
    """
    sources = [source] if isinstance(source, str | Path) else list(source)
    each = [_read_one(str(one), limit, seed) for one in sources]
    longest = max(map(len, each), default=0)
    turns = ((one, at) for at in range(longest) for one, read in enumerate(each) if at < len(read))
    source_of, place = array("I"), array("q")
    for one, at in itertools.islice(turns, limit):
        source_of.append(one)
        place.append(at)
    if not place:
        raise DataError(
            f"no conversations in {', '.join(map(str, sources)) or 'an empty list of sources'}; "
            "give at least one source with a conversation"
        )
    ids = _unique([each[one].ids[at] for one, at in zip(source_of, place, strict=True)])
    return Conversations(ids, lambda index: each[source_of[index]][place[index]])


def user_turns(conversation: Conversation) -> Conversation:
    """Return the conversation without its answers: the system message, if any, and the user messages."""
    asked = tuple(message for message in conversation.messages if message["role"] != "assistant")
    return Conversation(conversation.id, asked)


def write_conversations(
    path: str | Path, conversations: Iterable[Conversation], provenance: Mapping[str, Mapping[str, Any]] | None = None
) -> int:
    """Write rows {"id", "messages", "provenance"} atomically; `provenance` is given by id. Return the row count."""
    known = provenance or {}
    count = 0
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as handle:
        for one in conversations:
            row = {"id": one.id, "messages": list(one.messages), "provenance": dict(known.get(one.id, {}))}
            handle.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def conversation_from_row(row: Mapping[str, Any], where: str, default_id: str) -> Conversation:
    """Parse one row of any of these forms. Raises `DataError` that begins with `where`."""
    form = next((name for name in FORMS if row.get(name) is not None), None)
    if form is None:
        raise DataError(f"{where}: keys are {', '.join(map(str, row)) or '(none)'}; expected one of {', '.join(FORMS)}")
    value = row[form]
    if form in ("prompt", "text") and isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        raise DataError(f"{where}: {form!r} is a {type(value).__name__}; expected a list")
    if form == "turns" or all(isinstance(entry, str) for entry in value):
        value = [{"role": "user", "content": entry} for entry in value]
    messages = tuple(_message(entry, f"{where}, {form}[{at}]") for at, entry in enumerate(value))
    if not any(message["role"] == "user" for message in messages):
        raise DataError(f"{where}: none of the {len(messages)} messages is a user message; at least one is required")
    if any(message["role"] == "system" for message in messages[1:]):
        raise DataError(f"{where}: a system message follows other messages; it must be the first message")
    return Conversation(encodable(_id(row, default_id), f"{where}: the id"), messages, form == "text")


def _message(entry: Any, where: str) -> Message:
    role, content = read_message(entry, where)
    if role not in ROLES:
        raise DataError(f"{where}: role is {role!r}; expected one of {', '.join(ROLES)}")
    if content is None:
        raise DataError(f"{where}: content is missing; expected a string")
    if ROLES[role] == "user" and not content.strip():
        raise DataError(f"{where}: the user message is empty; remove the row or fill in the message")
    return {"role": ROLES[role], "content": content}


def _id(row: Mapping[str, Any], default_id: str) -> str:
    given = row.get("id", row.get("conversation_id"))
    if given is not None:
        return str(given)
    # MT-bench question numbers repeat between files.
    return f"{default_id.rsplit('-', 1)[0]}-{row['question_id']}" if row.get("question_id") is not None else default_id


def _read_one(source: str, limit: int | None, seed: int | None) -> Conversations:
    """Read at most `limit` conversations of one source: the first ones, or a sample when `seed` is given."""
    path = Path(source)
    if source.startswith(HUB) or path.is_dir():
        return _from_dataset(source, limit, seed)
    name = path.name.split(".")[0]
    if path.is_file() and not {".json", ".jsonl"} & set(path.suffixes):
        raise DataError(f"{path} has another format; expected .jsonl, .jsonl.gz, .json, a directory or hub:org/name")
    if ".json" in path.suffixes or path.suffix == ".gz":
        return _in_memory(name, lambda: read_placed_rows(path), limit, seed)
    rows = StoredRows(path, limit if seed is None else None)
    chosen = _chosen(len(rows), limit, seed)
    rows.keep(chosen)

    def read(at: int) -> Conversation:
        return conversation_from_row(rows[at], rows.where(at), f"{name}-{chosen[at]}")

    return Conversations([read(at).id for at in range(len(chosen))], read)  # also reports invalid rows at once


def _chosen(count: int, limit: int | None, seed: int | None) -> Sequence[int]:
    """Return the indices of the rows to take out of `count`, ascending."""
    if limit is None or limit >= count:
        return range(count)
    return range(limit) if seed is None else sorted(random.Random(f"conversations {seed}").sample(range(count), limit))


def _in_memory(name: str, rows: Callable[[], Iterable[Row]], limit: int | None, seed: int | None) -> Conversations:
    """Read conversations from rows without random access. `rows` starts again at each call; a sample counts first."""
    chosen = None if limit is None or seed is None else set(_chosen(sum(1 for _ in rows()), limit, seed))
    taken = ((at, row) for at, row in enumerate(rows()) if chosen is None or at in chosen)
    kept = [conversation_from_row(row, where, f"{name}-{at}") for at, (where, row) in itertools.islice(taken, limit)]
    return Conversations([one.id for one in kept], kept.__getitem__)


def _from_dataset(source: str, limit: int | None, seed: int | None) -> Conversations:
    """Read conversations of a hub dataset or of a local directory: all on access, or `limit` of them at once."""
    name = Path(dataset_name(source)).name
    rows = load_rows(source, limit is not None, None if limit is None else seed)

    def parse(one: tuple[int, Row]) -> Conversation:
        at, (where, row) = one
        return conversation_from_row(row, where, f"{name}-{at}")

    places, ids = array("q"), []
    with closing(valid_rows(source, enumerate(streamed_rows(source, rows)), parse, "conversation")) as found:
        if limit is not None:
            kept = [one for _, one in itertools.islice(found, limit)]
            return Conversations([one.id for one in kept], kept.__getitem__)
        for (at, _), one in found:
            places.append(at)
            ids.append(one.id)

    def read(index: int) -> Conversation:
        return conversation_from_row(rows[places[index]], f"{source} row {places[index]}", ids[index])

    return Conversations(ids, read)


def _unique(ids: list[str]) -> list[str]:
    taken: set[str] = set()
    renamed = 0
    for at, one in enumerate(ids):
        name, number = one, 1
        while name in taken:
            number += 1
            name = f"{one}#{number}"
        taken.add(name)
        renamed += name != one
        ids[at] = name
    if renamed:
        logger.warning(f"{renamed} of {len(ids)} conversations had a repeated id; a number was appended to it")
    return ids
