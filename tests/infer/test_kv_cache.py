"""Rows and entries stay what they were when the cache grows or moves them."""

from __future__ import annotations

import torch

from toolkit.infer.attention_plan import TreePlan
from toolkit.infer.kv_cache import KVCache, KVShape

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))


def filled(rows: int, span: int) -> KVCache:
    cache = KVCache(SHAPE)
    cache.reserve(rows, span)
    cache.store.copy_(torch.randn(cache.store.shape, generator=torch.Generator().manual_seed(0)))
    return cache


def test_growth_keeps_what_is_cached():
    """Growing in either direction copies every row; sizes grow geometrically and are never reduced."""
    cache = filled(3, 60)
    before = cache.store.clone()
    assert (cache.rows, cache.span) == (3, 64)
    cache.reserve(4, 65)
    assert cache.rows == 6 and cache.span >= 96
    assert torch.equal(cache.store[:, :, :3, :64], before) and not cache.store[:, :, 3:].any()
    store = cache.store
    cache.reserve(2, 10)
    assert cache.store is store
    assert torch.equal(cache.flat_keys[1].view(cache.rows, cache.span, 2, 4), cache.keys[1])


def test_rows_and_entries_move_in_every_layer():
    """A layer left out would mix two requests."""
    cache = filled(3, 64)
    before = cache.store.clone()
    cache.move_row(0, 2, 40)
    assert torch.equal(cache.store[:, :, 0, :40], before[:, :, 2, :40])
    assert torch.equal(cache.store[:, :, 0, 40:], before[:, :, 0, 40:])
    cache.move_entries(torch.tensor([64 + 3, 64 + 4]), torch.tensor([64 + 4, 64 + 9]))  # overlapping: read before write
    assert torch.equal(cache.store[:, :, 1, 3], before[:, :, 1, 4]) and torch.equal(
        cache.store[:, :, 1, 4], before[:, :, 1, 9]
    )


def test_tree_plan_writes_behind_each_row():
    """Rows of different lengths: node j of a row lies at length + j, and earlier nodes stay."""
    cache = filled(2, 64)
    before = cache.store.clone()
    k, v = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4)
    plan = TreePlan(cache, [5, 9], torch.ones(2, 3, 5, dtype=torch.bool))
    plan.attend(1, torch.randn(2, 4, 3, 4), k, v, 0.5, None, None)
    for row, length in ((0, 5), (1, 9)):
        assert torch.equal(cache.keys[1][row, length + 2 : length + 5], k[row].transpose(0, 1))
        assert torch.equal(cache.values[1][row, length + 2 : length + 5], v[row].transpose(0, 1))
        assert torch.equal(cache.keys[1][row, : length + 2], before[1, 0, row, : length + 2])
    assert torch.equal(cache.store[0], before[0])
