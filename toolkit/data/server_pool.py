"""Answers by several OpenAI-compatible servers, in place of the bundled engine.

All servers take requests from one queue. A failed request goes back to it, so that another server takes it. The server
that failed rests, longer after each failure, and then has to show its model again. When all servers have failed
MOST_FAILURES times in a row, the run ends. A server that is busy rests too, but it has not failed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

from toolkit.data.generation import GenerationRequest, GenerationResult
from toolkit.data.openai_server import OpenAIServer, ServerError, Unavailable
from toolkit.log import get_logger
from toolkit.targets.facts import ServedTarget

logger = get_logger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0  # it doubles with each failure
MOST_FAILURES = 8  # about a minute and a half


@dataclass
class _Member:
    """A server in the pool. rests, failures: since its last answer. resume_at: time.monotonic() of its next request."""

    server: OpenAIServer
    rests: int = 0
    failures: int = 0
    resume_at: float = 0.0
    error: str = ""


class ServerPool:
    """A context manager whose `generate` is answered by the servers of `target`.

    per_server: requests that each server has at once. The key in OPENAI_API_KEY, if there is one, is sent to them.
    Entering raises `ServerError` if no server answers, or one serves another model.
    """

    def __init__(self, target: ServedTarget, per_server: int) -> None:
        self._target, self._per_server = target, per_server
        key = os.environ.get("OPENAI_API_KEY")
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._members = [_Member(OpenAIServer(url, target, self._client)) for url in server_urls(target.servers)]
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
        return self._per_server * len(self._members)

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer for which the target and the servers have room. Raises `ServerError`."""
        stated = (self._target.max_context, *(one.server.context_length for one in self._members))
        known = [length for length in stated if length is not None]
        if not known:
            raise ServerError(
                f"neither the config of {self._target.name} nor a server states a context length; add "
                "max_position_embeddings to the config.json"
            )
        return min(known)

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GenerationResult]]:
        """A `GenerateFn`. Raises `ServerError` if a server refuses a request, and when no server answers any more."""
        wave = _Wave(requests)
        workers = self._runner.run(self._start(wave))
        try:
            for _ in requests:
                answered = self._runner.run(wave.done.get())
                if isinstance(answered, Exception):
                    raise answered
                yield answered
        finally:
            for worker in workers:
                worker.cancel()

    async def _start(self, wave: _Wave) -> list[asyncio.Task[None]]:
        count = min(self._per_server, len(wave.requests))
        return [asyncio.create_task(self._work(one, wave)) for one in self._members for _ in range(count)]

    async def _work(self, one: _Member, wave: _Wave) -> None:
        """Answer requests of the wave until cancelled. An error ends up in `done`."""
        try:
            while True:
                while (rest := one.resume_at - time.monotonic()) > 0:
                    await asyncio.sleep(rest)
                await self._answer_next(one, wave)
        except Exception as error:  # `generate` raises it
            wave.done.put_nowait(error)

    async def _answer_next(self, one: _Member, wave: _Wave) -> None:
        index = await wave.todo.get()
        began = time.monotonic()
        try:
            if one.rests:  # it may have started again, with another model
                await one.server.identify()
            result = await one.server.answer(wave.requests[index])
        except Unavailable as error:
            wave.todo.put_nowait(index)
            self._failed(one, began, error)
            return
        if one.rests:
            logger.info("%s answers again", one.server.url)
        one.rests = one.failures = 0
        wave.done.put_nowait((index, result))

    def _failed(self, one: _Member, began: float, error: Unavailable) -> None:
        """Let the server rest. Failures of requests from before its last rest are one failure."""
        again = began >= one.resume_at
        one.rests += again
        one.failures += again and not error.busy
        one.error = str(error)
        doubled = FIRST_WAIT_S * 2 ** min(max(one.rests - 1, 0), 10)
        wait = max(min(doubled, LONGEST_WAIT_S), error.wait)
        one.resume_at = max(one.resume_at, time.monotonic() + wait)
        if again and one.rests in (1, MOST_FAILURES):
            logger.warning("%s: %s; it is asked again in %.0f s", one.server.url, error, wait)
        if all(other.failures >= MOST_FAILURES for other in self._members):
            raise ServerError(self._silent("no server answers any more"))

    async def _identify_all(self) -> None:
        await asyncio.gather(*map(self._identify, self._members))
        if all(one.failures for one in self._members):
            raise ServerError(self._silent("no server answers"))
        for one in self._members:
            if one.failures:
                logger.warning("%s: %s; it gets requests when it answers", one.server.url, one.error)

    async def _identify(self, one: _Member) -> None:
        try:
            await one.server.identify()
        except Unavailable as error:
            one.rests, one.failures, one.error = 1, 1, str(error)

    def _silent(self, what: str) -> str:
        lines = "".join(f"\n  {one.server.url}: {one.error}" for one in self._members)
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
        await self._client.aclose()


class _Wave:
    """The requests of one call. todo: indices that no server works on. done: results and errors."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self.requests = requests
        self.todo: asyncio.Queue[int] = asyncio.Queue()
        for index in range(len(requests)):
            self.todo.put_nowait(index)
        self.done: asyncio.Queue[tuple[int, GenerationResult] | Exception] = asyncio.Queue()


def server_urls(servers: Sequence[str]) -> list[str]:
    """The addresses, each once, with /v1 at its end. servers: URLs, or files with one a line (# begins a comment).

    Raises `ServerError` for what is neither.
    """
    found: list[str] = []
    for one in servers:
        listed = [one]
        if not _is_url(one) and Path(one).is_file():
            lines = (line.strip() for line in Path(one).read_text(encoding="utf-8").splitlines())
            listed = [line for line in lines if line and not line.startswith("#")]
        for url in listed:
            if not _is_url(url):
                place = "" if url == one else f" in {one}"
                raise ServerError(
                    f"rollouts.server: {url!r}{place} is neither a URL nor a file with one a line; write a URL as "
                    "http://host:8000/v1"
                )
            found.append(f"{url.rstrip('/').removesuffix('/v1')}/v1")
    if not found:
        raise ServerError(f"rollouts.server: {', '.join(servers)} lists no URL; write one a line")
    return list(dict.fromkeys(found))


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))
