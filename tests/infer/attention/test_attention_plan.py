"""Plans and the reference kernel against attention written out query by query."""

from __future__ import annotations

import pytest
import torch

from toolkit.infer.attention.attention_plan import PromptPlan, TreePlan
from toolkit.infer.attention.kv_cache import KVCache, KVShape
from toolkit.infer.draft_tree import ancestor_mask

SINKS = torch.tensor([-2.0, 0.5, 3.0, 1.0, -0.5, 2.0])
KNOBS = [  # window, softcap, sinks, width of values
    (None, None, None, 8),
    (4, None, None, 8),
    (None, 2.0, None, 8),
    (4, 2.0, None, 8),
    (None, None, SINKS, 8),
    (4, None, SINKS, 8),
    (None, None, None, 5),
    (4, 2.0, SINKS, 11),
]


def empty_cache(value_dim):
    return KVCache(KVShape(1, 2, 8, torch.float32, torch.device("cpu"), value_dim))


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
def test_prompt_plan(window, softcap, sinks, value_dim):
    """Right-padded prompts behind a running row: causal, windowed, capped, with sinks; heads in the right order."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 9, 8, generator=generator)
    k, v = (torch.randn(2, 2, 9, width, generator=generator) for width in (8, value_dim))
    cache = empty_cache(value_dim)
    out = PromptPlan(cache, 1, 2, 9).attend(0, q, k, v, 0.3, window, softcap, sinks)
    for row in range(2):
        assert torch.equal(cache.keys[0][1 + row, :9], k[row].transpose(0, 1))
        for at in range(9):
            see = slice(max(0, at + 1 - window) if window else 0, at + 1)
            keys, values = k[row].transpose(0, 1)[see], v[row].transpose(0, 1)[see]
            wanted = one_query(q[row, :, at], keys, values, 0.3, softcap, sinks)
            assert torch.allclose(out[row, at], wanted, atol=1e-5)


@pytest.mark.parametrize(("window", "softcap", "sinks", "value_dim"), KNOBS)
@pytest.mark.parametrize("lengths", [[7, 7], [3, 11]])
def test_tree_plan(window, softcap, sinks, value_dim, lengths):
    """A node sees its row's prefix and its ancestors, by their positions where there is a window (depth, not place)."""
    generator = torch.Generator().manual_seed(1)
    cache = empty_cache(value_dim)
    cache.reserve(2, 64)
    for store in cache.stores:
        store.copy_(torch.randn(store.shape, generator=generator))
    parents = torch.tensor([[0, 0, 1, 1, 3], [0, 1, 1, 2, 4]])
    depths = torch.tensor([[0, 1, 1, 2, 2, 3], [0, 1, 2, 2, 3, 4]])
    mask = ancestor_mask(parents, 4)
    q = torch.randn(2, 6, 6, 8, generator=generator)
    k, v = (torch.randn(2, 2, 6, width, generator=generator) for width in (8, value_dim))
    out = TreePlan(cache, lengths, mask, depths).attend(0, q, k, v, 0.3, window, softcap, sinks)
    for row, length in enumerate(lengths):
        for node in range(6):
            at = length + depths[row, node].item()
            near = [p for p in range(length) if not window or at - p < window]
            kin = [n for n in range(6) if mask[row, node, n] and (not window or at - length - depths[row, n] < window)]
            keys = torch.cat((cache.keys[0][row, near], k[row].transpose(0, 1)[kin]))
            values = torch.cat((cache.values[0][row, near], v[row].transpose(0, 1)[kin]))
            wanted = one_query(q[row, :, node], keys, values, 0.3, softcap, sinks)
            assert torch.allclose(out[row, node], wanted, atol=1e-5)
