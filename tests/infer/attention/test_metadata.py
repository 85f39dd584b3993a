"""Plans and the reference kernel against attention written out query by query."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.infer.conftest import places_of
from toolkit.infer.attention import metadata as attention_metadata
from toolkit.infer.attention.metadata import prompt_metadata, tree_metadata
from toolkit.infer.cache.kv_cache import KVCache, KVShape
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.kernels.dispatch import REFERENCE
from toolkit.infer.kernels.paged_reference import Scoring
from toolkit.infer.kernels.tree_reference import ancestor_mask

SINKS = torch.tensor([-2.0, 0.5, 3.0, 1.0, -0.5, 2.0])
KNOBS = [  # window, softcap, sinks, width of values
    (None, None, None, 8),
    (None, None, SINKS, 5),
    (4, 2.0, SINKS, 11),
]


@pytest.fixture(params=["gathered", "through-pages"])
def make_cache(request, monkeypatch):
    """A cache of three rows full of noise, with pages for 40 positions each, taken in an odd order.

    through-pages: the ops that read the page tables, as a GPU has them.
    """
    if request.param == "through-pages":
        monkeypatch.setattr(attention_metadata, "ops_for", lambda device: replace(REFERENCE, paged_width=256))

    def make(value_dim) -> KVCache:
        pool = PagePool(3, 40, page_size=4)
        cache = KVCache(KVShape(1, 2, 8, torch.float32, torch.device("cpu"), value_dim), pool)
        for length in range(4, 41, 4):
            assert all(pool.grow(row, length) for row in (2, 0, 1))
        generator = torch.Generator().manual_seed(2)
        for store in (*cache.keys, *cache.values):
            store.copy_(torch.randn(store.shape, generator=generator))
        return cache

    return make


def row_of(cache: KVCache, store: torch.Tensor, row: int) -> torch.Tensor:
    """[40, Hkv, D or Dv]: the entries of one row in their order."""
    return store[places_of(cache.pool, 40, row)[0]]


def one_query(q, keys, values, scaling, softcap, sinks):
    """q [Hq, D], keys [S, Hkv, D] and values [S, Hkv, Dv] it may see, sinks [Hq] or None -> [Hq, Dv]."""
    out = []
    for head in range(len(q)):
        shared = head // (len(q) // keys.shape[1])
        scores = keys[:, shared] @ q[head] * scaling
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.exp()
        total = weights.sum() + (0 if sinks is None else sinks[head].exp())
        out.append(weights / total @ values[:, shared])
    return torch.stack(out)


@pytest.mark.parametrize(("window", "softcap", "sinks", "value_dim"), KNOBS)
@pytest.mark.parametrize("starts", [[0, 0], [0, 11]])
def test_prompt_plan(make_cache, window, softcap, sinks, value_dim, starts):
    """Prompts behind a running row, and behind what was read of them: causal, windowed, capped, with sinks."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 9, 8, generator=generator)
    k, v = (torch.randn(2, 2, 9, width, generator=generator) for width in (8, value_dim))
    cache = make_cache(value_dim)
    before = [row_of(cache, cache.keys[0], row) for row in range(3)]
    out = prompt_metadata(cache, 1, starts, 9).attend(0, q, k, v, Scoring(0.3, window, softcap, sinks))
    assert torch.equal(row_of(cache, cache.keys[0], 0), before[0])
    for row, start in enumerate(starts):
        all_keys, all_values = (row_of(cache, store[0], 1 + row) for store in (cache.keys, cache.values))
        assert torch.equal(all_keys[:start], before[1 + row][:start])
        assert torch.equal(all_keys[start : start + 9], k[row].transpose(0, 1))
        for at in range(9):
            see = slice(max(0, start + at + 1 - window) if window else 0, start + at + 1)
            wanted = one_query(q[row, :, at], all_keys[see], all_values[see], 0.3, softcap, sinks)
            assert torch.allclose(out[row, at], wanted, atol=1e-5)


@pytest.mark.parametrize(("window", "softcap", "sinks", "value_dim"), KNOBS)
@pytest.mark.parametrize(("lengths", "span"), [([7, 7], 13), ([3, 11], 40)])
def test_tree_plan(make_cache, window, softcap, sinks, value_dim, lengths, span):
    """A node sees its row's prefix and its ancestors, by their positions where there is a window (depth, not place).

    The span may be that of the longest row, or the whole table as in recorded rounds."""
    generator = torch.Generator().manual_seed(1)
    cache = make_cache(value_dim)
    parents = torch.tensor([[0, 0, 1, 1, 3], [0, 1, 1, 2, 4]])
    depths = torch.tensor([[0, 1, 1, 2, 2, 3], [0, 1, 2, 2, 3, 4]])
    mask = ancestor_mask(parents, 4)
    q = torch.randn(2, 6, 6, 8, generator=generator)
    k, v = (torch.randn(2, 2, 6, width, generator=generator) for width in (8, value_dim))
    table = cache.pool.table(0, 2, 10, q.device)
    metadata = tree_metadata(cache, table, torch.tensor(lengths), span, mask, depths)
    out = metadata.attend(0, q, k, v, Scoring(0.3, window, softcap, sinks))
    for row, length in enumerate(lengths):
        for node in range(6):
            at = length + depths[row, node].item()
            near = [p for p in range(length) if not window or at - p < window]
            kin = [n for n in range(6) if mask[row, node, n] and (not window or at - length - depths[row, n] < window)]
            keys = torch.cat((row_of(cache, cache.keys[0], row)[near], k[row].transpose(0, 1)[kin]))
            values = torch.cat((row_of(cache, cache.values[0], row)[near], v[row].transpose(0, 1)[kin]))
            wanted = one_query(q[row, :, node], keys, values, 0.3, softcap, sinks)
            assert torch.allclose(out[row, node], wanted, atol=1e-5)
