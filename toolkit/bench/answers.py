"""Data of a measurement: questions, answers with their verify steps, rounds with their times, and their file.

A killed measurement resumes from the finished groups in the file. Their times stay valid, since all modes answered a
group side by side under the same conditions.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from toolkit.bench.prompts import Prompt
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import VerifyEvent
from toolkit.jsonl import RowAppender, cut_torn_line, read_rows
from toolkit.log import get_logger
from toolkit.weights import sha256_json

logger = get_logger(__name__)


@dataclass(frozen=True)
class Question:
    """One rendered turn of one conversation."""

    prompt: Prompt
    turn: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class LoggedAnswer:
    """One mode's answer to one question, with its verify steps."""

    question: Question
    output_ids: tuple[int, ...]
    events: tuple[VerifyEvent, ...]


@dataclass(frozen=True)
class Round:
    """One mode's answers to a group of questions that were decoded together.

    prefill_s: seconds until the first token of each answer. decode_s: all other seconds. decode_tokens: the tokens
    written in decode_s, that is all but the first token of each answer.
    """

    mode: str
    answers: tuple[LoggedAnswer, ...]
    prefill_s: float
    decode_s: float
    decode_tokens: int


@dataclass(frozen=True)
class Sampling:
    """Sampling settings that are the same for every question."""

    max_tokens: int
    temperature: float
    seed: int

    def params(self, prompt: Prompt, turn: int) -> SamplingParams:
        """Return the parameters of one question. The seed differs between questions and is equal for all modes."""
        seed = zlib.crc32(f"{self.seed}/{prompt.question_id}/{turn}".encode())
        return SamplingParams(temperature=self.temperature, seed=seed, max_tokens=self.max_tokens)


class ResumeLog:
    """The stored groups of one measurement: one JSON object per line, first a hash of its settings, then each group.

    made_of: everything that determines its rows (settings, models, machine, versions). A file of another measurement is
    deleted and started again.
    """

    def __init__(self, path: Path, made_of: Mapping[str, Any]) -> None:
        self.path = path
        self._mark = sha256_json(made_of)

    def read(self, prompts: Sequence[Prompt], sampling: Sampling) -> dict[int, list[Round]]:
        """Return the finished groups by the index of their first prompt. Raises `DataError` for a damaged line."""
        if not self.path.is_file():
            return {}
        cut_torn_line(self.path)
        rows = [row for _, row in read_rows(self.path)]
        if not rows or rows[0].get("made_of") != self._mark:
            logger.info("%s has other settings, machine or versions; measuring again from the start", self.path)
            self.path.unlink()
            return {}
        by_id = {prompt.question_id: prompt for prompt in prompts}
        return {row["group"]: [_round(one, by_id, sampling) for one in row["rounds"]] for row in rows[1:]}

    def append(self, group: int, rounds: Sequence[Round]) -> None:
        """Store a finished group; `group` is the index of its first prompt."""
        fresh = not self.path.is_file()
        with RowAppender(self.path) as rows:
            if fresh:
                rows.append({"made_of": self._mark})
            rows.append({"group": group, "rounds": [_row(done) for done in rounds]})


def _row(done: Round) -> dict[str, Any]:
    answers = [
        {
            "question_id": answer.question.prompt.question_id,
            "turn": answer.question.turn,
            "prompt_ids": list(answer.question.prompt_ids),
            "output_ids": list(answer.output_ids),
            "events": [astuple(event) for event in answer.events],
        }
        for answer in done.answers
    ]
    times = {"prefill_s": done.prefill_s, "decode_s": done.decode_s, "decode_tokens": done.decode_tokens}
    return {"mode": done.mode, **times, "answers": answers}


def _round(row: Mapping[str, Any], prompts: Mapping[str, Prompt], sampling: Sampling) -> Round:
    answers = []
    for kept in row["answers"]:
        prompt, turn = prompts[kept["question_id"]], kept["turn"]
        question = Question(prompt, turn, tuple(kept["prompt_ids"]), sampling.params(prompt, turn))
        events = tuple(VerifyEvent(*event) for event in kept["events"])
        answers.append(LoggedAnswer(question, tuple(kept["output_ids"]), events))
    return Round(row["mode"], tuple(answers), row["prefill_s"], row["decode_s"], row["decode_tokens"])
