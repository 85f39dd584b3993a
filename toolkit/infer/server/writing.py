"""One answer of a request while the engine writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit.infer.engine.engine_thread import Ticket
from toolkit.infer.load.answer import Answer, acceptance_details
from toolkit.infer.request.request import Update
from toolkit.infer.server.answer_parser import AnswerParser
from toolkit.infer.server.tool_calls import Piece


@dataclass
class Writing:
    """One of a request's n answers while it is generated."""

    index: int
    ticket: Ticket
    answer: Answer
    parser: AnswerParser
    min_tokens: int = 0
    reasoning_tokens: int = 0
    written: int = 0  # characters whose log-probabilities have been sent

    @property
    def mean_logprob(self) -> float:
        """Of the answer's tokens, which were asked for."""
        entries = self.ticket.request.logprobs[: self.answer.n_tokens]
        return sum(entry.logprob for entry in entries) / max(1, len(entries))

    def read(self, update: Update) -> list[Piece]:
        """Add an update. Returns the new pieces that can be shown."""
        if self.parser.is_plain:
            text = self.answer.feed(update)
            return [Piece("content", text)] if text else []
        pieces: list[Piece] = []
        for one in update.singly():
            text = self.answer.feed(one)
            pieces += self.parser.push(text, searched=self.answer.n_tokens > self.min_tokens)
            self.reasoning_tokens += self.parser.thinking and len(one.token_ids)  # none: the end comes by itself
            if self.parser.done:
                self.answer.finish_reason = "stop"
                return pieces
            if self.answer.finish_reason is not None:
                return pieces + self.parser.finish(cut=self.answer.finish_reason != "stop")
        return pieces

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's: "tool_calls" for a complete answer with calls."""
        called = self.answer.finish_reason == "stop" and self.parser.n_calls > 0
        return "tool_calls" if called else self.answer.finish_reason

    @property
    def token_ids(self) -> dict[str, list[int]]:
        """The fields of `return_token_ids`. The ids of the answer include the stop id that ended it."""
        request = self.ticket.request
        return {"prompt_token_ids": request.prompt_ids, "token_ids": request.output_ids[: self.answer.n_tokens]}

    @property
    def acceptance(self) -> dict[str, Any]:
        """The field of `return_acceptance`."""
        return {"acceptance": acceptance_details(self.ticket.request, self.answer.n_tokens)}
