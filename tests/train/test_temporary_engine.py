"""The engine in the midst of a training leaves nothing behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.params import SamplingParams
from toolkit.train import temporary_engine as passing_engine


@pytest.mark.parametrize("fails", [False, True])
def test_memory_goes_back_to_the_device(tiny_target, tiny_draft, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """On a GPU pages that are freed but kept by torch, or an engine that something still holds, leave the next step
    without room: the cache is emptied before the engine is built and again when it is gone."""
    alive: list[weakref.ref] = []
    emptied: list[list[bool]] = []

    def build(*arguments, **options) -> Engine:
        engine = Engine(*arguments, **options)
        alive.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(passing_engine, "Engine", build)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append([one() is not None for one in alive]))

    def use(engine: Engine) -> list[int]:
        (request,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4))
        if fails:
            raise RuntimeError(f"after {len(request.output_ids)} tokens")
        return list(request.output_ids)

    gc.disable()
    try:
        written = passing_engine.with_engine(use, tiny_target, tiny_draft, max_running_requests=1, context_length=64)
        assert len(written) == 4 and not fails and emptied == [[], [False]]
    except RuntimeError as error:
        assert str(error) == "after 4 tokens" and fails and len(emptied) == 2
    finally:
        gc.enable()
