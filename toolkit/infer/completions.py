"""What /v1/chat/completions and /v1/completions do: request -> prompt ids -> engine -> answer, whole or streamed."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2.exceptions import TemplateError
from starlette.types import Receive, Scope, Send

from toolkit.infer.answer import Answer, usage
from toolkit.infer.api_errors import ApiError, context_length_exceeded
from toolkit.infer.default_sampling import DefaultSampling
from toolkit.infer.detokenize import Detokenizer, TextStream
from toolkit.infer.engine_thread import EngineFailure, EngineThread, Ticket
from toolkit.infer.openai_protocol import ChatRequest, CompletionRequest, GenerationFields
from toolkit.infer.openai_replies import ReplyForm, sse
from toolkit.infer.sampling_params import SamplingParams
from toolkit.infer.server_metrics import ServerMetrics
from toolkit.log import get_logger

logger = get_logger(__name__)

CLIENT_CLOSED = 499  # nobody reads this answer; the code is nginx's


@dataclass(frozen=True)
class Served:
    """What one server serves. `shape_name` is None where nothing is drafted; `max_context` in tokens."""

    model_name: str
    tokenizer: Any
    engine: Any
    max_context: int
    fingerprint: str
    shape_name: str | None
    defaults: DefaultSampling


class Completions:
    """What the two endpoints do; one instance an app."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.engine = EngineThread(served.engine)
        self.metrics = ServerMetrics()
        self.created = int(time.time())
        self._detokenizer = Detokenizer(served.tokenizer)

    async def chat(self, body: ChatRequest, http: Request) -> Response:
        """POST /v1/chat/completions."""
        self.check_model(body.model)
        return await self._answer(body, self._chat_ids(body), "messages", http, self._detokenizer.stream(body.stops))

    async def completion(self, body: CompletionRequest, http: Request) -> Response:
        """POST /v1/completions."""
        self.check_model(body.model)
        ids = body.prompt if isinstance(body.prompt, list) else self.served.tokenizer(body.prompt)["input_ids"]
        return await self._answer(body, ids, "prompt", http, self._detokenizer.stream(body.stops, ids))

    def check_model(self, model: str) -> None:
        if model != self.served.model_name:
            message = f"the model '{model}' does not exist here; this server has '{self.served.model_name}'"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _chat_ids(self, body: ChatRequest) -> list[int]:
        tokenizer = self.served.tokenizer
        if not tokenizer.chat_template:
            raise ApiError(
                400, "the target's tokenizer has no chat template; use /v1/completions", code="no_chat_template"
            )
        messages = [message.for_template() for message in body.messages]
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:  # templates refuse what their model was not trained on, e.g. two user turns
            raise ApiError(
                400, f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def _params(self, body: GenerationFields, prompt_tokens: int, param: str) -> SamplingParams:
        room = self.served.max_context - prompt_tokens
        limit = body.token_limit
        if room < (limit or 1):
            raise context_length_exceeded(prompt_tokens, limit, self.served.max_context, param)
        defaults = self.served.defaults
        top_k = defaults.top_k if body.top_k is None else max(body.top_k, 0)
        return SamplingParams(
            temperature=defaults.temperature if body.temperature is None else body.temperature,
            top_p=defaults.top_p if body.top_p is None else body.top_p,
            top_k=top_k,
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            max_tokens=room if limit is None else limit,
            ignore_eos=body.ignore_eos,
        )

    async def _answer(
        self, body: GenerationFields, ids: Sequence[int], param: str, http: Request, text: TextStream
    ) -> Response:
        params = self._params(body, len(ids), param)
        form = ReplyForm(self.served.model_name, self.served.fingerprint, chat=isinstance(body, ChatRequest))
        try:
            ticket = await self.engine.submit(ids, params, speculative=body.speculative)
        except ValueError as error:  # the engine's own checks, e.g. ids outside the vocabulary
            raise ApiError(400, str(error), param=param, code="invalid_value") from error
        answer = Answer(text)
        if body.stream:
            return _EventStream(self._events(ticket, answer, form, body), lambda: self._end(ticket, answer))
        try:
            finished, whole = await _unless_disconnected(http, self._whole_text(ticket, answer))
        finally:
            self._end(ticket, answer)
        if not finished:
            return Response(status_code=CLIENT_CLOSED)
        return JSONResponse(form.whole(whole, str(answer.finish_reason), self._usage(ticket, answer)))

    async def _whole_text(self, ticket: Ticket, answer: Answer) -> str:
        return "".join([text async for text in self._texts(ticket, answer)])

    async def _texts(self, ticket: Ticket, answer: Answer) -> AsyncIterator[str]:
        """New text after each engine step, to the answer's end (which a stop string may set before the engine does)."""
        async for update in ticket.updates():
            text = answer.feed(update)
            if text:
                yield text
            if answer.finish_reason is not None:
                return

    def _end(self, ticket: Ticket, answer: Answer) -> None:
        """However an answer ended: the engine forgets it, and it is counted and logged once."""
        self.engine.abort(ticket)
        self.metrics.record(ticket.request, answer, time.perf_counter())
        self._log(ticket, answer)

    async def _events(
        self, ticket: Ticket, answer: Answer, form: ReplyForm, body: GenerationFields
    ) -> AsyncIterator[str]:
        for event in form.first(body.wants_stream_usage):
            yield event
        try:
            async for text in self._texts(ticket, answer):
                yield form.piece(text, body.wants_stream_usage)
        except EngineFailure as error:  # the 200 is sent already: OpenAI's clients raise on an event with an error
            yield sse(ApiError(500, str(error), code="engine_failure").body)
            return
        used = self._usage(ticket, answer) if body.wants_stream_usage else None
        for event in form.last(str(answer.finish_reason), used):
            yield event

    def _usage(self, ticket: Ticket, answer: Answer) -> dict[str, Any]:
        shape = self.served.shape_name if ticket.request.speculative else None
        return usage(len(ticket.prompt_ids), answer, list(ticket.request.events), shape)

    def _log(self, ticket: Ticket, answer: Answer) -> None:
        used = self._usage(ticket, answer)
        speculative = used.get("speculative") or {}
        length = speculative.get("accept_length")
        logger.info(
            "%d prompt + %d answer tokens, %s, %.2f s%s",
            used["prompt_tokens"],
            used["completion_tokens"],
            answer.finish_reason or "aborted",
            time.perf_counter() - ticket.request.submitted_at,
            f", accept_length {length:.2f} ({speculative['shape']})" if length is not None else "",
        )


class _EventStream(StreamingResponse):
    """Server-sent events; `on_end` runs also when the client goes away before the first event."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def _unless_disconnected(http: Request, work: Coroutine[Any, Any, str]) -> tuple[bool, str]:
    """(True, the result), or (False, "") with the work cancelled when the client went away first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return (True, task.result()) if task.done() else (False, "")
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(watch, task, return_exceptions=True)


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
