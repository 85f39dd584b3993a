"""The thread between asyncio and the engine: nothing hangs, whatever the engine does."""

from __future__ import annotations

import asyncio

import pytest

from toolkit.infer.engine.engine import Engine
from toolkit.infer.engine.engine_thread import EngineFailure, EngineThread
from toolkit.infer.request.params import SamplingParams

PARAMS = SamplingParams(max_tokens=20)
LIMIT_S = 20  # a hang is a failure, not a slow test


def echo(prompt_ids):
    return [i + 10 for i in prompt_ids]


def with_thread(engine, work):
    """Runs `work(thread)` with a started thread, under a time limit, and closes it."""
    thread = EngineThread(engine)
    thread.start()
    try:
        return asyncio.run(asyncio.wait_for(work(thread), LIMIT_S))
    finally:
        engine.allow.set()
        thread.close()


async def read(ticket):
    return [token async for update in ticket.updates() for token in update.token_ids]


def test_concurrent_requests_get_their_own_tokens(scripted):
    """Twelve clients over a batch of four: updates must not be mixed up, and every stream must end."""

    async def work(thread):
        tickets = [await thread.submit([n, n + 1, n + 2], PARAMS) for n in range(12)]
        return await asyncio.gather(*(read(ticket) for ticket in tickets))

    answers = with_thread(scripted(echo, run=2), work)
    assert answers == [[n + 10, n + 11, n + 12, 2] for n in range(12)]


def test_aborts_that_fail_after_a_failed_step_end_nothing_else(tiny_target, monkeypatch):
    """The engine kept the rows, and the thread ended. The rows are freed without their text, and the server goes on."""
    engine = Engine(tiny_target)
    (wanted,) = engine.generate([[5, 6, 7]], PARAMS)
    engine.allow = asyncio.Event()  # as the scripted engine has

    def fail(row, request):
        raise RuntimeError("no room for the prefix")

    async def work(thread):
        long = SamplingParams(max_tokens=400, ignore_eos=True)
        first, second, third = [await thread.submit([one], long) for one in (8, 9, 10)]
        await anext(third.updates())
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_keep", fail)
            thread.abort(first)
            for ticket in (second, third):
                with pytest.raises(EngineFailure, match="no room"):
                    await read(ticket)
        answer = await read(await thread.submit([5, 6, 7], PARAMS))
        engine.check_integrity()
        assert thread.alive and not engine.has_work()
        return answer

    assert with_thread(engine, work) == wanted.output_ids
    engine.close()


def test_submit_cancelled_while_waiting_is_aborted(scripted):
    """A client that leaves before its request was taken must not leave it behind in the engine."""
    engine = scripted(lambda prompt_ids: [7] * 100 if prompt_ids == [1] else echo(prompt_ids))
    engine.step_seconds = 0.002

    async def work(thread):
        first = await thread.submit([1], SamplingParams(max_tokens=100))
        engine.allow.clear()
        await asyncio.sleep(0.05)  # the thread is inside a step now, and takes no commands
        waiting = asyncio.ensure_future(thread.submit([2, 3, 4], PARAMS))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        engine.allow.set()
        await read(first)
        return await read(await thread.submit([9], PARAMS))

    assert with_thread(engine, work) == [19, 2]
    assert [request.prompt_ids for request in engine.aborted] == [[2, 3, 4]] and not engine.has_work()
