"""What a measurement asks and gets: questions, answers with their logs, and rounds with their times."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from toolkit.bench.prompts import Prompt
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import VerifyEvent

PLAIN = "plain"  # the name of the mode without a draft shape


@dataclass(frozen=True)
class Question:
    """One turn of one conversation, rendered."""

    prompt: Prompt
    turn: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Answer:
    """What one mode wrote to one question, with its log of verify steps."""

    question: Question
    output_ids: tuple[int, ...]
    events: tuple[VerifyEvent, ...]


@dataclass(frozen=True)
class Round:
    """One mode's answers to one group of questions, decoded together.

    prefill_s: seconds of reading the prompts, until their first tokens. decode_s: seconds of everything else, in which
    the decode_tokens, all but the first of each answer, were written.
    """

    mode: str
    answers: tuple[Answer, ...]
    prefill_s: float
    decode_s: float
    decode_tokens: int


@dataclass(frozen=True)
class Sampling:
    """Settings of a measurement that are the same for every question."""

    max_tokens: int
    temperature: float
    seed: int

    def params(self, prompt: Prompt, turn: int) -> SamplingParams:
        """Parameters of one question; every mode gets the same seed, and every question another one."""
        seed = zlib.crc32(f"{self.seed}/{prompt.question_id}/{turn}".encode())
        return SamplingParams(temperature=self.temperature, seed=seed, max_tokens=self.max_tokens)
