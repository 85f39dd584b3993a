"""200 clients of one server in this process: random sizes, some leave, some have a deadline. Nothing may be wrong.

For benchmarks/serve.py --soak, and for a test with a tiny model. In float32 every complete answer must be that of plain
decoding, and every cut one its beginning. Afterwards no request, page or thread may be left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from serve import events, times

from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.answer import Answer
from toolkit.infer.load.load_engine import load_engine
from toolkit.infer.request.detokenize import Detokenizer
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Update
from toolkit.infer.server.app import build_app, listen, uvicorn_config
from toolkit.infer.server.completions import Served
from toolkit.infer.server.request_params import DefaultSampling
from toolkit.targets.target import Target

SIZES = (1, 4, 16, 48)
CLIENTS, REQUESTS, TOKENS, CONTEXT = 200, 4, 16384, 512
NAME = "soak"


@dataclass(frozen=True)
class PlainAnswer:
    """What plain decoding writes."""

    ids: list[int]
    text: str


@dataclass
class Soak:
    """What the clients saw. seen: by outcome; times in seconds, of complete streams."""

    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    first_s: list[float | None] = field(default_factory=list)
    per_token_s: list[float | None] = field(default_factory=list)
    tokens: int = 0


def plain_answers(
    target: Target, prompts: Sequence[Sequence[int]], sizes: Sequence[int] = SIZES
) -> dict[tuple[int, int], PlainAnswer]:
    """By number of the prompt and size: the greedy answer of plain decoding."""
    keys = [(number, size) for number in range(len(prompts)) for size in sizes]
    engine = Engine(target, context_length=CONTEXT)
    detokenizer = Detokenizer(target.tokenizer)
    params = [SamplingParams(max_tokens=size) for _, size in keys]
    requests = engine.generate([prompts[number] for number, _ in keys], params)
    engine.close()
    answers = {}
    for key, request in zip(keys, requests, strict=True):
        answer = Answer(detokenizer.stream((), prompts[key[0]]))
        text = answer.feed(Update.since(request, 0))
        answers[key] = PlainAnswer(request.output_ids[: answer.n_tokens], text)
    return answers


async def soak(
    url: str,
    prompts: Sequence[Sequence[int]],
    wanted: Mapping[tuple[int, int], PlainAnswer],
    *,
    clients: int = CLIENTS,
    requests: int = REQUESTS,
    seed: int = 0,
) -> Soak:
    """Every client asks for so many answers, one after the other."""
    found, keys = Soak(), sorted(wanted)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as client:

        async def one_client(number: int) -> None:
            chance = random.Random(f"{seed} {number}")
            for _ in range(requests):
                key = chance.choice(keys)
                body = {
                    "model": NAME, "prompt": list(prompts[key[0]]), "max_tokens": key[1], "temperature": 0,
                    "priority": chance.choice((0, 0, 0, -1, 1)), "speculative": chance.random() < 0.9,
                }  # fmt: skip
                fate = chance.choices(("whole", "leaves", "deadline"), (6, 2, 2))[0]
                if fate == "deadline":
                    body["timeout"] = chance.uniform(0.01, 3.0)
                patience = chance.uniform(0.0, 2.0) if fate == "leaves" else None
                ask = _streamed if chance.random() < 0.5 else _whole
                with contextlib.suppress(TimeoutError):  # this client has left
                    async with asyncio.timeout(patience):
                        await ask(client, body, wanted[key], found)
                        continue
                found.seen["left"] += 1

        await asyncio.gather(*(one_client(number) for number in range(clients)))
    return found


async def _whole(client: httpx.AsyncClient, body: Mapping[str, Any], plain: PlainAnswer, found: Soak) -> None:
    reply = await client.post("/v1/completions", json={**body, "return_token_ids": True})
    if reply.status_code == 408:
        found.seen["too late"] += 1
    elif reply.status_code != 200:
        found.wrong.append(f"status {reply.status_code}: {reply.text[:200]}")
    else:
        choice = reply.json()["choices"][0]
        _judge(choice["finish_reason"], choice["token_ids"], plain.ids, found)


async def _streamed(client: httpx.AsyncClient, body: Mapping[str, Any], plain: PlainAnswer, found: Soak) -> None:
    began, text, first, last = time.perf_counter(), "", None, None
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        if reply.status_code == 408:
            found.seen["too late"] += 1
            return
        if reply.status_code != 200:
            found.wrong.append(f"status {reply.status_code}: {(await reply.aread()).decode()[:200]}")
            return
        reason = None
        async for event in events(reply):
            if "error" in event:
                found.wrong.append(str(event["error"]))
                return
            choice = event["choices"][0]
            text, reason = text + choice["text"], choice["finish_reason"]
            if choice["text"]:
                last = time.perf_counter() - began
                first = last if first is None else first
    _judge(reason, text, plain.text, found)
    if reason in ("stop", "length"):
        found.first_s.append(first)
        many = first is not None and last is not None and len(plain.ids) > 1
        found.per_token_s.append((last - first) / (len(plain.ids) - 1) if many else None)
        found.tokens += len(plain.ids)


def _judge(reason: str | None, got: Any, plain: Any, found: Soak) -> None:
    """A complete answer is the plain one, a cut one is its beginning."""
    if reason == "abort":
        found.seen["cut"] += 1
        # A stream that is cut within a character ends with U+FFFD.
        same = got == plain[: len(got)] or (isinstance(got, str) and plain.startswith(got.rstrip("\ufffd")))
    else:
        found.seen["complete"] += 1
        same = reason in ("stop", "length") and got == plain
    if not same:
        found.wrong.append(f"{reason}: {got!r} in place of {plain!r}")


@contextlib.contextmanager
def server_of(served: Served) -> Iterator[str]:
    """A server in a thread of this process; yields its address."""
    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn_config(build_app(served), 5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)


def served_of(engine: Engine, target: Target, shape_name: str | None) -> Served:
    """The engine as a server has it."""
    return Served(NAME, target.tokenizer, engine, engine.context_length, "fp_soak", shape_name, DefaultSampling())


def leaked_pages(engine: Engine) -> int:
    """Pages that are held by none of the kept prefixes, at a time when no request runs. Waits for the last abort."""
    deadline = time.monotonic() + 30
    while engine.has_work() and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.check_integrity()
    prefixes = engine._memory._prefixes
    return engine._memory.pool.held - (0 if prefixes is None else len(prefixes.pages))


def resident_bytes() -> int:
    """Memory of this process."""
    gc.collect()
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmRSS"))


def soak_row(target: Mapping[str, Any], draft: Path | None, prompts: Sequence[str]) -> dict[str, Any]:
    """The row of 200 clients, after a first wave that fills caches and pools."""
    config = EngineConfig(
        target=target["target"], revision=target["revision"], draft="none" if draft is None else str(draft),
        dtype="float32", quantization="none", draft_quantization="none", device="cpu", context_length=CONTEXT,
        max_total_tokens=TOKENS,
    )  # fmt: skip
    loaded = load_engine(config)
    model, engine = loaded.target, loaded.engine
    ids = [model.tokenizer(prompt)["input_ids"][: CONTEXT - max(SIZES)] for prompt in prompts]
    wanted = plain_answers(model, ids)
    with server_of(served_of(engine, model, loaded.shape_name)) as url:
        asyncio.run(soak(url, ids, wanted, requests=1))
        before, began = (resident_bytes(), threading.active_count()), time.perf_counter()
        found = asyncio.run(soak(url, ids, wanted, seed=1))
        seconds = time.perf_counter() - began
        left = leaked_pages(engine)
        after = (resident_bytes(), threading.active_count())
    engine.close()
    return {
        "server": "ours-soak",
        "settings": "float32, in the process of the clients",
        "clients": CLIENTS,
        "requests": CLIENTS * REQUESTS,
        **times(found.first_s, found.per_token_s),
        "tokens_per_s": found.tokens / seconds,
        "errors": len(found.wrong),
        "first_error": next(iter(found.wrong), None),
        "outcomes": dict(found.seen),
        "leaked_pages": left,
        "leaked_threads": after[1] - before[1],
        "memory_growth_bytes": after[0] - before[0],
    }
