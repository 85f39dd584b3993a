"""Benchmark prompts: files in MT-bench's format, files of conversations, or the forty built-in prompts.

One JSON object per line: `{"question_id": 7, "category": "math", "turns": ["first user turn", "second user turn"]}`,
or a conversation (`messages`, or ShareGPT's `conversations`), whose system message and user turns are taken.
Other keys (`reference`, ...) are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.data.conversations import conversation_from_row
from toolkit.jsonl import DataError, read_rows

BUILTIN = "built-in"


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer turn by turn. `task` is the row's `category`. system: the system message, if any."""

    question_id: str
    task: str
    turns: tuple[str, ...]
    system: str | None = None


def builtin_prompts() -> list[Prompt]:
    """Read the forty prompts of the package: five of each of eight kinds of task."""
    return read_prompts(Path(__file__).with_name("builtin_prompts.jsonl"))


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompts file. The task of a row without a category is the name of the file.

    Raises `DataError` with file:line for an invalid row, and for a file without rows.
    """
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, row in read_rows(path):
        where, stem = f"{path}:{number}", Path(path).stem
        prompt = _prompt(row, where, stem, number)
        if prompt.question_id in seen:
            raise DataError(
                f"{path}:{number}: question_id {prompt.question_id} was already used in line "
                f"{seen[prompt.question_id]}; give each prompt its own id"
            )
        seen[prompt.question_id] = number
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{path} has no rows; at least one prompt is required")
    return prompts


def _prompt(row: Mapping[str, Any], where: str, default_task: str, number: int) -> Prompt:
    conversation = conversation_from_row(row, where, f"{default_task}-{number}")
    task = row.get("category") or default_task
    if not isinstance(task, str):
        raise DataError(f"{where}: category is {task!r}; expected a string")
    first = conversation.messages[0]
    system = first["content"] if first["role"] == "system" else None
    turns = tuple(one["content"] for one in conversation.messages if one["role"] == "user")
    identity = row.get("question_id")
    return Prompt(conversation.id if identity is None else str(identity), task, turns, system)


def read_prompt_files(paths: Sequence[str | Path]) -> list[Prompt]:
    """Read one file as `read_prompts` does; of several files, each is one task, and categories are ignored.

    The task has the name of its file, or of its folder when several files have that name. Raises `DataError`.
    """
    if len(paths) == 1:
        return read_prompts(paths[0])
    files = [Path(path) for path in paths]
    stems = [file.stem for file in files]
    names = [
        stem if stems.count(stem) == 1 else file.resolve().parent.name for file, stem in zip(files, stems, strict=True)
    ]
    if len(set(names)) < len(names):
        raise DataError(f"two of the files {', '.join(map(str, files))} would be one task; rename one of them")
    return [
        replace(prompt, question_id=f"{name}/{prompt.question_id}", task=name)
        for name, file in zip(names, files, strict=True)
        for prompt in read_prompts(file)
    ]


def limited(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """Return at most `limit` prompts (None: all), taken evenly from the tasks, in the order of the file."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    rank: dict[str, int] = {}
    rounds = []
    for index, prompt in enumerate(prompts):
        rank[prompt.task] = rank.get(prompt.task, -1) + 1
        rounds.append((rank[prompt.task], index))
    chosen = sorted(index for _, index in sorted(rounds)[:limit])
    return [prompts[index] for index in chosen]
