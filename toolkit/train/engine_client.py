"""How training uses the engine: as the `generate` callable that writes prompts and rollouts, and for a short time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from toolkit.data.generation import REFUSED, GenerateFn, GenerationRequest, GenerationResult
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.load.load_engine import build_engine
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request, summarise
from toolkit.targets.target import Target

Result = TypeVar("Result")


def engine_generate(
    engine: Engine,
    draft_used: str | None = None,
    on_end: Callable[[GenerationRequest, Request], None] | None = None,
) -> GenerateFn:
    """A `generate` callable over `engine`. It adds a request as soon as one ends, so that the batch stays full.

    draft_used: goes into every result's provenance. on_end: called with each request before its result is yielded.
    When the caller leaves the loop early (an error, Ctrl-C), running requests are aborted.
    """

    def generate(requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GenerationResult]]:
        waiting = iter(enumerate(requests))
        running: dict[int, tuple[int, Request]] = {}
        try:
            # One more than max_running_requests, so that no step has a free row.
            while _fill(engine, waiting, running, engine.max_running_requests + 1):
                for request in engine.step():
                    if request.finish_reason is not None:
                        index, _ = running.pop(id(request))
                        if on_end is not None:
                            on_end(requests[index], request)
                        yield index, _result(request, draft_used)
        finally:
            for _, request in running.values():
                engine.abort(request)

    return generate


def _result(request: Request, draft_used: str | None) -> GenerationResult:
    assert request.finish_reason is not None, "a request has a result only after it has ended"
    stats = summarise(request.events)
    # "abort": its logits were not finite, or its prompt had no room. The other requests go on.
    reason = REFUSED if request.finish_reason == "abort" else request.finish_reason
    return GenerationResult(list(request.output_ids), reason, draft_used, stats.verify_steps, stats.accepted)


def _fill(
    engine: Engine,
    waiting: Iterator[tuple[int, GenerationRequest]],
    running: dict[int, tuple[int, Request]],
    limit: int,
) -> bool:
    """Add requests until `limit` run or wait in the engine; False when no request is left."""
    while len(running) < limit:
        upcoming = next(waiting, None)
        if upcoming is None:
            break
        index, asked = upcoming
        params = SamplingParams(
            temperature=asked.temperature, top_p=asked.top_p, max_tokens=asked.max_tokens, seed=asked.seed
        )
        request = engine.add_request(asked.prompt_ids, params)
        running[id(request)] = (index, request)
    return bool(running)


def with_engine(
    use: Callable[[Engine], Result], config: EngineConfig, target: Target, draft: Draft | None = None
) -> Result:
    """The result of `use` with an engine of `config` over loaded models. `use` must not keep the engine: its memory is
    freed.

    On a GPU torch caches freed memory. Without `empty_cache` the engine would find little free memory, and the next
    training step, whose tensors have other sizes, might find none.
    """
    torch.cuda.empty_cache()  # does nothing without a GPU
    engine = build_engine(config, target, draft, short_lived=True).engine
    try:
        return use(engine)
    finally:
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
