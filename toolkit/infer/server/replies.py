"""What is sent: answers while the engine writes them, their JSON in chats and completions, and the transport.

Log-probabilities have the exact bytes of every token. A client may disconnect before the reply is complete.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from transformers.convert_slow_tokenizer import bytes_to_unicode

from toolkit.infer.engine.engine_thread import Ticket
from toolkit.infer.request.request import Answer, Request, TokenLogprob, Update, events_of_answer, summarise
from toolkit.infer.server.answer_parser import AnswerParser
from toolkit.infer.server.tool_calls import Kind, Piece

T = TypeVar("T")


@dataclass
class Writing:
    """One of a request's n answers while it is generated. sent_characters: whose log-probabilities have been sent."""

    index: int
    ticket: Ticket
    answer: Answer
    parser: AnswerParser
    min_tokens: int = 0
    reasoning_tokens: int = 0
    sent_characters: int = 0

    @property
    def request(self) -> Request:
        """The engine's record of it."""
        return self.ticket.request

    @property
    def mean_logprob(self) -> float:
        """Of the answer's tokens, which were asked for."""
        entries = self.request.logprobs[: self.answer.n_tokens]
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
        request = self.request
        return {"prompt_token_ids": request.prompt_ids, "token_ids": request.output_ids[: self.answer.n_tokens]}

    @property
    def acceptance(self) -> dict[str, Any]:
        """The field of `return_acceptance`: what drafting did for the answer, and where its time went; also while it is
        written.

        drafts: verify steps that offered drafted tokens; verify_steps: those of them that count (AcceptanceStats says
        which, and what the other figures are). plain_steps: steps without drafts. histogram[i]: counted steps that
        accepted i drafted tokens. seconds: queue, prefill (reading the prompt, and the first token) and decode follow
        each other; draft, verify and commit are parts of decode, of the whole batch. A request that was preempted
        counts its second wait and reading as decode.
        """
        request = self.request
        events = events_of_answer(request.events, self.answer.n_tokens)
        stats = summarise(events)
        ended = time.perf_counter() if request.finished_at is None else request.finished_at
        first = ended if request.first_token_at is None else request.first_token_at
        begun = first if request.admitted_at is None else request.admitted_at
        seconds = {"queue": begun - request.submitted_at, "prefill": first - begun, "decode": ended - first}
        parts = {part: sum(getattr(event, f"{part}_s") for event in events) for part in ("draft", "verify", "commit")}
        details = {
            "accept_length": _number(stats.accept_length),
            "accept_rate": [_number(rate) for rate in stats.accept_rate],
            "histogram": list(stats.histogram),
            "drafts": stats.verify_steps + stats.truncated_steps,
            "verify_steps": stats.verify_steps,
            "plain_steps": len(events) - stats.verify_steps - stats.truncated_steps,
            "draft_tokens": stats.offered,
            "accepted_tokens": stats.accepted,
            "seconds": {name: round(value, 6) for name, value in (seconds | parts).items()},
        }
        return {"acceptance": details}


def usage(answers: Sequence[Writing], each: int, shape: str | None) -> dict[str, Any]:
    """OpenAI's `usage` of one reply, counted exactly up to each answer's end. Each prompt counts once.

    each: answers to each prompt. shape: the name of the engine's draft shape; None for plain decoding.
    accepted_prediction_tokens: drafted tokens in the answer. rejected_prediction_tokens: drafted nodes not in it.
    `speculative` is an extension: accept_length excludes the prefill's token and truncated steps; accept_rate[i] is
    the share of the steps that reached depth i and accepted it.
    """
    prompts, first = [writing.request for writing in answers[::each]], answers[0].request
    events = [one for writing in answers for one in events_of_answer(writing.request.events, writing.answer.n_tokens)]
    prompt_tokens = sum(len(asked.prompt_ids) for asked in prompts)
    tokens = sum(writing.answer.n_tokens for writing in answers)
    from_draft = sum(writing.answer.n_from_draft for writing in answers)
    used: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": sum(asked.cached_tokens for asked in prompts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": from_draft,
            "rejected_prediction_tokens": max(0, sum(event.offered for event in events) - from_draft),
            "reasoning_tokens": sum(writing.reasoning_tokens for writing in answers),
        },
    }
    if shape is not None and first.speculative:
        stats = summarise(events)
        used["speculative"] = {
            "shape": shape if first.shape is None else f"{first.shape.name} ({first.shape.as_text()})",
            "verify_steps": stats.verify_steps,
            "accept_length": _number(stats.accept_length),
            "accept_rate": [_number(rate) for rate in stats.accept_rate],
        }
    return used


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)  # JSON has no nan


