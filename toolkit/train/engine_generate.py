"""The bundled engine as the `generate` callable that prompts and rollouts are written with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from toolkit.data.generation import GenerateFn, GenerationRequest, GenerationResult
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.acceptance import summarise
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request


def engine_generate(
    engine: Engine,
    draft_used: str | None = None,
    on_end: Callable[[GenerationRequest, Request], None] | None = None,
) -> GenerateFn:
    """`generate` over `engine`, which is kept full: the next request goes in as soon as one ends.

    `draft_used` goes into every result's provenance. `on_end` sees what was asked and what became of it, before the
    result is given out. Leaving the loop early (an error, Ctrl-C) aborts what runs.
    """

    def generate(requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GenerationResult]]:
        waiting = iter(enumerate(requests))
        running: dict[int, tuple[int, Request]] = {}
        try:
            # One more than the engine has rows for, so that it never steps with a free one.
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
    assert request.finish_reason is not None, "only what has ended has a result"
    stats = summarise(request.events)
    return GenerationResult(
        list(request.output_ids), request.finish_reason, draft_used, stats.verify_steps, stats.accepted
    )


def _fill(
    engine: Engine,
    waiting: Iterator[tuple[int, GenerationRequest]],
    running: dict[int, tuple[int, Request]],
    limit: int,
) -> bool:
    """Hand over requests until `limit` run or wait in the engine; False when nothing is left to do."""
    while len(running) < limit:
        following = next(waiting, None)
        if following is None:
            break
        index, wanted = following
        params = SamplingParams(
            temperature=wanted.temperature, top_p=wanted.top_p, max_tokens=wanted.max_tokens, seed=wanted.seed
        )
        request = engine.add_request(wanted.prompt_ids, params)
        running[id(request)] = (index, request)
    return bool(running)
