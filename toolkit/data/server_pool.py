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
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
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
BUSY = 429
TOO_LONG = (400, 413)  # what servers say to a prompt beyond their context, and to other requests that they cannot read
# Sampling by temperature and top_p alone: the defaults of servers come from the target's generation config.
NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class ServerError(ValueError):
    """No server answers, or one refuses a request, or serves another model."""


class _Failed(Exception):
    """A request failed, and may succeed later, here or on another server. status: of the reply; None: none came."""

    def __init__(self, said: str, status: int | None = None) -> None:
        super().__init__(said)
        self.status = status


@contextmanager
def open_servers(target: ServedTarget, per_server: int) -> Iterator[ServerPool]:
    """Yield the pool of the servers of `target`, which answers inside of the block.

    per_server: requests that each server has at once. The key in OPENAI_API_KEY, if there is one, is sent to them.
    Raises `ServerError` if no server answers, or one serves another model.
    """
    with asyncio.Runner() as runner:  # its loop runs only inside of the pool's methods: no thread shares anything
        pool = ServerPool(target, per_server, runner)
        try:
            runner.run(pool.identify())
            yield pool
        finally:
            runner.run(pool.close())


class ServerPool:
    """Servers that answer requests together."""

    def __init__(self, target: ServedTarget, per_server: int, runner: asyncio.Runner) -> None:
        self._target, self._per_server, self._runner = target, per_server, runner
        self._servers = [_Server(url, target) for url in server_urls(target.servers)]

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer for which the target and the servers have room, as far as they state it."""
        stated = [self._target.max_context, *(one.context_length for one in self._servers)]
        return min((length for length in stated if length is not None), default=sys.maxsize)

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[tuple[int, GenerationResult]]:
        """A `GenerateFn`. Raises `ServerError` if a server refuses a request, and when no server answers any more."""
        todo: asyncio.Queue[tuple[int, GenerationRequest]] = asyncio.Queue()
        done: asyncio.Queue[tuple[int, GenerationResult] | Exception] = asyncio.Queue()
        waiting, unanswered = enumerate(requests), 0

        async def work(server: _Server) -> None:
            """Answer requests until cancelled. An error ends up in `done`."""
            try:
                while True:
                    await server.recover()
                    index, request = await todo.get()
                    try:
                        done.put_nowait((index, await server.answer(request)))
                    except _Failed as error:
                        todo.put_nowait((index, request))
                        await self._rest(server, error)
            except Exception as error:
                done.put_nowait(error)

        async def start() -> list[asyncio.Task[None]]:
            return [asyncio.create_task(work(one)) for one in self._servers for _ in range(self._per_server)]

        workers = self._runner.run(start())
        try:
            while True:
                # As many wait as run, so that a server that has ended one has another.
                while todo.qsize() < len(workers) and (numbered := next(waiting, None)) is not None:
                    todo.put_nowait(numbered)
                    unanswered += 1
                if not unanswered:
                    return
                answered = self._runner.run(done.get())
                if isinstance(answered, Exception):
                    raise answered
                unanswered -= 1
                yield answered
        finally:
            for worker in workers:  # the servers notice that their requests end
                worker.cancel()

    async def _rest(self, server: _Server, error: _Failed) -> None:
        logger.warning("%s: %s; it rests for %.0f s", server.url, error, REST_S)
        if error.status == BUSY:  # no room now: it is not down
            await asyncio.sleep(REST_S)
            return
        server.error = str(error)
        if all(one.error for one in self._servers):
            raise ServerError(self._silent("no server answers any more")) from error

    async def identify(self) -> None:
        """Ask all servers for their model. Raises `ServerError` if none answers, or one serves another."""
        await asyncio.gather(*(one.identify() for one in self._servers))
        if all(one.error for one in self._servers):
            raise ServerError(self._silent("no server answers"))
        for one in self._servers:
            if one.error:
                logger.warning("%s: %s; it gets requests when it answers", one.url, one.error)

    def _silent(self, what: str) -> str:
        lines = "".join(f"\n  {one.url}: {one.error}" for one in self._servers)
        return f"{what}:{lines}\nstart a server and type the command again: what was answered is kept"

    async def close(self) -> None:
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
        self._lock = asyncio.Lock()
        self._refused = False  # a request

    async def recover(self) -> None:
        """Wait until the server answers. It may have started again with another model, so it is asked for that."""
        async with self._lock:
            while self.error:
                await asyncio.sleep(REST_S)
                await self.identify()

    async def identify(self) -> None:
        """Find the target among the server's models, and set `error` if it cannot be asked.

        Raises `ServerError` if it serves another model.
        """
        try:
            cards = (await self._ask("/models"))["data"]
            named = {card["id"]: card for card in cards}
        except _Failed as failed:
            self.error = str(failed)
            return
        except (KeyError, TypeError) as error:
            raise ServerError(f"{self.url}/models lists no models as OpenAI's API does; give such a server") from error
        wanted, name = self._target.served_model, self._target.name
        # `root` (vLLM, SGLang) is what was loaded under the name `id`.
        own = [one for one in cards if same_model(name, one["id"]) or same_model(name, one.get("root"))]
        card = next(iter(own), None) if wanted is None else named.get(wanted)
        if card is None:
            asked = f"the target is {name!r}" if wanted is None else f"rollouts.server_model is {wanted!r}"
            raise ServerError(
                f"{self.url} serves {', '.join(map(repr, named)) or 'no model'}, but {asked}; serve the target there, "
                "or set rollouts.server_model to the name that the target has there"
            )
        self.error = ""
        self.model, self.context_length = card["id"], card.get("max_model_len")
        self.provenance = {"model": self.model, "engine": card.get("owned_by"), "version": await self._version()}
        logger.info("%s answers as %s", self.url, self.provenance)

    async def _version(self) -> str | None:
        for path in ("/version", "/get_server_info"):  # vLLM and ours, SGLang
            try:
                return str((await self._ask(self.url.removesuffix("/v1") + path))["version"])
            except (_Failed, ServerError, KeyError, TypeError):
                continue
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
        except APIStatusError as error:
            if not self._refused:
                said = "%s refuses (%s); conversations with such prompts are skipped, and counted as %s"
                logger.warning(said, self.url, _said(error), REFUSED)
            self._refused = True
            return GenerationResult([], REFUSED, server=self.provenance)
        try:
            choice, model = reply["choices"][0], reply.get("model", self.model)
            reason, ids = choice["finish_reason"], choice.get("token_ids")
            if ids is None:
                ids = self._tokenised(request.prompt_ids, choice, reply["usage"]["completion_tokens"])
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerError(f"{self.url}/completions answers in another form than OpenAI's: {reply}") from error
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
            end_of_turn = end_of_turn_id(tokenizer)
            own = tokenizer.eos_token_id if end_of_turn is None else end_of_turn
            stated = (choice.get("matched_stop"), choice.get("stop_reason"))  # of SGLang, of vLLM
            ids.append(next((one for one in stated if one in self._target.stop_ids), own))
        return ids if whole[: len(prompt)] == list(prompt) and len(ids) == count else None

    async def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of a reply: of a POST with a body, which is tried again, else of a GET.

        Raises `_Failed`, `ServerError`, and `APIStatusError` for a request that is TOO_LONG.
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
            if body is not None and error.status_code in TOO_LONG:
                raise
            if error.status_code in (408, 409, BUSY) or error.status_code >= 500:  # what the client has tried again
                raise _Failed(_said(error), error.status_code) from error
            hint = "; set OPENAI_API_KEY to its key" if error.status_code in (401, 403) else ""
            raise ServerError(f"{self.url}{path} refuses ({_said(error)}){hint}") from error


def _said(error: APIStatusError) -> str:
    return f"status {error.status_code}: {' '.join(error.response.text.split())[:300]}"


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
        lines = Path(one).read_text(encoding="utf-8-sig").splitlines() if Path(one).is_file() else [one]
        listed += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    wrong = next((url for url in listed if not url.startswith(("http://", "https://"))), None)
    if wrong is not None or not listed:
        raise ServerError(
            f"rollouts.server: {wrong or ', '.join(servers)!r} is neither a URL nor a file with one a line; write a "
            "URL as http://host:8000/v1"
        )
    return list(dict.fromkeys(f"{url.rstrip('/').removesuffix('/v1')}/v1" for url in listed))
