"""What a cache holds stays where the pool says it is."""

from __future__ import annotations

import torch

from toolkit.infer.attention.metadata import prompt_metadata
from toolkit.infer.cache.kv_cache import KVCache, KVShape
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.kernels.paged_reference import compact, gather_pages

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


def test_an_accepted_path_moves_to_the_positions_of_plain_decoding():
    """Node 2 of the first row moves to where node 1 was, and node 5 to where node 2 was; the rest stays."""
    pool = PagePool(2, 16)
    cache = KVCache(SHAPE, pool)
    assert pool.grow(1, 16) and pool.grow(0, 16)
    for layer, store in enumerate((*cache.keys, *cache.values)):
        store.copy_((torch.arange(len(store)) + 1000 * layer)[:, None, None].expand_as(store))
    path, accepted = torch.tensor([[0, 2, 5], [0, 1, 0]]), torch.tensor([2, 1])
    compact(
        cache.keys, cache.values, pool.table(0, 2, 1, torch.device("cpu")), 16, torch.tensor([3, 7]), path, accepted
    )
    for layer, store in enumerate((*cache.keys, *cache.values)):
        wanted = [*range(36), 37, 40, *range(38, 48)]  # the first row's page is page 2
        assert store[:48, 0, 0].tolist() == [1000 * layer + place for place in wanted]


def test_addresses_cost_no_memory_until_they_are_touched():
    """64 GiB here, which no test machine has to spare."""
    cache = KVCache(KVShape(2, 8, 128, torch.float32, torch.device("cpu")), PagePool(16, 2**18))
    cache.keys[1][-1] = 1.0
    assert cache.keys[1][-1].sum() == 8 * 128
