"""The cache of a GPU is sized by its free memory. What does not fit is an error that says what would, not a raw OOM."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from toolkit.bench.side_by_side import SideBySide
from toolkit.infer.cache import cache_manager
from toolkit.infer.cache.cache_manager import ROOM, MemorySettings
from toolkit.infer.cache.kv_cache import KVShape
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.params import EngineError

GPU = torch.device("cuda", 0)
LLAMA_8B = KVShape(32, 8, 128, torch.bfloat16, GPU)  # 131,072 bytes a token
HEAD = 4096  # bytes a token of its EAGLE-3 head
GB = 10**9


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The free memory of a GPU that is not there: bytes can be set."""
    found = SimpleNamespace(bytes=0)
    monkeypatch.setattr(cache_manager, "free_memory", lambda device: found.bytes)
    return found


def capacity(settings: MemorySettings, rows: int, context: int) -> int:
    pool = settings.pool(LLAMA_8B, rows, context, token_bytes=HEAD)
    return pool.capacity * pool.page_size


def test_a_context_that_does_not_fit_is_an_error_with_the_numbers(free):
    """An 8B target's whole context beside its weights on a 24 GB card. Each limit the message names is then accepted,
    and a page more is not."""
    free.bytes = 7 * GB
    with pytest.raises(EngineError) as found:
        capacity(MemorySettings(), 16, 131072)
    assert "lower `context_length` to at most 40400, or 1552 for 16 whole requests at once" in str(found.value)
    assert 40400 + ROOM <= capacity(MemorySettings(), 16, 40400) < 40400 + ROOM + 32
    with pytest.raises(EngineError, match="at most 40400"):
        capacity(MemorySettings(), 16, 40416)
    assert capacity(MemorySettings(), 16, 1552) == 16 * (1552 + ROOM)


def test_a_context_that_nobody_asked_for_is_what_fits(free, caplog):
    """`toolkit serve` of an 8B target starts on a small GPU, and training's engines, whose context no option sets. The
    log has the numbers of the error. On a CPU, or with room, it is the target's whole context."""
    beside = (0, HEAD)
    free.bytes = 7 * GB
    with caplog.at_level(logging.WARNING):
        context = MemorySettings().context(LLAMA_8B, 16, None, 131072, *beside)
    assert context == 40400 and capacity(MemorySettings(), 16, context) >= 40400 + ROOM
    assert "needs 17.9 GB of cache, and 5.6 GB are there (0.8 of 7.0 GB free): `context_length` is 40400" in caplog.text
    assert MemorySettings().context(LLAMA_8B, 16, 131072, 131072, *beside) == 131072, "asked for, it is an error later"
    free.bytes = 60 * GB
    assert MemorySettings().context(LLAMA_8B, 16, None, 131072, *beside) == 131072
    on_cpu = replace(LLAMA_8B, device=torch.device("cpu"))
    free.bytes = 0
    assert MemorySettings().context(on_cpu, 16, None, 131072, *beside) == 131072
    assert MemorySettings().context(on_cpu, 16, 200000, 131072, *beside) == 131072


def test_engines_of_one_measurement_share_one_budget(tiny_target, tiny_draft, free, monkeypatch):
    """Else the plain engine takes 0.8 of the memory, and the speculative one runs out of it, or preempts its requests
    while plain decoding does not, which no table shows. Both caches fit into the share of one engine."""
    made: list[int] = []

    def build(config, target, draft, **_):
        assert config.mem_fraction_static is None or config.max_total_tokens is None
        settings = MemorySettings(config.max_total_tokens, mem_fraction_static=config.mem_fraction_static)
        made.append(capacity(settings, 16, 512))
        free.bytes -= made[-1] * (LLAMA_8B.bytes_per_token + HEAD)
        engine = Engine(tiny_target, context_length=64, memory=MemorySettings(made[-1]))
        return SimpleNamespace(engine=engine)

    monkeypatch.setattr("toolkit.bench.side_by_side.build_engine", build)
    on_gpu = SimpleNamespace(device=GPU)
    for config, share in ((EngineConfig(), 0.8), (EngineConfig(mem_fraction_static=0.6), 0.6)):
        free.bytes = 3 * GB
        made.clear()
        with SideBySide(config, on_gpu, 2) as engines:
            engines.open(None)
            engines.open(tiny_draft)
        assert made[0] == made[1] and 0.95 * share < 1 - free.bytes / (3 * GB) <= share
