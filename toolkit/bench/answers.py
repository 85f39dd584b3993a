"""Data of a measurement: questions, answers with their verify steps, and rounds with their times."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from toolkit.bench.prompts import Prompt
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import VerifyEvent

PLAIN = "plain"  # name of the mode without a draft shape


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
