"""Rows and entries stay what they were when the cache grows or moves them."""

from __future__ import annotations

import torch

from toolkit.infer.attention.attention_plan import TreePlan
from toolkit.infer.attention.kv_cache import KVCache, KVShape

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"), value_dim=3)


def filled(rows: int, span: int) -> KVCache:
    cache = KVCache(SHAPE)
    cache.reserve(rows, span)
    generator = torch.Generator().manual_seed(0)
    for store in cache.stores:
        store.copy_(torch.randn(store.shape, generator=generator))
    return cache


def copies(cache: KVCache) -> list[torch.Tensor]:
    return [store.clone() for store in cache.stores]


def test_growth_keeps_what_is_cached():
    """Growing in either direction copies every row; sizes grow geometrically and are never reduced."""
    cache = filled(3, 60)
    before = copies(cache)
    assert (cache.rows, cache.span) == (3, 64)
    cache.reserve(4, 65)
    assert cache.rows == 6 and cache.span >= 96
    for store, old in zip(cache.stores, before, strict=True):
        assert torch.equal(store[:, :3, :64], old) and not store[:, 3:].any()
    stores = cache.stores
    cache.reserve(2, 10)
    assert cache.stores is stores
    assert torch.equal(cache.flat_keys[1].view(cache.rows, cache.span, 2, 4), cache.keys[1])
    assert torch.equal(cache.flat_values[1].view(cache.rows, cache.span, 2, 3), cache.values[1])


def test_values_are_as_wide_as_keys_unless_told():
    """Only latent attention has two widths."""
    cache = KVCache(KVShape(1, 2, 4, torch.float32, torch.device("cpu")))
    assert cache.keys[0].shape[-1] == cache.values[0].shape[-1] == 4


def test_rows_and_entries_move_in_every_layer():
    """A layer left out, or values that stay behind their keys, would mix two requests."""
    cache = filled(3, 64)
    before = copies(cache)
    cache.move_row(0, 2, 40)
    for store, old in zip(cache.stores, before, strict=True):
        assert torch.equal(store[:, 0, :40], old[:, 2, :40]) and torch.equal(store[:, 0, 40:], old[:, 0, 40:])
    cache.move_entries(torch.tensor([64 + 3, 64 + 4]), torch.tensor([64 + 4, 64 + 9]))  # overlapping: read before write
    for store, old in zip(cache.stores, before, strict=True):
        assert torch.equal(store[:, 1, 3], old[:, 1, 4]) and torch.equal(store[:, 1, 4], old[:, 1, 9])


def test_tree_plan_writes_behind_each_row():
    """Rows of different lengths: node j of a row lies at length + j, and earlier nodes stay."""
    cache = filled(2, 64)
    before = copies(cache)
    k, v = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 3)
    plan = TreePlan(cache, [5, 9], torch.ones(2, 3, 5, dtype=torch.bool))
    plan.attend(1, torch.randn(2, 4, 3, 4), k, v, 0.5, None, None)
    for row, length in ((0, 5), (1, 9)):
        for store, old, new in zip(cache.stores, before, (k, v), strict=True):
            assert torch.equal(store[1, row, length + 2 : length + 5], new[row].transpose(0, 1))
            assert torch.equal(store[1, row, : length + 2], old[1, row, : length + 2])
    for store, old in zip(cache.stores, before, strict=True):
        assert torch.equal(store[0], old[0])
