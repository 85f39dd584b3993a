"""Prompts to measure on: a file in MT-bench's field style, or the forty built-in ones.

One JSON object a line: `{"question_id": 7, "category": "math", "turns": ["first user turn", "second user turn"]}`.
Other keys (`reference`, ...) may be there and are not used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

BUILTIN = "built-in"
BUILTIN_FILE = "builtin_prompts.jsonl"


class PromptsError(ValueError):
    """A prompts file is absent, empty, or holds a row that is no prompt."""


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer turn by turn. `task` is the file's `category`."""

    question_id: str
    task: str
    turns: tuple[str, ...]


def builtin_prompts() -> list[Prompt]:
    """The forty prompts that come with the package: five of each of eight kinds of task."""
    text = resources.files("toolkit.bench").joinpath(BUILTIN_FILE).read_text(encoding="utf-8")
    return _parse(text, BUILTIN_FILE, default_task="builtin")


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompts file. A row whose category is empty or absent belongs to the task named like the file.

    Raises `PromptsError` with file:line for a row that cannot be used, and when there is no row at all.
    """
    path = Path(path)
    if not path.is_file():
        raise PromptsError(
            f"{path} is not a file; give a .jsonl file with question_id, category and turns in each line"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PromptsError(f"{path} is not UTF-8 text ({error}); a plain .jsonl file is needed") from error
    return _parse(text, str(path), default_task=path.stem)


def read_prompt_files(paths: Sequence[str | Path]) -> list[Prompt]:
    """One file as `read_prompts` reads it; of several files each is a task of its own, whatever categories it has.

    A task is named like its file, or like the folder where files of one name lie in several. Raises `PromptsError`.
    """
    if len(paths) == 1:
        return read_prompts(paths[0])
    files = [Path(path) for path in paths]
    stems = [file.stem for file in files]
    names = [
        stem if stems.count(stem) == 1 else file.resolve().parent.name for file, stem in zip(files, stems, strict=True)
    ]
    if len(set(names)) < len(names):
        raise PromptsError(f"two of the files {', '.join(map(str, files))} would be one task; give them other names")
    return [
        Prompt(f"{name}/{prompt.question_id}", name, prompt.turns)
        for name, file in zip(names, files, strict=True)
        for prompt in read_prompts(file)
    ]


def limited(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """At most `limit` prompts, taken in turn from each task, so that a short run still sees every kind.

    The order of the file is kept. None means all. Raises `PromptsError` when `limit` is below 1.
    """
    if limit is None or limit >= len(prompts):
        return list(prompts)
    if limit < 1:
        raise PromptsError(f"limit is {limit}; at least 1 prompt is needed")
    rank: dict[str, int] = {}
    rounds = []
    for index, prompt in enumerate(prompts):
        rank[prompt.task] = rank.get(prompt.task, -1) + 1
        rounds.append((rank[prompt.task], index))
    chosen = sorted(index for _, index in sorted(rounds)[:limit])
    return [prompts[index] for index in chosen]


def _parse(text: str, where: str, default_task: str) -> list[Prompt]:
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    # Only "\n" ends a row: JSON strings may hold U+2028 and its like, at which str.splitlines would cut.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        prompt = _row(line, f"{where}:{number}", default_task)
        if prompt.question_id in seen:
            raise PromptsError(
                f"{where}:{number}: question_id {prompt.question_id} was already used in line "
                f"{seen[prompt.question_id]}; give each prompt an id of its own"
            )
        seen[prompt.question_id] = number
        prompts.append(prompt)
    if not prompts:
        raise PromptsError(f"{where} has no rows; at least one prompt is needed")
    return prompts


def _row(line: str, where: str, default_task: str) -> Prompt:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptsError(f"{where}: not valid JSON ({error}); one JSON object a line is needed") from error
    if not isinstance(row, dict):
        raise PromptsError(
            f"{where}: a JSON {type(row).__name__} came; an object with question_id, category and turns is needed"
        )
    if (
        "question_id" not in row
        or not isinstance(row["question_id"], int | str)
        or isinstance(row["question_id"], bool)
    ):
        raise PromptsError(f"{where}: question_id must be a number or a string, not {row.get('question_id')!r}")
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        raise PromptsError(f'{where}: turns must be a list of user turns, not {turns!r}; write "turns": ["..."]')
    for index, turn in enumerate(turns):
        if not isinstance(turn, str) or not turn.strip():
            raise PromptsError(f"{where}: turn {index} must be a non-empty string, not {turn!r}")
    category = row.get("category", "")
    if category is not None and not isinstance(category, str):
        raise PromptsError(f"{where}: category must be a string, not {category!r}")
    return Prompt(question_id=str(row["question_id"]), task=category or default_task, turns=tuple(turns))