class ReplyForm:
    """Identity and JSON form of one reply.

    chat: the form of /v1/chat/completions, else that of /v1/completions. with_usage: events of a stream have `usage`,
    null in all but the last. In the methods, index: the number of the answer among the request's n; logprobs:
    `choices[].logprobs`, None if the client did not ask for them.
    """

    def __init__(self, model: str, fingerprint: str, chat: bool, with_usage: bool) -> None:
        self.chat, self.with_usage = chat, with_usage
        self._chunk_object = "chat.completion.chunk" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of a reply that is not streamed."""
        return {**self._head, "choices": list(choices), "usage": usage}

    def choice(
        self, index: int, pieces: Sequence[Piece], finish_reason: str, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """One whole answer."""
        content: dict[str, Any] = {"message": message_of(pieces)} if self.chat else {"text": joined(pieces, "content")}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def first(self, index: int) -> list[str]:
        """Events that begin a streamed answer: the role in a chat, none otherwise."""
        return [self._event(index, {"role": "assistant", "content": ""}, None, None)] if self.chat else []

    def piece(self, index: int, piece: Piece, logprobs: dict[str, Any] | None) -> str:
        """One event with a new piece."""
        return self._event(index, delta_of(piece) if self.chat else piece.text, None, logprobs)

    def ended(
        self, index: int, finish_reason: str, logprobs: dict[str, Any] | None, extra: dict[str, Any]
    ) -> list[str]:
        """Events that end an answer. logprobs: of its last tokens without text, if any. extra: further fields."""
        return [self._event(index, {} if self.chat else "", finish_reason, logprobs, extra)]

    def last(self, usage: dict[str, Any]) -> list[str]:
        """Events that end a stream."""
        return [*([self._chunk([], usage)] if self.with_usage else []), "data: [DONE]\n\n"]

    def failed(self, body: dict[str, Any]) -> str:
        """The last event of a stream whose answer failed; body: as of a reply with an error's status."""
        return sse(body)

    def _event(
        self,
        index: int,
        delta: Any,
        finish_reason: str | None,
        logprobs: dict[str, Any] | None,
        extra: dict[str, Any] | None = None,
    ) -> str:
        choice = {"index": index, "delta" if self.chat else "text": delta, "logprobs": logprobs}
        return self._chunk([{**choice, "finish_reason": finish_reason, **(extra or {})}])

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        used = {"usage": usage} if self.with_usage else {}
        return sse({**self._head, "object": self._chunk_object, "choices": choices, **used})


def joined(pieces: Sequence[Piece], kind: Kind) -> str:
    """The text of all pieces of one kind."""
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def message_of(pieces: Sequence[Piece]) -> dict[str, Any]:
    """The assistant's message of a whole answer."""
    content, reasoning = joined(pieces, "content"), joined(pieces, "reasoning")
    calls = [_call(piece) for piece in pieces if piece.kind == "call"]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


def delta_of(piece: Piece) -> dict[str, Any]:
    """What a streamed chat adds to the message by one piece."""
    if piece.kind == "call":
        return {"tool_calls": [{"index": piece.index, **_call(piece)}]}
    return {"reasoning_content" if piece.kind == "reasoning" else "content": piece.text}


def _call(piece: Piece) -> dict[str, Any]:
    return {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": piece.text}}


def sse(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False)}\n\n"


LEAST = -9999.0  # OpenAI's value for -inf, which JSON does not have


class LogprobForm:
    """Writes `choices[].logprobs` with the exact bytes of a token, including a leading space and partial characters.

    Decoding a single id loses both: SentencePiece decoders drop a leading space, and a partial character becomes
    U+FFFD.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = json.loads(backend.to_str())["decoder"] if backend is not None else None
        written = json.dumps(decoder, ensure_ascii=False)
        self._byte_level = "ByteLevel" in written
        self._sentencepiece = "▁" in written
        self._byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
        self._added = tokenizer.added_tokens_decoder

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; b"" for an id outside the tokenizer's vocabulary."""
        if token_id in self._added:
            return str(self._added[token_id].content).encode()
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            return bytes(self._byte_of[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode() if self._sentencepiece else piece.encode()

    def content(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """`choices[].logprobs` with one item per token of the answer, including the stop id that ended it."""
        items = []
        for entry in entries:
            best = [self._item(token, logprob) for token, logprob in entry.top]
            items.append({**self._item(entry.token_id, entry.logprob), "top_logprobs": best})
        return {"content": items, "refusal": None}

    def completion(
        self, entries: Sequence[TokenLogprob], prompt: Sequence[TokenLogprob] | None, offset: int
    ) -> dict[str, Any]:
        """`choices[].logprobs` of /v1/completions. prompt: entries of an echoed prompt's tokens, whose first has no
        log-probability. offset: the characters before the first token."""
        whole = [*(prompt or ()), *entries]
        texts = [self._text(entry.token_id) for entry in whole]
        ends = list(itertools.accumulate(map(len, texts), initial=offset))
        values: list[float | None] = [max(entry.logprob, LEAST) for entry in whole]
        best: list[dict[str, float] | None] = []
        for entry, text in zip(whole, texts, strict=True):
            top = {self._text(token): max(logprob, LEAST) for token, logprob in entry.top}
            best.append({text: max(entry.logprob, LEAST)} | top)
        if prompt:
            values[0] = best[0] = None
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": best, "text_offset": ends[:-1]}

    def _text(self, token_id: int) -> str:
        """A token's text, or its bytes in OpenAI's form where they are no whole characters."""
        written = self.bytes_of(token_id)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)

    def _item(self, token_id: int, logprob: float) -> dict[str, Any]:
        written = self.bytes_of(token_id)
        return {
            "token": written.decode("utf-8", errors="replace"),
            "logprob": max(logprob, LEAST),
            "bytes": list(written),
        }


class EventStream(StreamingResponse):
    """Server-sent events. `on_end` runs at the end, even if the client disconnects before the first event."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def unless_disconnected(http: HttpRequest, work: Coroutine[Any, Any, list[T]]) -> tuple[bool, list[T]]:
    """(True, result of `work`), or (False, []) if the client disconnects first, which cancels `work`."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return (True, task.result()) if task.done() else (False, [])
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(watch, task, return_exceptions=True)


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
