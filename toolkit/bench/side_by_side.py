"""Time plain and speculative decoding of the same prompts in one run, interleaved.

Each group of prompts is decoded by every mode in turn, and the first mode rotates from group to group:

    group 0   plain   chain   tree         If the machine becomes slower (heat, another user), it slows
    group 1   chain   tree    plain        all modes alike, so that their ratio stays.
    group 2   tree    plain   chain

In every mode, turn n + 1 of a conversation follows plain decoding's answer to turn n. So all modes decode the same
prompts even if 16-bit rounding makes their answers differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from toolkit.bench.answers import LoggedAnswer, Question, ResumeLog, Round, Sampling
from toolkit.bench.prompts import Prompt
from toolkit.data.chat_template import prompt_ids
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import ADAPTIVE, PLAIN, DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import PromptTooLongError, Request

WARMUP_TOKENS = 16
Progress = Callable[[int, int], None]
AnyMode = TypeVar("AnyMode")


class BenchError(ValueError):
    """A measurement cannot be made with these prompts, shapes or this target."""


@dataclass(frozen=True)
class Mode:
    """Plain decoding (no shape), or speculative decoding with a shape or at most that shape, and its engine.

    adaptive: the engine chooses in every step. It learns from step to step, so it runs no other mode. label: the name;
    None: that of the shape.
    """

    engine: Engine
    shape: DraftShape | None
    adaptive: bool = False
    label: str | None = None

    @property
    def name(self) -> str:
        if self.label is not None:
            return self.label
        if self.adaptive:
            return ADAPTIVE
        return PLAIN if self.shape is None else self.shape.name


def run_side_by_side(
    modes: Sequence[Mode],
    tokenizer: Any,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    batch: int = 1,
    warmup: int = 1,
    keep: ResumeLog | None = None,
    on_progress: Progress | None = None,
) -> list[Round]:
    """Answer every turn of `prompts` in every mode, `batch` conversations at a time.

    `warmup` prompts are decoded in every mode first, and are not in the result. Groups stored in `keep` are not decoded
    again. `on_progress(done, total)` counts answers over all modes. Raises `BenchError` for a prompt that is too long
    for the target, `ChatTemplateError` for one that the chat template rejects.
    """
    kept = {} if keep is None else keep.read(prompts, sampling)
    groups = range(0, len(prompts), batch)
    if len(kept) < len(groups):
        _warm_up(modes, tokenizer, prompts[:warmup], sampling)
    total, done = sum(len(prompt.turns) for prompt in prompts) * len(modes), 0
    rounds: list[Round] = []
    place = 0
    for start in groups:
        group = prompts[start : start + batch]
        found = kept.get(start)
        if found is None:
            found = []
            for fresh in _answer_group(modes, tokenizer, group, sampling, place):
                found.append(fresh)
                if on_progress is not None:
                    on_progress(done + sum(len(one.answers) for one in found), total)
            if keep is not None:
                keep.append(start, found)
        rounds += found
        done += sum(len(one.answers) for one in found)
        place += max(len(prompt.turns) for prompt in group)
    return rounds


def _warm_up(modes: Sequence[Mode], tokenizer: Any, prompts: Sequence[Prompt], sampling: Sampling) -> None:
    for prompt in prompts:
        ids = tuple(prompt_ids(tokenizer, [*_system(prompt), _user(prompt.turns[0])]))
        for mode in modes:
            _answer(mode, [Question(prompt, 0, ids, sampling.params(prompt, 0))], limit=WARMUP_TOKENS)


def _answer_group(
    modes: Sequence[Mode], tokenizer: Any, group: Sequence[Prompt], sampling: Sampling, place: int
) -> Iterator[Round]:
    """Answer all turns of a group in every mode. `place` is the number of earlier turns, which sets the mode order."""
    histories = {prompt.question_id: _system(prompt) for prompt in group}
    for turn in range(max(len(prompt.turns) for prompt in group)):
        questions = []
        for prompt in (prompt for prompt in group if turn < len(prompt.turns)):
            history = histories[prompt.question_id]
            history.append(_user(prompt.turns[turn]))
            ids = tuple(prompt_ids(tokenizer, history))
            questions.append(Question(prompt, turn, ids, sampling.params(prompt, turn)))
        for mode in rotated(modes, place + turn):
            done = _answer(mode, questions)
            yield done
            for answer in done.answers if mode.name == PLAIN else ():
                text = tokenizer.decode(list(answer.output_ids), skip_special_tokens=True)
                histories[answer.question.prompt.question_id].append({"role": "assistant", "content": text})


def rotated(modes: Sequence[AnyMode], place: int) -> list[AnyMode]:
    """Return the order of the modes for group number `place`."""
    first = place % len(modes)
    return [*modes[first:], *modes[:first]]


def _system(prompt: Prompt) -> list[dict[str, str]]:
    return [] if prompt.system is None else [{"role": "system", "content": prompt.system}]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _answer(mode: Mode, questions: Sequence[Question], limit: int | None = None) -> Round:
    """Decode `questions` together in one mode, timing each engine step."""
    engine = mode.engine
    if mode.shape is not None and not mode.adaptive:
        engine.set_shape(mode.shape)
    requests: list[Request] = []
    clock = time.perf_counter()
    for question in questions:
        params = question.params
        if limit is not None:
            params = SamplingParams(params.temperature, seed=params.seed, max_tokens=min(limit, params.max_tokens))
        try:
            requests.append(engine.add_request(question.prompt_ids, params, speculative=mode.shape is not None))
        except PromptTooLongError as error:
            raise BenchError(f"prompt {question.prompt.question_id}, turn {question.turn}: {error}") from error
    prefill_s = decode_s = 0.0
    while engine.has_work():
        fresh = [request for request in requests if not request.output_ids]
        engine.step()
        now = time.perf_counter()
        # A step prefills waiting prompts before it decodes, so its last first token separates the two phases.
        first = max((request.first_token_at for request in fresh if request.first_token_at is not None), default=clock)
        prefill_s += first - clock
        decode_s += now - first
        clock = now
    decode_tokens = sum(len(request.output_ids) - 1 for request in requests)
    answers = tuple(
        LoggedAnswer(question, tuple(request.output_ids), tuple(request.events))
        for question, request in zip(questions, requests, strict=True)
    )
    return Round(mode.name, answers, prefill_s, decode_s, decode_tokens)
