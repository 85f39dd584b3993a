"""What a cache holds stays where the pool says it is."""

from __future__ import annotations

import pytest
import torch

from toolkit.infer.cache.kv_cache import KVCache, KVShape
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.kernels.paged_reference import compact

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"), value_dim=3)


def numbered(pool: PagePool) -> KVCache:
    """Every entry holds its own place."""
    cache = KVCache(SHAPE, pool)
    for layer, store in enumerate((*cache.keys, *cache.values)):
        store.copy_((torch.arange(len(store)) + 1000 * layer)[:, None, None].expand_as(store))
    return cache


def row_of(cache: KVCache, store: torch.Tensor, row: int, length: int) -> list[float]:
    return store[cache.pool.places(row, [0], length, store.device)[0]][:, 0, 0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_new_memory_is_zero_in_every_dtype(dtype):
    """Memory that comes on touch is read by masked keys before anything is written there."""
    cache = KVCache(KVShape(1, 2, 4, dtype, torch.device("cpu")), PagePool(2, 64))
    assert cache.keys[0].dtype == dtype and not cache.keys[0].any() and not cache.values[0].any()
    assert cache.keys[0].shape[-1] == cache.values[0].shape[-1] == 4


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_row_that_moves_takes_its_entries_along_in_every_layer(contiguous):
    """A layer left out, or values that stay behind their keys, would mix two requests."""
    pool = PagePool(3, 16, contiguous=contiguous, page_size=4)
    cache = numbered(pool)
    for row, length in ((0, 5), (1, 3), (2, 10)):
        assert pool.grow(row, length)
    stores = (*cache.keys, *cache.values)
    wanted = [row_of(cache, store, 2, 10) for store in stores]
    other = [row_of(cache, store, 1, 3) for store in stores]
    pool.release(0)
    pool.move(0, 2)
    assert [row_of(cache, store, 0, 10) for store in stores] == wanted
    assert [row_of(cache, store, 1, 3) for store in stores] == other
    pool.check_integrity([])


def test_an_accepted_path_moves_to_the_positions_of_plain_decoding():
    """Node 2 of the first row moves to where node 1 was, and node 5 to where node 2 was; the rest stays."""
    cache = numbered(PagePool(2, 16))
    path, accepted = torch.tensor([[0, 2, 5], [0, 1, 0]]), torch.tensor([2, 1])
    table = cache.pool.table(0, 2, 1, torch.device("cpu"))
    compact(cache.keys, cache.values, table, 16, torch.tensor([3, 7]), path, accepted)
    for layer, store in enumerate((*cache.keys, *cache.values)):
        wanted = [0, 1, 2, 3, 5, 8, *range(6, 32)]
        assert store[:32, 0, 0].tolist() == [1000 * layer + place for place in wanted]


def test_addresses_cost_no_memory_until_they_are_touched():
    """A row has addresses for a whole context: 64 GiB here, which no test machine has to spare."""
    cache = KVCache(KVShape(2, 8, 128, torch.float32, torch.device("cpu")), PagePool(16, 2**19, 16))
    cache.keys[1][-1] = 1.0
    assert cache.keys[1][-1].sum() == 8 * 128


def test_a_long_row_gives_its_memory_back():
    """A server that has once had a long request would else hold its memory for ever. (Memory given back is zero.)"""
    pool = PagePool(2, 16 * 1024)
    cache = KVCache(KVShape(1, 8, 64, torch.float32, torch.device("cpu")), pool)
    pool.grow(0, 16 * 200)
    pool.grow(1, 16 * 10)
    for row, length in ((0, 16 * 200), (1, 16 * 10)):
        for store in (cache.contiguous_keys[0], cache.contiguous_values[0]):
            store[row, :length] = 1.0
    pool.release(0)
    pool.release(1)
    for store in (cache.contiguous_keys[0], cache.contiguous_values[0]):
        assert store[0, : 16 * 64].all() and store[0, 16 * 64 :].sum() == 0
        assert store[1, : 16 * 10].all()  # a short row's memory is wanted again soon
