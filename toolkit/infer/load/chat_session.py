"""A chat session: a conversation with one engine in one thread. Answers are shown piece by piece."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolkit.infer.engine.engine_thread import Update
from toolkit.infer.load.answer import Answer, events_of_answer
from toolkit.infer.request.acceptance import AcceptanceStats, summarise
from toolkit.infer.request.chat_prompt import ChatPromptError, chat_ids, require_chat_template
from toolkit.infer.request.detokenize import Detokenizer
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request


class ChatSessionError(ValueError):
    """A turn cannot be answered. The conversation does not change."""


@dataclass(frozen=True)
class Exchange:
    """One turn. seconds: for prompt and answer together. stats: the acceptance statistics."""

    text: str
    answer: Answer
    seconds: float
    stats: AcceptanceStats


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

    def ask(self, text: str, show: Callable[[str, bool], None], interrupted: Callable[[], bool]) -> Exchange:
        """Answer `text`. Call show(piece, from_draft) for each new piece; stop if interrupted() between steps.

        The conversation keeps the shown part of a stopped answer. Raises ChatSessionError.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        began = time.perf_counter()
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
        finally:
            if request.finish_reason is None:  # show() raised, e.g. into a closed pipe
                self._engine.abort(request)
        whole = "".join(written)
        self.messages = [*messages, {"role": "assistant", "content": whole}]
        stats = summarise(events_of_answer(request.events, answer.n_tokens))
        return Exchange(whole, answer, time.perf_counter() - began, stats)

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
