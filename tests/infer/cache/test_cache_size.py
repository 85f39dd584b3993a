"""The cache of a GPU is sized by its free memory. What does not fit is an error that says what would, not a raw OOM."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from toolkit.bench.side_by_side import SideBySide
from toolkit.infer.cache import cache_manager
from toolkit.infer.cache.cache_manager import ROOM, CacheNeed
from toolkit.infer.cache.kv_cache import KVShape
from toolkit.infer.cache.page_pool import PAGE_SIZE
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.params import EngineError

GPU = torch.device("cuda", 0)
LLAMA_8B = KVShape(32, 8, 128, torch.bfloat16, GPU)  # 131,072 bytes a token
HEAD = 4096  # bytes a token of its EAGLE-3 head
NEED = CacheNeed(LLAMA_8B, 16, token_bytes=HEAD)
GB = 10**9


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The free memory of a GPU that is not there: bytes can be set."""
    found = SimpleNamespace(bytes=0)
    monkeypatch.setattr(cache_manager, "free_memory", lambda device: found.bytes)
    return found


def test_a_context_that_does_not_fit_is_an_error_with_the_numbers(free):
    """An 8B target's whole context beside its weights on a 24 GB card. The limit that the message names is then
    accepted, and a page more is not."""
    free.bytes = 7 * GB
    with pytest.raises(EngineError, match="lower `context_length` to at most 40400"):
        NEED.pages(131072)
    assert 40400 + ROOM <= NEED.pages(40400) * PAGE_SIZE < 40400 + ROOM + 32
    with pytest.raises(EngineError, match="at most 40400"):
        NEED.pages(40416)
    assert NEED.pages(1552) * PAGE_SIZE == 16 * (1552 + ROOM)
    with pytest.raises(EngineError, match="`max_total_tokens` is 60000, .* lower it to at most 51776"):
        replace(NEED, tokens=60000).pages(1552)
    assert replace(NEED, tokens=51776).pages(1552) == 51776 // PAGE_SIZE


def test_a_context_that_nobody_asked_for_is_what_fits(free, caplog):
    """`toolkit serve` of an 8B target starts on a small GPU, and training's engines, whose context no option sets. The
    log has the numbers of the error. On a CPU, or with room, it is the target's whole context."""
    free.bytes = 7 * GB
    with caplog.at_level(logging.WARNING):
        context = NEED.context(131072)
    assert context == 40400 and NEED.pages(context) * PAGE_SIZE >= 40400 + ROOM
    assert "needs 17.9 GB of cache, and 5.6 GB are there (0.8 of 7.0 GB free): `context_length` is 40400" in caplog.text
    free.bytes = 60 * GB
    assert NEED.context(131072) == 131072
    free.bytes = 0
    assert replace(NEED, shape=replace(LLAMA_8B, device=torch.device("cpu"))).context(131072) == 131072


def test_engines_of_one_measurement_share_one_budget(tiny_target, tiny_draft, free, monkeypatch):
    """Else the plain engine takes 0.8 of the memory, and the speculative one runs out of it, or preempts its requests
    while plain decoding does not, which no table shows. Both caches fit into the share of one engine."""
    made: list[int] = []

    def build(config, target, draft, **_):
        assert config.mem_fraction_static is None or config.max_total_tokens is None
        need = replace(NEED, tokens=config.max_total_tokens, share=config.mem_fraction_static)
        made.append(need.pages(512) * PAGE_SIZE)
        free.bytes -= made[-1] * (LLAMA_8B.bytes_per_token + HEAD)
        return SimpleNamespace(engine=Engine(tiny_target, context_length=64, max_total_tokens=made[-1]))

    monkeypatch.setattr("toolkit.bench.side_by_side.build_engine", build)
    on_gpu = SimpleNamespace(device=GPU)
    for config, share in ((EngineConfig(), 0.8), (EngineConfig(mem_fraction_static=0.6), 0.6)):
        free.bytes = 3 * GB
        made.clear()
        with SideBySide(config, on_gpu, 2) as engines:
            engines.open(None)
            engines.open(tiny_draft)
        assert made[0] == made[1] and 0.95 * share < 1 - free.bytes / (3 * GB) <= share
