"""What a cache holds stays where the pool says it is."""

from __future__ import annotations

import torch

from toolkit.infer.attention.metadata import prompt_metadata
from toolkit.infer.cache.kv_cache import KVCache, KVShape
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.kernels.paged_reference import gather_pages

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"), value_dim=3)


def test_padding_leaves_page_0_as_it_is():
    """Every row reads page 0 after its end and multiplies it by 0, and 0 * nan is nan."""
    pool = PagePool(2, 16, page_size=4)
    cache = KVCache(SHAPE, pool)
    assert pool.grow(0, 3) and pool.grow(1, 8)
    metadata = prompt_metadata(cache, 0, [0, 0], 6)
    keys, values = gather_pages(metadata.write(1, *(torch.full((2, 2, 6, width), torch.nan) for width in (4, 3))))
    assert keys[0, :4].isnan().all() and keys[1, :6].isnan().all() and values[1, :6].isnan().all()
    assert not keys[0, 4:].any() and not keys[1, 6:].any() and not values[0, 4:].any()


def test_addresses_cost_no_memory_until_they_are_touched():
    """64 GiB here, which no test machine has to spare."""
    cache = KVCache(KVShape(2, 8, 128, torch.float32, torch.device("cpu")), PagePool(16, 2**18))
    cache.keys[1][-1] = 1.0
    assert cache.keys[1][-1].sum() == 8 * 128
