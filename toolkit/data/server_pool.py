"""Answers of the target by OpenAI-compatible servers: vLLM, SGLang, llama.cpp, `toolkit serve`.

Prompts go to /v1/completions as token ids, so that the chat template is rendered here alone. Where the server returns
token ids (`return_token_ids` of vLLM, SGLang and ours) these are the answer. Else its text is tokenised behind the
prompt's. These are the ids that the target wrote only if the prompt's ids stay the same and the answer's have the
number that the server states; other answers are NO_ROUND_TRIP. A prompt that a server refuses, as one beyond a context
length that its model card does not state, is REFUSED.

All servers take requests from one queue, and the client tries each again where that may help. A request that failed
goes back to the queue, and the server that failed it rests, and then has to show its model again. The run ends when all
servers have failed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from openai import APIConnectionError, APIStatusError, AsyncOpenAI, Timeout

from toolkit.data.chat_template import decode, encode
from toolkit.data.generation import NO_ROUND_TRIP, REFUSED, GenerationRequest, GenerationResult
from toolkit.log import get_logger
from toolkit.targets.facts import ServedTarget
from toolkit.targets.target import end_of_turn_id

logger = get_logger(__name__)

RETRIES = 12  # of the client for one request: about a minute
REST_S = 10.0  # of a server that failed them all
READ_TIMEOUT_S = 600.0  # and a second for each token of an answer
TOO_LONG = (400, 413)  # what servers say to a prompt beyond their context, and to other requests that they cannot read
MOST_REFUSED = 20  # requests, of a server that answers none: it is not their prompts
LATER = (408, 409, 425, 429)  # these, and all from 500, may succeed later
# Sampling by temperature and top_p alone: the defaults of servers come from the target's generation config.
NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class ServerError(ValueError):
    """No server answers, or one refuses a request, or serves another model."""


class _Failed(Exception):
    """A request failed, and may succeed later, here or on another server."""


class _Busy(_Failed):
    """A server has no room now; it is not down."""


class _Refused(ServerError):
    """A server cannot read a request: as a rule because of its prompt."""


class ServerPool:
    """A context manager whose `generate` is answered by the servers of `target`.

    per_server: requests that each server has at once. The key in OPENAI_API_KEY, if there is one, is sent to them.
    Entering raises `ServerError` if no server answers, or one serves another model.
    """

    def __init__(self, target: ServedTarget, per_server: int) -> None:
        self._target, self._per_server = target, per_server
        self._servers = [_Server(url, target) for url in server_urls(target.servers)]
        self._runner = asyncio.Runner()  # its loop runs only inside of our methods: no thread shares anything

    def __enter__(self) -> ServerPool:
        try:
            self._runner.run(self._identify_all())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def at_once(self) -> int:
        """Requests that all servers together have at once."""
        return self._per_server * len(self._servers)

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer for which the target and the servers have room. Raises `ServerError`."""
        stated = (self._target.max_context, *(one.context_length for one in self._servers))
        known = [length for length in stated if length is not None]
        if not known:
            raise ServerError(
                f"neither the config of {self._target.name} nor a server states a context length; add "
                "max_position_embeddings to the config.json"
            )
        return min(known)

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GenerationResult]]:
        """A `GenerateFn`. Raises `ServerError` if a server refuses a request, and when no server answers any more."""
        todo: asyncio.Queue[int] = asyncio.Queue()
        done: asyncio.Queue[tuple[int, GenerationResult] | Exception] = asyncio.Queue()
        for index in range(len(requests)):
            todo.put_nowait(index)

        async def start() -> list[asyncio.Task[None]]:
            count = min(self._per_server, len(requests))
            work = [self._work(one, requests, todo, done) for one in self._servers for _ in range(count)]
            return [asyncio.create_task(one) for one in work]

        workers = self._runner.run(start())
        try:
            for _ in requests:
                answered = self._runner.run(done.get())
                if isinstance(answered, Exception):
                    raise answered
                yield answered
        finally:
            for worker in workers:
                worker.cancel()

    async def _work(
        self,
        server: _Server,
        requests: Sequence[GenerationRequest],
        todo: asyncio.Queue[int],
        done: asyncio.Queue[tuple[int, GenerationResult] | Exception],
    ) -> None:
        """Answer requests until cancelled. An error ends up in `done`."""
        try:
            while True:
                async with server.lock:
                    while server.error:
                        await asyncio.sleep(REST_S)
                        await server.identify()  # it may have started again, with another model
                index = await todo.get()
                try:
                    done.put_nowait((index, await server.answer(requests[index])))
                except _Busy as error:
                    todo.put_nowait(index)
                    logger.warning("%s is busy (%s); the request is asked again in %.0f s", server.url, error, REST_S)
                    await asyncio.sleep(REST_S)
                except _Failed as error:
                    todo.put_nowait(index)
                    logger.warning("%s: %s; it rests for %.0f s", server.url, error, REST_S)
                    server.error = str(error)
                    if all(one.error for one in self._servers):
                        raise ServerError(self._silent("no server answers any more")) from error
        except Exception as error:  # `generate` raises it
            done.put_nowait(error)

    async def _identify_all(self) -> None:
        await asyncio.gather(*(one.identify() for one in self._servers))
        if all(one.error for one in self._servers):
            raise ServerError(self._silent("no server answers"))
        for one in self._servers:
            if one.error:
                logger.warning("%s: %s; it gets requests when it answers", one.url, one.error)

    def _silent(self, what: str) -> str:
        lines = "".join(f"\n  {one.url}: {one.error}" for one in self._servers)
        return f"{what}:{lines}\nstart a server and type the command again: what was answered is kept"

    def _close(self) -> None:
        self._runner.run(self._end())
        self._runner.close()

    async def _end(self) -> None:
        """Cancel running requests, which the servers notice, and close the connections."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in self._servers:
            await one.client.close()


class _Server:
    """url: ends in /v1. `model`, `provenance` and `context_length` are known after `identify`. error: why it rests."""

    def __init__(self, url: str, target: ServedTarget) -> None:
        self.url, self._target = url, target
        key = os.environ.get("OPENAI_API_KEY", "none")
        self.client = AsyncOpenAI(base_url=url, api_key=key, max_retries=RETRIES)
        self.model, self.error = "", ""
        self.provenance: dict[str, Any] = {}
        self.context_length: int | None = None
        self.lock = asyncio.Lock()
        self._refused, self._answers = 0, False  # requests; whether it has answered any
        end_of_turn = end_of_turn_id(target.tokenizer)
        self._end_id = target.tokenizer.eos_token_id if end_of_turn is None else end_of_turn

    async def identify(self) -> None:
        """Find the target among the server's models, and set `error` if it cannot be asked.

        Raises `ServerError` if it serves another model.
        """
        try:
            listed = await self._ask("/models")
        except _Failed as failed:
            self.error = str(failed)
            return
        cards = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
            raise ServerError(f"{self.url}/models lists no models as OpenAI's API does; give the URL of such a server")
        wanted, name = self._target.served_model, self._target.name
        if wanted is not None:
            card = next((one for one in cards if one["id"] == wanted), None)
        else:  # `root` (vLLM, SGLang) is what was loaded under the name `id`
            card = next(
                (one for one in cards if same_model(name, one["id"]) or same_model(name, one.get("root"))), None
            )
        if card is None:
            asked = f"the target is {name!r}" if wanted is None else f"rollouts.server_model is {wanted!r}"
            raise ServerError(
                f"{self.url} serves {', '.join(repr(one['id']) for one in cards) or 'no model'}, but {asked}; serve "
                "the target there, or set rollouts.server_model to the name that the target has there"
            )
        self.error = ""
        self.model, self.context_length = card["id"], card.get("max_model_len")
        self.provenance = {"model": self.model, "engine": card.get("owned_by"), "version": await self._version()}
        logger.info("%s answers as %s", self.url, self.provenance)

    async def _version(self) -> str | None:
        for path in ("/version", "/get_server_info"):  # vLLM and ours, SGLang
            try:
                found = await self._ask(self.url.removesuffix("/v1") + path)
            except (_Failed, ServerError):
                continue
            if isinstance(found, dict) and "version" in found:
                return str(found["version"])
        return None

    async def answer(self, request: GenerationRequest) -> GenerationResult:
        """Raises `ServerError` if the server refuses the request, `_Failed` if it fails."""
        body = {
            "model": self.model,
            "prompt": request.prompt_ids,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "stop_token_ids": sorted(self._target.stop_ids),
            "return_token_ids": True,
            **NEUTRAL,
        }
        try:
            reply = await self._ask("/completions", body)
        except _Refused as error:
            self._refused += 1
            if self._refused >= MOST_REFUSED and not self._answers:
                raise ServerError(f"{error}; so it did to the first {self._refused} requests") from error
            if self._refused == 1:
                logger.warning("%s; conversations with such prompts are skipped, and counted as %s", error, REFUSED)
            return GenerationResult([], REFUSED, server=self.provenance)
        try:
            choice, model = reply["choices"][0], reply.get("model", self.model)
            reason, ids = choice["finish_reason"], choice.get("token_ids")
            if ids is None:
                ids = self._tokenised(request.prompt_ids, choice, reply["usage"]["completion_tokens"])
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerError(
                f"{self.url}/completions answers in another form than OpenAI's: {_short(reply)}"
            ) from error
        self._answers = True
        if model != self.model:
            raise ServerError(f"{self.url} was asked for the model {self.model!r}, but {model!r} answered")
        if reason not in ("stop", "length"):  # it shuts down, for example
            raise _Failed(f"an answer ended with finish_reason {reason!r}")
        stopped = bool(ids) and ids[-1] in self._target.stop_ids
        if ids is None or (reason == "stop" and not stopped):
            return GenerationResult([], NO_ROUND_TRIP, server=self.provenance)
        return GenerationResult(ids, "stop" if stopped else "length", server=self.provenance)

    def _tokenised(self, prompt: Sequence[int], choice: Mapping[str, Any], count: int) -> list[int] | None:
        """The ids of an answer's text, and the stop id, if they are `count`; else None."""
        tokenizer = self._target.tokenizer
        whole = encode(tokenizer, decode(tokenizer, prompt) + choice["text"])
        ids = whole[len(prompt) :]
        if choice["finish_reason"] == "stop":
            stated = (choice.get("matched_stop"), choice.get("stop_reason"))  # of SGLang, of vLLM
            ids.append(next((one for one in stated if one in self._target.stop_ids), self._end_id))
        return ids if whole[: len(prompt)] == list(prompt) and len(ids) == count else None

    async def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of a reply: of a POST with a body, which is tried again, else of a GET.

        Raises `_Failed`, `_Refused`, `ServerError`.
        """
        try:
            if body is None:
                once = self.client.with_options(max_retries=0, timeout=30.0)
                return await once.get(path, cast_to=object)
            limit = Timeout(READ_TIMEOUT_S + body["max_tokens"], connect=30.0)
            return await self.client.post(path, cast_to=object, body=body, options={"timeout": limit})
        except APIConnectionError as error:
            raise _Failed(f"{type(error.__cause__ or error).__name__} {error.__cause__ or error}") from error
        except APIStatusError as error:
            said = f"status {error.status_code}: {_short(error.response.text)}"
            if error.status_code in LATER or error.status_code >= 500:
                raise (_Busy if error.status_code == 429 else _Failed)(said) from error
            hint = "; set OPENAI_API_KEY to its key" if error.status_code in (401, 403) else ""
            kind = _Refused if error.status_code in TOO_LONG else ServerError
            raise kind(f"{self.url}{path} refuses ({said}){hint}") from error


def same_model(target: str, name: str | None) -> bool:
    """Whether a server's name is the target's: equal hub ids in any case, folders with one real path, or the same last
    part where one of them has no organisation or folder and so does not contradict."""
    if not name:
        return False
    if target.lower() == name.lower() or (Path(target).exists() and os.path.realpath(target) == os.path.realpath(name)):
        return True
    (before, _, mine), (after, _, theirs) = (one.rstrip("/").rpartition("/") for one in (target, name))
    return not (before and after) and mine.removesuffix(".gguf").lower() == theirs.removesuffix(".gguf").lower()


def server_urls(servers: Sequence[str]) -> list[str]:
    """The addresses, each once, with /v1 at its end. servers: URLs, or files with one a line (# begins a comment).

    Raises `ServerError` for what is neither.
    """
    listed: list[str] = []
    for one in servers:
        lines = Path(one).read_text(encoding="utf-8").splitlines() if Path(one).is_file() else [one]
        listed += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    wrong = next((url for url in listed if not url.startswith(("http://", "https://"))), None)
    if wrong is not None or not listed:
        raise ServerError(
            f"rollouts.server: {wrong or ', '.join(servers)!r} is neither a URL nor a file with one a line; write a "
            "URL as http://host:8000/v1"
        )
    return list(dict.fromkeys(f"{url.rstrip('/').removesuffix('/v1')}/v1" for url in listed))


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 300 else f"{text[:297]}..."
