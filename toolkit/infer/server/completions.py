"""The endpoints /v1/chat/completions and /v1/completions: request -> prompt ids -> engine -> answer, or a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from toolkit.infer.engine.engine_thread import EngineFailure, EngineThread, Ticket
from toolkit.infer.load.answer import Answer, usage
from toolkit.infer.request.chat_prompt import ChatPromptError, NoChatTemplateError, chat_ids
from toolkit.infer.request.detokenize import Detokenizer
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.errors import DraftShapeError, SamplingError
from toolkit.infer.request.request import TokenLogprob
from toolkit.infer.server.api_errors import ApiError, context_length_exceeded
from toolkit.infer.server.openai_protocol import ChatRequest, CompletionRequest, GenerationFields
from toolkit.infer.server.openai_replies import EventStream, LogprobForm, ReplyForm, sse, unless_disconnected
from toolkit.infer.server.request_params import DefaultSampling, for_answer, request_params, wrong_setting
from toolkit.infer.server.server_metrics import ServerMetrics
from toolkit.log import get_logger

logger = get_logger(__name__)

CLIENT_CLOSED = 499  # the client closed the connection; the code is nginx's


@dataclass(frozen=True)
class Served:
    """The engine and the model of one server. shape_name: None for plain decoding. context_length: in tokens."""

    model_name: str
    tokenizer: Any
    engine: Any
    context_length: int
    fingerprint: str
    shape_name: str | None
    defaults: DefaultSampling


@dataclass(frozen=True)
class _Writing:
    """One of a request's n answers while it is generated."""

    index: int
    ticket: Ticket
    answer: Answer

    @property
    def token_ids(self) -> dict[str, list[int]]:
        """The fields of `return_token_ids`. The ids of the answer include the stop id that ended it."""
        request = self.ticket.request
        return {"prompt_token_ids": request.prompt_ids, "token_ids": request.output_ids[: self.answer.n_tokens]}


