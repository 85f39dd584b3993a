"""A chat session: a conversation with one engine in one thread. Answers are shown piece by piece."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from toolkit.infer.load.answer import Answer, events_of_answer
from toolkit.infer.request.chat_prompt import ChatPromptError, chat_ids, require_chat_template
from toolkit.infer.request.detokenize import Detokenizer
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import AcceptanceStats, PromptTooLongError, Request, Update, summarise

# Plain steps that are timed: at most so many or those of so many seconds, at least 3. The first of a process are slow.
TIMED_STEPS, TIMED_SECONDS, LEAST_STEPS, SLOW_STEPS = 12, 2.0, 3, 2


class ChatSessionError(ValueError):
    """A turn cannot be answered. The conversation does not change."""


@dataclass(frozen=True)
class Exchange:
    """One turn. decode_s: seconds from the answer's first token to its last. stats: the acceptance statistics."""

    text: str
    answer: Answer
    decode_s: float
    stats: AcceptanceStats

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second after the first one, which comes with the prompt; None for an answer of one token."""
        return tokens_per_s(self.answer.n_tokens, self.decode_s)


def tokens_per_s(n_tokens: int, decode_s: float) -> float | None:
    """Speed of an answer so far. decode_s: seconds since its first token. None below two tokens."""
    return (n_tokens - 1) / decode_s if n_tokens > 1 and decode_s > 0 else None


class ChatSession:
    """Keeps the messages and steps the engine. No other code may step the engine during `ask`."""

    def __init__(
        self,
        engine: Any,
        tokenizer: Any,
        *,
        context_length: int,
        system: str | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        max_tokens: int = 512,
        seed: int | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._context_length = context_length
        self._start = [{"role": "system", "content": system}] if system is not None else []
        self.messages = list(self._start)
        try:
            require_chat_template(tokenizer)
            self._params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
        except ValueError as error:
            raise ChatSessionError(str(error)) from error

    def reset(self) -> None:
        """Remove all messages except the system message."""
        self.messages = list(self._start)

    def plain_tokens_per_s(self) -> float | None:
        """Measure the speed of plain decoding: write a few tokens without drafts, outside of the conversation.

        None if the chat template rejects a greeting, or the context is too short for one.
        """
        params = SamplingParams(max_tokens=TIMED_STEPS + SLOW_STEPS + 1, ignore_eos=True)
        try:
            ids = chat_ids(self._tokenizer, [*self._start, {"role": "user", "content": "Hello"}])
            request = self._engine.add_request(ids, params, speculative=False)
        except (ChatPromptError, PromptTooLongError):
            return None
        seconds: list[float] = []
        while not request.finished:
            written, began = len(request.output_ids), time.perf_counter()
            self._engine.step()
            if written:  # the first token comes with the prompt
                seconds.append(time.perf_counter() - began)
            if sum(seconds) > TIMED_SECONDS and len(seconds) >= SLOW_STEPS + LEAST_STEPS:
                self._engine.abort(request)
        return 1 / median(seconds[SLOW_STEPS:]) if len(seconds) >= SLOW_STEPS + LEAST_STEPS else None

    def ask(
        self,
        text: str,
        show: Callable[[str, bool], None],
        interrupted: Callable[[], bool],
        on_step: Callable[[Request], None] | None = None,
    ) -> Exchange:
        """Answer `text`. Call show(piece, from_draft) for each new piece; stop if interrupted() between steps.

        on_step: called after each step. The conversation keeps the shown part of a stopped answer.
        Raises ChatSessionError.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        request = self._submit(messages)
        answer = Answer(self._detokenizer.stream())
        written: list[str] = []
        sent = 0
        try:
            while answer.finish_reason is None:
                if interrupted():
                    self._engine.abort(request)
                else:
                    self._engine.step()
                update = Update.since(request, sent)
                sent += len(update.token_ids)
                for piece, from_draft in answer.feed_pieces(update):
                    written.append(piece)
                    show(piece, from_draft)
                if on_step is not None:
                    on_step(request)
        finally:
            if request.finish_reason is None:  # show() raised, e.g. into a closed pipe
                self._engine.abort(request)
        whole = "".join(written)
        self.messages = [*messages, {"role": "assistant", "content": whole}]
        stats = summarise(events_of_answer(request.events, answer.n_tokens))
        decode_s = 0.0
        if request.first_token_at is not None and request.finished_at is not None:
            decode_s = request.finished_at - request.first_token_at
        return Exchange(whole, answer, decode_s, stats)

    def _submit(self, messages: list[dict[str, str]]) -> Request:
        try:
            ids = chat_ids(self._tokenizer, messages)
        except ChatPromptError as error:
            raise ChatSessionError(str(error)) from error
        if len(ids) >= self._context_length:
            raise ChatSessionError(
                f"the conversation has {len(ids)} tokens and the model's context is {self._context_length}; "
                "/reset starts a new one"
            )
        return self._engine.add_request(ids, self._params)
