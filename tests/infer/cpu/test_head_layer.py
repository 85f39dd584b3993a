"""A draft head's layers in native calls: what the head's own layers compute in torch, a row by itself."""

from __future__ import annotations

import pytest
import torch

from toolkit.heads.eagle2 import Eagle2Config, Eagle2Head
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.infer.attention.fused_layer import replaced
from toolkit.infer.attention.metadata import PagedAttend, tree_metadata
from toolkit.infer.cache.kv_cache import KVCache, KVShape
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.cpu import blocked_product
from toolkit.infer.cpu.decoder_layer import head_layer, head_norm
from toolkit.infer.cpu.int8_linear import quantize_head
from toolkit.infer.cpu.packed_linear import pack_linears
from toolkit.infer.engine.cpu_door import install_native_ops
from toolkit.infer.kernels.paged_reference import Scoring
from toolkit.targets.fixed_linear import copy_weights

pytestmark = pytest.mark.skipif(not blocked_product.available(), reason="no native products on this CPU")

SIZES = dict(
    hidden_size=96, intermediate_size=160, num_attention_heads=3, num_key_value_heads=1, head_dim=64, vocab_size=400,
    max_position_embeddings=256, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)  # fmt: skip
EAGLE3 = SIZES | dict(target_hidden_size=96, draft_vocab_size=200, aux_layer_ids=(0, 1, 2))
HEADS = {
    "eagle3": lambda: Eagle3Head(Eagle3Config(**EAGLE3)),
    "eagle3-variants": lambda: Eagle3Head(
        Eagle3Config(**EAGLE3, num_hidden_layers=2, norm_before_residual=True, attention_bias=True, qk_norm=True)
    ),
    "eagle2": lambda: Eagle2Head(Eagle2Config(**SIZES, num_hidden_layers=2)),
    "mtp": lambda: MtpHead(MtpConfig(**SIZES)),
}
LENGTHS, NODES = (3, 40, 17), 6  # some past a page


def head_of(kind: str, quantization: str | None, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    install_native_ops(torch.device("cpu"))
    head = HEADS[kind]().bfloat16().eval().requires_grad_(False)
    for one in head.parameters():
        one.copy_(torch.rand_like(one) + 0.5 if one.dim() == 1 else torch.randn_like(one) * 0.15)
    if quantization is not None:
        (quantize_head if quantization == "int8" else pack_linears)(head)
    return head


def native_of(head) -> dict:
    layers = [one for one in head.modules() if hasattr(one, "norm_before_attention")]
    calls = {layer: head_layer(layer) for layer in layers}
    return {layer: call for layer, call in calls.items() if call is not None}


def run(head, calls, rows: slice = slice(None), *, window: int | None = None, nodes: int = NODES) -> torch.Tensor:
    """States [B, N, H] of a tree after LENGTHS, over a cache of random keys and values."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    lengths = torch.tensor(LENGTHS)
    pool = PagePool(3, 96)
    for row, length in enumerate(LENGTHS):
        pool.grow(row, length + nodes)
    cache = KVCache(KVShape(head.config.layers, 1, 64, torch.bfloat16, torch.device("cpu")), pool)
    for one in (*cache.keys, *cache.values):
        one.copy_(random(*one.shape))
    mask = torch.eye(nodes, dtype=torch.bool) | (torch.rand(3, nodes, nodes, generator=generator) < 0.5).tril()
    embeds, hidden = random(3, nodes, 96), random(3, nodes, 96)
    at = lengths[:, None] + torch.arange(nodes) // 2
    table = pool.table(0, 3, pool.pages_of(96), torch.device("cpu"))[rows]
    metadata = tree_metadata(cache, table, lengths[rows], 40 + nodes, mask[rows], (at - at[:, :1])[rows])
    attend = PagedAttend(metadata, Scoring(64**-0.5, window), (len(table), nodes))
    given = (one[rows].flatten(0, 1) for one in (embeds, hidden, at))
    with replaced(calls), torch.inference_mode():
        return head(*given, attend, 96).view(len(table), nodes, -1)


@pytest.mark.parametrize("quantization", ["packed", "int8"])
@pytest.mark.parametrize("kind", HEADS)
def test_native_layers_are_those_of_torch_and_a_row_stands_alone(kind, quantization):
    """Few nodes in one call; many nodes, and a window, in two calls around the attention."""
    head = head_of(kind, quantization)
    calls = native_of(head)
    assert len(calls) == head.config.layers
    for more in ({}, {"nodes": 20}, {"window": 7}):
        ours, theirs = run(head, calls, **more), run(head, {}, **more)
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()
        assert torch.equal(ours[1:2], run(head, calls, slice(1, 2), **more))


@pytest.mark.parametrize("quantization", ["packed", "int8"])
def test_new_weights_are_those_of_the_layer(quantization):
    head, other = head_of("eagle3", quantization), head_of("eagle3", None, seed=5)
    calls = native_of(head)
    before = run(head, calls)
    copy_weights(head, other.state_dict())
    after = run(head, calls)
    assert not torch.equal(before, after)
    fresh = head_of("eagle3", quantization, seed=5)
    assert torch.equal(after, run(fresh, native_of(fresh)))


def test_plain_weights_and_hooked_parts_run_in_torch():
    assert not native_of(head_of("eagle3", None))
    head = head_of("eagle3", "packed")
    head.midlayer.mlp.down_proj.register_forward_hook(lambda *_given: None)
    assert not native_of(head)


def test_the_norm_is_that_of_torch():
    head = head_of("eagle3", None)
    for rows in (1, 70):
        x = torch.randn(rows, 96).bfloat16()
        expected = torch.nn.functional.rms_norm(x.float(), (96,), head.norm.weight.float(), 1e-5)
        torch.testing.assert_close(head_norm(x, head.norm.weight, 1e-5).float(), expected, rtol=8e-3, atol=1e-3)