class Completions:
    """The two endpoints; one instance per app."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.engine = EngineThread(served.engine)
        self.metrics = ServerMetrics()
        self.created = int(time.time())
        self._detokenizer = Detokenizer(served.tokenizer)
        self._logprob_form = LogprobForm(served.tokenizer)

    async def chat(self, body: ChatRequest, http: Request) -> Response:
        """POST /v1/chat/completions."""
        self.check_model(body.model)
        return await self._reply(body, self._chat_ids(body), "messages", http)

    async def completion(self, body: CompletionRequest, http: Request) -> Response:
        """POST /v1/completions."""
        self.check_model(body.model)
        ids = body.prompt if isinstance(body.prompt, list) else self.served.tokenizer(body.prompt)["input_ids"]
        return await self._reply(body, ids, "prompt", http)

    def check_model(self, model: str) -> None:
        if model != self.served.model_name:
            message = f"the model '{model}' does not exist here; this server has '{self.served.model_name}'"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _chat_ids(self, body: ChatRequest) -> list[int]:
        try:
            return chat_ids(self.served.tokenizer, [message.for_template() for message in body.messages])
        except NoChatTemplateError as error:
            raise ApiError(
                400, "the target's tokenizer has no chat template; use /v1/completions", code="no_chat_template"
            ) from error
        except ChatPromptError as error:
            raise ApiError(400, str(error), param="messages") from error

    async def _reply(self, body: GenerationFields, ids: Sequence[int], param: str, http: Request) -> Response:
        """Generate and return the reply. param: the request's field with the prompt `ids`."""
        form = ReplyForm(
            self.served.model_name, self.served.fingerprint, isinstance(body, ChatRequest), body.wants_stream_usage
        )
        writing = await self._submit(body, ids, param)
        if body.stream:
            return EventStream(self._events(writing, form), lambda: self._end(writing))
        try:
            finished, texts = await unless_disconnected(http, self._whole_texts(writing))
        finally:
            self._end(writing)
        if not finished:
            return Response(status_code=CLIENT_CLOSED)
        choices = [
            form.choice(one.index, text, str(one.answer.finish_reason), self._logprobs(one.answer.take_logprobs()))
            | (one.token_ids if body.return_token_ids else {})
            for one, text in zip(writing, texts, strict=True)
        ]
        return JSONResponse(form.whole(choices, self._usage(writing)))

    async def _submit(self, body: GenerationFields, ids: Sequence[int], param: str) -> list[_Writing]:
        """Submit the request's n answers to the engine. On an ApiError or EngineFailure abort all of them."""
        room, limit = self.served.context_length - len(ids), body.token_limit
        if room < (limit or 1):
            raise context_length_exceeded(len(ids), limit, self.served.context_length, param)
        params = request_params(body, self.served.defaults, room)
        context = () if isinstance(body, ChatRequest) else ids
        writing: list[_Writing] = []
        try:
            shape = None if body.shape is None else DraftShape.parse(body.shape)
            for index in range(body.n):
                settings = for_answer(params, index)
                ticket = await self.engine.submit(ids, settings, speculative=body.speculative, shape=shape)
                text = self._detokenizer.stream(body.stops, context, unsearched=body.min_tokens)
                writing.append(_Writing(index, ticket, Answer(text)))
        except BaseException as error:
            self._end(writing)
            if isinstance(error, SamplingError):
                raise wrong_setting(error) from error
            if isinstance(error, DraftShapeError):
                raise ApiError(400, str(error), param="shape", code="invalid_value") from error
            if isinstance(error, ValueError):  # the engine's other checks, e.g. ids outside the vocabulary
                raise ApiError(400, str(error), param=param, code="invalid_value") from error
            raise
        return writing

    async def _whole_texts(self, writing: Sequence[_Writing]) -> list[str]:
        return await asyncio.gather(*(self._whole_text(one) for one in writing))

    async def _whole_text(self, one: _Writing) -> str:
        return "".join([text async for text in self._texts(one)])

    async def _texts(self, one: _Writing) -> AsyncIterator[str]:
        """Yield the new text after each engine step until the answer ends."""
        async for update in one.ticket.updates():
            text = one.answer.feed(update)
            if text:
                yield text
            if one.answer.finish_reason is not None:
                return

    def _end(self, writing: Sequence[_Writing]) -> None:
        """Abort the answers that still run; count and log each answer."""
        for one in writing:
            self.engine.abort(one.ticket)
            self.metrics.record(one.ticket.request, one.answer, time.perf_counter())
            self._log(one)

    async def _events(self, writing: Sequence[_Writing], form: ReplyForm) -> AsyncIterator[str]:
        for one in writing:
            for event in form.first(one.index):
                yield event
        try:
            async for one, text, entries in self._merged(writing):
                logprobs = self._logprobs(entries)
                if text is not None:
                    yield form.piece(one.index, text, logprobs)
                else:
                    yield form.ended(one.index, str(one.answer.finish_reason), logprobs)
        except EngineFailure as error:  # status 200 is sent already; OpenAI's clients raise on an error event
            yield sse(ApiError(500, str(error), code="engine_failure").body)
            return
        for event in form.last(self._usage(writing)):
            yield event

    async def _merged(
        self, writing: Sequence[_Writing]
    ) -> AsyncIterator[tuple[_Writing, str | None, list[TokenLogprob]]]:
        """Yield (answer, new text, log-probabilities) of all answers as they arrive. Text None: the answer ended."""
        ready: asyncio.Queue[tuple[_Writing, str | None, list[TokenLogprob]] | EngineFailure] = asyncio.Queue()

        async def follow(one: _Writing) -> None:
            try:
                async for text in self._texts(one):
                    ready.put_nowait((one, text, one.answer.take_logprobs()))
                ready.put_nowait((one, None, one.answer.take_logprobs()))
            except EngineFailure as error:
                ready.put_nowait(error)

        tasks = [asyncio.create_task(follow(one)) for one in writing]
        try:
            left = len(tasks)
            while left:
                item = await ready.get()
                if isinstance(item, EngineFailure):
                    raise item
                left -= item[1] is None
                yield item
        finally:
            for task in tasks:
                task.cancel()

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return self._logprob_form.content(entries) if entries else None

    def _usage(self, writing: Sequence[_Writing]) -> dict[str, Any]:
        request = writing[0].ticket.request
        shape = self.served.shape_name if request.speculative else None
        if shape is not None and request.shape is not None:
            shape = f"{request.shape.name} ({request.shape.as_text()})"
        answers = [(one.answer, list(one.ticket.request.events)) for one in writing]
        return usage(len(request.prompt_ids), answers, shape, request.cached_tokens)

    def _log(self, one: _Writing) -> None:
        used = self._usage([one])
        speculative = used.get("speculative") or {}
        length = speculative.get("accept_length")
        logger.info(
            "%d prompt + %d answer tokens, %s, %.2f s%s",
            used["prompt_tokens"],
            used["completion_tokens"],
            one.answer.finish_reason or "aborted",
            time.perf_counter() - one.ticket.request.submitted_at,
            f", accept_length {length:.2f} ({speculative['shape']})" if length is not None else "",
        )
