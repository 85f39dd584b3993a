"""What an engine says that it holds, and when a request left the queue."""

from __future__ import annotations

from toolkit.infer.cache.cache_manager import MemorySettings
from toolkit.infer.engine.engine import Engine
from toolkit.infer.engine.engine_load import EngineLoad, load_of
from toolkit.infer.request.params import SamplingParams


def test_load(small_target):
    """Rows, the queue and pages, at every stage; kept prefixes are no load of the running requests."""
    engine = Engine(small_target, max_running_requests=1, context_length=64, memory=MemorySettings(640))
    assert load_of(engine) == EngineLoad(0, 0, 0, 0, 640)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    first, second = (engine.add_request(range(1, 21), params) for _ in range(2))
    assert load_of(engine) == EngineLoad(0, 2, 0, 0, 640)
    engine.step()
    assert load_of(engine) == EngineLoad(1, 1, 32, 32, 640)  # the kept page is the row's
    assert second.admitted_at is None
    assert first.submitted_at <= first.admitted_at <= first.first_token_at
    while engine.has_work():
        engine.step()
    assert load_of(engine) == EngineLoad(0, 0, 0, 16, 640)
    assert first.finished_at <= second.admitted_at <= second.first_token_at


def test_rows_without_room_are_counted(small_target):
    """Once each: an operator sees that the cache is too small, not how often the queue was looked at."""
    engine = Engine(small_target, max_running_requests=2, context_length=64, memory=MemorySettings(80))
    engine.generate([[3] * 40, [4] * 40], SamplingParams(max_tokens=9, ignore_eos=True))
    assert load_of(engine).refused_rows == 1
