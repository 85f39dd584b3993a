"""An engine that runs during a training frees its memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.params import SamplingParams
from toolkit.train import temporary_engine


@pytest.mark.parametrize("fails", [False, True])
def test_memory_goes_back_to_the_device(tiny_target, tiny_draft, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """On a GPU, memory that torch caches, or an engine that is still referenced, leaves too little for the next step.
    So the cache is emptied before the engine is built and again after it is freed."""
    alive: list[weakref.ref] = []
    emptied: list[list[bool]] = []

    def build(*arguments, **options) -> Engine:
        engine = Engine(*arguments, **options)
        alive.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(temporary_engine, "Engine", build)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append([one() is not None for one in alive]))

    def use(engine: Engine) -> list[int]:
        (request,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4))
        if fails:
            raise RuntimeError(f"after {len(request.output_ids)} tokens")
        return list(request.output_ids)

    gc.disable()
    try:
        written = temporary_engine.with_engine(use, tiny_target, tiny_draft, max_running_requests=1, context_length=64)
        assert len(written) == 4 and not fails and emptied == [[], [False]]
    except RuntimeError as error:
        assert str(error) == "after 4 tokens" and fails and len(emptied) == 2
    finally:
        gc.enable()
