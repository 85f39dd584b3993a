"""Clients of an OpenAI-compatible server, for benchmarks/serve.py: so many at a time, each with its next prompt."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Reply:
    """One streamed answer. Times in seconds; first_s: from the request to the first text, last_s: to its last text.

    error: why there is no answer; None: there is one. accept_length: as the server says it; None: it does not.
    """

    text: str = ""
    tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    accept_length: float | None = None
    error: str | None = None

    @property
    def per_token_s(self) -> float | None:
        """Time per token after the first text."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)


async def events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, up to its end."""
    async for line in reply.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


async def ask(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Reply:
    """One chat, streamed and greedy."""
    began = time.perf_counter()
    text, first, last, usage = [], None, None, {}
    try:
        async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
            if reply.status_code != 200:
                return Reply(error=f"status {reply.status_code}: {(await reply.aread()).decode()[:200]}")
            async for event in events(reply):
                if "error" in event:
                    return Reply(error=str(event["error"])[:200])
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    if piece := choice["delta"].get("content"):
                        last = time.perf_counter() - began
                        first = last if first is None else first
                        text.append(piece)
    except httpx.HTTPError as error:
        return Reply(error=f"{type(error).__name__}: {error}")
    if not usage:
        return Reply(error="the stream ended without a usage")
    accepted = (usage.get("speculative") or {}).get("accept_length")
    return Reply("".join(text), usage["completion_tokens"], first, last, accepted)


async def ask_all(url: str, bodies: Sequence[Mapping[str, Any]], clients: int) -> tuple[list[Reply], float]:
    """All bodies by so many clients: the replies in the order of the bodies, and the seconds for all."""
    left, replies = iter(enumerate(bodies)), [Reply()] * len(bodies)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:

        async def one_client() -> None:
            for number, body in left:
                replies[number] = await ask(client, body)

        began = time.perf_counter()
        await asyncio.gather(*(one_client() for _ in range(clients)))
    return replies, time.perf_counter() - began


def quantile(values: Sequence[float], share: float) -> float | None:
    """The least value that `share` of the values do not exceed; None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def times(firsts: Sequence[float | None], per_token: Sequence[float | None]) -> dict[str, float | None]:
    """The columns of times of a row: median and p99 of the time to the first token, median of the time per token."""
    first = [one for one in firsts if one is not None]
    return {
        "ttft_p50": quantile(first, 0.5),
        "ttft_p99": quantile(first, 0.99),
        "tpot_p50": quantile([one for one in per_token if one is not None], 0.5),
    }
