"""The endpoints that use the model or its tokenizer: request -> prompt ids -> engine -> answer, or a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from toolkit.infer.engine.engine import load_of
from toolkit.infer.engine.engine_thread import EngineFailure, EngineThread, Ticket
from toolkit.infer.request.detokenize import Detokenizer
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import RequestCutError, SamplingParams
from toolkit.infer.request.request import Answer, TokenLogprob
from toolkit.infer.server.admission import Deadline, places
from toolkit.infer.server.answer_parser import AnswerParser, Parsers, prompt_end
from toolkit.infer.server.api_errors import ApiError, context_length_exceeded, to_api_error
from toolkit.infer.server.metrics import ServerMetrics
from toolkit.infer.server.prompts import Prompts
from toolkit.infer.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
)
from toolkit.infer.server.replies import EventStream, LogprobForm, ReplyForm, Writing, unless_disconnected, usage
from toolkit.infer.server.request_params import OPENAI_DEFAULTS, for_answer, request_params
from toolkit.infer.server.responses import ResponseForm, ResponsesRequest, chat_of, in_responses
from toolkit.infer.server.server_settings import ServerSettings
from toolkit.infer.server.tool_calls import Piece
from toolkit.log import get_logger

logger = get_logger(__name__)

CLIENT_CLOSED = 499  # the client closed the connection; the code is nginx's
LONG_BODY = 50_000  # bytes; tokenising more takes so long that streams would wait
FIELD_OF = {"stop_ids": "stop_token_ids", "logprobs": "top_logprobs"}  # setting -> OpenAI's name, where it differs
Form = ReplyForm | ResponseForm


@dataclass(frozen=True)
class Served:
    """The engine and the model of one server. shape_name: None for plain decoding. context_length: in tokens.

    defaults: the settings of requests that state none."""

    model_name: str
    tokenizer: Any
    engine: Any
    context_length: int
    fingerprint: str
    shape_name: str | None
    defaults: SamplingParams = OPENAI_DEFAULTS
    parsers: Parsers = field(default_factory=Parsers)


class Completions:
    """The endpoints; one instance per app."""

    def __init__(self, served: Served, settings: ServerSettings) -> None:
        self.served, self.settings = served, settings
        self.engine = EngineThread(served.engine)
        self.metrics = ServerMetrics(lambda: load_of(served.engine), lambda: self.engine.failed_steps)
        self.created = int(time.time())
        self.prompts = Prompts(served.tokenizer, served.parsers)
        self._detokenizer = Detokenizer(served.tokenizer)
        self._logprob_form = LogprobForm(served.tokenizer)

    async def chat(self, body: ChatRequest, http: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self.reply(body, lambda: [self.prompts.of_chat(body)], "messages", http, self._form(body, True))

    async def completion(self, body: CompletionRequest, http: Request) -> Response:
        """POST /v1/completions."""

        def ids() -> list[list[int]]:
            return [self.prompts.of_text(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]

        return await self.reply(body, ids, "prompt", http, self._form(body, False))

    async def response(self, body: ResponsesRequest, http: Request) -> Response:
        """POST /v1/responses."""
        try:
            chat = chat_of(body)
            return await self.reply(chat, lambda: [self.prompts.of_chat(chat)], "input", http, ResponseForm(body))
        except ApiError as error:
            error.param = in_responses(error.param)
            raise

    # Not async: these two run in threads, since a long text takes long.
    def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """POST /tokenize."""
        self._check_model(body.model or self.served.model_name)
        return self.prompts.tokenize(body, self.served.context_length)

    def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        """POST /detokenize."""
        self._check_model(body.model or self.served.model_name)
        return self.prompts.detokenize(body.tokens)

    async def models(self) -> dict[str, Any]:
        """GET /v1/models."""
        return {"object": "list", "data": [await self.model(self.served.model_name)]}

    async def model(self, name: str) -> dict[str, Any]:
        """GET /v1/models/NAME."""
        self._check_model(name)
        card = {"id": name, "object": "model", "created": self.created, "owned_by": "toolkit"}
        return card | {"max_model_len": self.served.context_length}

    def _check_model(self, model: str) -> None:
        if model != self.served.model_name:
            message = f"the model '{model}' does not exist here; this server has '{self.served.model_name}'"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _form(self, body: GenerationFields, chat: bool) -> ReplyForm:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        return ReplyForm(self.served.model_name, self.served.fingerprint, chat, with_usage)

    async def reply(
        self, body: GenerationFields, tokenise: Callable[[], list[list[int]]], param: str, http: Request, form: Form
    ) -> Response:
        """Generate and return the reply. tokenise: makes the ids of each prompt. param: the request's field with it."""
        self._check_model(body.model)
        deadline = Deadline(body.timeout, self.settings.request_timeout_s, http.state.arrived)
        long = int(http.headers.get("content-length", LONG_BODY)) >= LONG_BODY
        try:
            answers = await self._submit(body, tokenise, long, param, deadline)
        except (TimeoutError, RequestCutError) as error:
            raise deadline.error(error.cause if isinstance(error, RequestCutError) else "deadline") from error
        except ValueError as error:  # the engine's checks of settings and ids
            message, name = str(error), getattr(error, "field", None)
            if name in FIELD_OF:
                message = message.replace(name, FIELD_OF[name], 1)
            raise ApiError(400, message, param=_field_at_fault(error, body, param), code="invalid_value") from error
        if body.stream:
            return EventStream(self._events(answers, form, body), lambda: self._end(answers))
        try:
            finished, pieces = await unless_disconnected(http, self._whole(answers))
        finally:
            self._end(answers)
        if not finished:
            return Response(status_code=CLIENT_CLOSED)
        cut_by = answers[0].ticket.cut_by
        if cut_by is not None and not any(writing.answer.n_tokens for writing in answers):
            raise deadline.error(cut_by)
        if body.token_limit == 0:  # the engine writes one token; the reply has the prompt alone
            for writing in answers:
                writing.answer.drop()
            pieces = [[] for _ in answers]
        choices = []
        for index, writing in enumerate(_best(answers, body)):
            echoed = [Piece("content", self._echoed(body, writing))] if isinstance(body, CompletionRequest) else []
            logprobs = self._logprobs(body, writing, writing.answer.take_logprobs())
            choice = form.choice(index, [*echoed, *pieces[writing.index]], str(writing.finish_reason), logprobs)
            choice |= writing.token_ids if body.return_token_ids else {}
            choices.append(choice | (writing.acceptance if body.return_acceptance else {}))
        return JSONResponse(form.whole(choices, usage(answers, body.answers, self.served.shape_name)))

    async def _submit(
        self,
        body: GenerationFields,
        tokenise: Callable[[], list[list[int]]],
        long: bool,
        param: str,
        deadline: Deadline,
    ) -> list[Writing]:
        """Submit the request's answers to the engine, together. long: tokenise in another thread."""
        drafts = {
            "speculative": body.speculative,
            "shape": None if body.shape is None else DraftShape.parse(body.shape),
            "verify": body.verify,
            "priority": body.priority,
        }
        tickets: list[Ticket] = []
        parsers: list[AnswerParser] = []
        rows = self.served.engine.max_running_requests
        n_prompts = len(body.prompts) if isinstance(body, CompletionRequest) else 1
        with places(self.engine, rows, self.settings, body.answers, n_prompts):
            async with asyncio.timeout(deadline.left):
                prompts = await asyncio.to_thread(tokenise) if long else tokenise()
                params = [self._params(body, len(ids), param) for ids in prompts]
                if params[0].has_grammar:  # compiled here, so that no running request waits for it
                    await asyncio.to_thread(self.served.engine.grammars.start, params[0])
            for ids, own in zip(prompts, params, strict=True):
                for index in range(body.answers):
                    parsers.append(self._parser(body, ids))
                    settings = for_answer(own, index)
                    if parsers[-1].reasons:  # which stop strings do not end: the parser looks for them
                        settings = replace(settings, stop=())
                    tickets.append(self.engine.put(ids, settings, timeout_s=deadline.left, **drafts))
        await self.engine.accepted(tickets)
        answers = []
        for index, (ticket, parser) in enumerate(zip(tickets, parsers, strict=True)):
            context = () if isinstance(body, ChatRequest) else ticket.prompt_ids
            stops = () if parser.reasons else body.stops
            text = self._detokenizer.stream(stops, context, body.min_tokens, parser.markers)
            answers.append(Writing(index, ticket, Answer(text), parser, body.min_tokens))
            self.metrics.follow(ticket.request, answers[-1].answer)
        return answers

    def _params(self, body: GenerationFields, prompt_tokens: int, param: str) -> SamplingParams:
        room, limit = self.served.context_length - prompt_tokens, body.token_limit
        if room < (1 if limit is None else limit):
            raise context_length_exceeded(prompt_tokens, limit, self.served.context_length, param)
        return request_params(body, self.served.defaults, room)

    def _parser(self, body: GenerationFields, ids: Sequence[int]) -> AnswerParser:
        """A parser for one answer. Raw completions, and answers with a grammar of their own, are not parsed."""
        if not isinstance(body, ChatRequest) or (body.has_grammar and not body.forced):
            return AnswerParser()
        schemas = {tool.function.name: tool.schema_of_arguments for tool in body.offered}
        end = prompt_end(self.served.tokenizer, ids)
        parsers = self.served.parsers
        return parsers.start(schemas, end, forced=body.forced, one_call=body.one_call, stops=body.stops)

    async def _whole(self, answers: Sequence[Writing]) -> list[list[Piece]]:
        """All pieces of each answer."""
        whole: list[list[Piece]] = [[] for _ in answers]
        async for writing, pieces in self._merged(answers):
            whole[writing.index] += pieces or ()
        return whole

    def _end(self, answers: Sequence[Writing]) -> None:
        """Abort the answers that still run; count and log each answer."""
        for writing in answers:
            self.engine.abort(writing.ticket)
            now, request, answer = time.perf_counter(), writing.request, writing.answer
            self.metrics.record(request, answer, now)
            logger.info(
                "%d prompt + %d answer tokens, %s, %.2f s",
                len(request.prompt_ids), answer.n_tokens, answer.finish_reason or "aborted", now - request.submitted_at,
            )  # fmt: skip

    async def _events(self, answers: Sequence[Writing], form: Form, body: GenerationFields) -> AsyncIterator[str]:
        for writing in answers:
            for event in form.first(writing.index):
                yield event
        try:
            async for writing, pieces in self._merged(answers):
                logprobs = self._logprobs(body, writing, writing.answer.take_logprobs())
                for piece in pieces or ():
                    yield form.piece(writing.index, piece, logprobs)
                    logprobs = None  # they go with the step's first piece
                if pieces is None:
                    extra = writing.acceptance if body.return_acceptance else {}
                    for event in form.ended(writing.index, str(writing.finish_reason), logprobs, extra):
                        yield event
        except Exception as error:  # status 200 is sent already; OpenAI's clients raise on an error event
            if not isinstance(error, EngineFailure):
                logger.error("a stream failed by an error of the server", exc_info=error)
            yield form.failed(to_api_error(error).body)
            return
        for event in form.last(usage(answers, body.answers, self.served.shape_name)):
            yield event

    async def _merged(self, answers: Sequence[Writing]) -> AsyncIterator[tuple[Writing, list[Piece] | None]]:
        """Yield (answer, new pieces) of all answers as they arrive. None: the answer ended, and its place is free."""
        ready: asyncio.Queue[tuple[Writing, list[Piece] | None] | Exception] = asyncio.Queue()

        async def follow(writing: Writing) -> None:
            try:
                async for update in writing.ticket.updates():
                    if pieces := writing.read(update):
                        ready.put_nowait((writing, pieces))
                    if writing.finish_reason is not None:
                        break
                ready.put_nowait((writing, None))
            except Exception as error:  # whatever it is: without it the stream would wait for ever
                ready.put_nowait(error)
            finally:
                self.engine.abort(writing.ticket)  # here, as the client may take long to read the reply

        tasks = [asyncio.create_task(follow(writing)) for writing in answers]
        try:
            left = len(tasks)
            while left:
                item = await ready.get()
                if isinstance(item, Exception):
                    raise item
                left -= item[1] is None
                yield item
        finally:
            for task in tasks:
                task.cancel()

    def _logprobs(
        self, body: GenerationFields, writing: Writing, entries: Sequence[TokenLogprob]
    ) -> dict[str, Any] | None:
        if body.n_logprobs is None:
            return None
        if not isinstance(body, CompletionRequest):
            return self._logprob_form.content(entries) if entries else None
        request = writing.request
        prompt = [TokenLogprob(request.prompt_ids[0], 0.0, ()), *request.prompt_logprobs] if body.echo else []
        if not (entries or prompt):
            return None
        logprobs = self._logprob_form.completion(entries, prompt, writing.sent_characters)
        writing.sent_characters += sum(map(len, logprobs["tokens"]))
        return logprobs

    def _echoed(self, body: CompletionRequest, writing: Writing) -> str:
        """The prompt's text, if the reply begins with it."""
        prompt = body.prompts[writing.index // body.answers]
        return "" if not body.echo else prompt if isinstance(prompt, str) else self.served.tokenizer.decode(prompt)


def _field_at_fault(error: ValueError, body: GenerationFields, prompt: str) -> str:
    """The request's field that an error of the engine is about; `prompt` for an error that names no setting."""
    name = getattr(error, "field", prompt)
    if name == "json_schema" and body.json_schema is None:
        return "tools" if getattr(body, "forced", False) else "response_format"
    return FIELD_OF.get(name, name)


def _best(answers: Sequence[Writing], body: GenerationFields) -> list[Writing]:
    """The `n` answers of the largest mean log-probability to each prompt, the best first; all of them as they are."""
    if body.answers == body.n:
        return list(answers)
    groups = (answers[at : at + body.answers] for at in range(0, len(answers), body.answers))
    return [
        writing for group in groups for writing in sorted(group, key=lambda writing: -writing.mean_logprob)[: body.n]
    ]
