"""Decoder layers of a target and of a draft head in native calls: what transformers and the head compute in torch, a
row by itself, with the weights of now."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conftest import train_tokenizer
from toolkit.heads.eagle2 import Eagle2Config, Eagle2Head
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.infer.attention.fused_layer import _Uncached, replaced
from toolkit.infer.attention.metadata import PackedMetadata, PagedAttend, tree_metadata
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.cache.kv_cache import KVCache, KVShape
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.cpu import blocked_product
from toolkit.infer.cpu.decoder_layer import head_layer, head_norm
from toolkit.infer.cpu.int8_linear import quantize_head, quantize_model
from toolkit.infer.cpu.packed_linear import pack_linears
from toolkit.infer.engine.cpu_door import install_native_ops, pack
from toolkit.infer.kernels.paged_reference import Scoring
from toolkit.targets.fixed_linear import copy_weights
from toolkit.targets.target import Target

pytestmark = pytest.mark.skipif(not blocked_product.available(), reason="no native products on this CPU")

SIZES = dict(
    vocab_size=400, hidden_size=96, intermediate_size=160, num_attention_heads=3, num_key_value_heads=1, head_dim=64,
    max_position_embeddings=256,
)  # fmt: skip
LENGTHS, NODES = torch.tensor([3, 40, 17]), 6  # some past a page


def tree_over_random_keys(shape: KVShape, nodes: int, rows: slice = slice(None)):
    """A tree of bfloat16 nodes after LENGTHS -> metadata, positions [B, N], the cache."""
    generator = torch.Generator().manual_seed(1)
    pool = PagePool(3, 96)
    for row, length in enumerate(LENGTHS.tolist()):
        pool.grow(row, length + nodes)
    cache = KVCache(shape, pool)
    for one in (*cache.keys, *cache.values):
        one.copy_(torch.randn(one.shape, generator=generator))
    mask = torch.eye(nodes, dtype=torch.bool) | (torch.rand(3, nodes, nodes, generator=generator) < 0.5).tril()
    at = LENGTHS[:, None] + torch.arange(nodes) // 2
    table = pool.table(0, 3, pool.pages_of(96), torch.device("cpu"))[rows]
    metadata = tree_metadata(cache, table, LENGTHS[rows], 40 + nodes, mask[rows], (at - at[:, :1])[rows])
    return metadata, at[rows], cache


# -- of a target -------------------------------------------------------------------------------------------------------

TARGET = SIZES | dict(num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.2)
FAMILIES = {
    "llama": {},
    "llama-bias": {"attention_bias": True},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {},
}


def build(
    family: str, quantization: str | None = None, dtype: torch.dtype = torch.bfloat16, **changes
) -> TargetForward:
    torch.manual_seed(0)
    install_native_ops(torch.device("cpu"))
    config = AutoConfig.for_model(family.partition("-")[0], **TARGET | changes)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            parameter.copy_(torch.rand_like(parameter) + 0.5)
    target = Target(model, train_tokenizer(), family, None)
    if quantization:
        quantize_model(model, quantization, dtype, family)
    else:
        pack(target)
    return TargetForward(target)


def run(forward: TargetForward, x: torch.Tensor, *, fused: bool) -> torch.Tensor:
    layer = forward.target.layers[1]
    call = forward._fused._calls[layer] if fused else layer
    rotation = forward.target.body.rotary_emb(x, torch.arange(x.shape[1])[None])
    with torch.inference_mode():
        return call(x, position_embeddings=rotation, attention_metadata=_Uncached())


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_is_that_of_transformers_and_a_row_stands_alone(family, quantization):
    forward = build(family, quantization, **FAMILIES[family])
    assert len(forward._fused._calls) == 2
    for rows, tokens in ((1, 1), (1, 6), (13, 1), (3, 25)):
        x = torch.randn(rows, tokens, 96).bfloat16()
        ours, theirs = run(forward, x, fused=True), run(forward, x, fused=False)
        assert (ours - theirs).norm() <= 0.01 * (theirs - x).norm()
        assert torch.equal(ours[:1], run(forward, x[:1], fused=True))
    torch.set_num_threads(3)
    try:
        assert torch.equal(ours, run(forward, x, fused=True))
    finally:
        torch.set_num_threads(1)


class InParts:
    """Metadata of a forward whose layers may not run in one call."""

    def __init__(self, metadata):
        self.attend = metadata.attend

    def row_attention(self, *_layer):
        return None


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_one_call_is_the_parts(family):
    """Rows of several lengths, some past a page, with trees: the same bits in states and cache."""
    forward, ids, found = build(family), torch.randint(3, 400, (3, NODES)), []
    for whole in (True, False):
        metadata, at, cache = tree_over_random_keys(forward.kv_shape, NODES)
        with torch.inference_mode():
            states = forward(ids, at, metadata if whole else InParts(metadata))
        found.append((states, torch.stack(list(cache.keys)), torch.stack(list(cache.values))))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("counts", [(6, 4, 1), (1, 6, 1)])
def test_nodes_without_padding_have_the_same_bits(counts):
    """Trees of different sizes; with the second counts most nodes are padding, and roots attend apart."""
    forward, ids = build("qwen3"), torch.randint(3, 400, (3, NODES))
    valid = torch.arange(NODES) < torch.tensor(counts)[:, None]
    padded, at, _ = tree_over_random_keys(forward.kv_shape, NODES)
    where, _, cache = tree_over_random_keys(forward.kv_shape, NODES)
    places = where._table, LENGTHS, 40 + NODES, where._node_mask, where._depths
    with torch.inference_mode():
        pack = PackedMetadata(cache, *places, valid)
        wanted, found = forward(ids, at, padded), forward(pack.pack(ids), pack.pack(at), pack)
    assert found.shape[:2] == (1, sum(counts)) and torch.equal(pack.spread(found)[valid], wanted[valid])


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_weights_that_change_in_place_are_those_of_the_layer(quantization):
    forward, other = build("qwen2", quantization), build("qwen2", quantization)
    x = torch.randn(2, 3, 96).bfloat16()
    before = run(forward, x, fused=True)
    for layer in (forward.target.layers[1], other.target.layers[1]):
        layer.input_layernorm.weight.mul_(-2)
        for linear in (layer.self_attn.k_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            linear.set_weight(linear.weight * 1.5)
    after = run(forward, x, fused=True)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, run(other, x, fused=False), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "changes", [{"dtype": torch.float32}, {"hidden_act": "gelu"}, {"head_dim": 8}], ids=("float32", "gelu", "narrow")
)
def test_other_layers_run_as_they_are(changes):
    assert not build("llama", **changes)._fused._calls


def test_hooks_of_its_parts_still_fire():
    """One native call would pass them by; other layers are not concerned."""
    target, seen = build("llama").target, []
    target.layers[1].mlp.down_proj.register_forward_hook(lambda *_given: seen.append(1))
    forward = TargetForward(target)
    assert list(forward._fused._calls) == [target.layers[0]]
    seen.clear()
    forward._logits_in_parts(4, 4)
    assert len(seen) == 2


# -- of a draft head ---------------------------------------------------------------------------------------------------

HEAD = SIZES | dict(rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
EAGLE3 = HEAD | dict(target_hidden_size=96, draft_vocab_size=200, aux_layer_ids=(0, 1, 2))
HEADS = {
    "eagle3": lambda: Eagle3Head(Eagle3Config(**EAGLE3)),
    "eagle3-variants": lambda: Eagle3Head(
        Eagle3Config(**EAGLE3, num_hidden_layers=2, norm_before_residual=True, attention_bias=True, qk_norm=True)
    ),
    "eagle2": lambda: Eagle2Head(Eagle2Config(**HEAD, num_hidden_layers=2)),
    "mtp": lambda: MtpHead(MtpConfig(**HEAD)),
}


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


def run_head(head, calls, rows: slice = slice(None), *, window: int | None = None, nodes: int = NODES) -> torch.Tensor:
    """States [B, N, H] of a tree after LENGTHS, over a cache of random keys and values."""
    shape = KVShape(head.config.layers, 1, 64, torch.bfloat16, torch.device("cpu"))
    metadata, at, _ = tree_over_random_keys(shape, nodes, rows)
    embeds, hidden = torch.randn(2, 3, nodes, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    attend = PagedAttend(metadata, Scoring(64**-0.5, window), at.shape)
    given = (one.flatten(0, 1) for one in (embeds[rows], hidden[rows], at))
    with replaced(calls), torch.inference_mode():
        return head(*given, attend, 96).view(*at.shape, -1)


@pytest.mark.parametrize("quantization", ["packed", "int8"])
@pytest.mark.parametrize("kind", HEADS)
def test_native_layers_are_those_of_torch_and_a_row_stands_alone(kind, quantization):
    """Few nodes in one call; many nodes, and a window, in two calls around the attention."""
    head = head_of(kind, quantization)
    calls = native_of(head)
    assert len(calls) == head.config.layers
    for more in ({}, {"nodes": 20}, {"window": 7}):
        ours, theirs = run_head(head, calls, **more), run_head(head, {}, **more)
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()
        assert torch.equal(ours[1:2], run_head(head, calls, slice(1, 2), **more))


@pytest.mark.parametrize("quantization", ["packed", "int8"])
def test_new_weights_are_those_of_the_layer(quantization):
    head, other = head_of("eagle3", quantization), head_of("eagle3", None, seed=5)
    calls = native_of(head)
    before = run_head(head, calls)
    copy_weights(head, other.state_dict())
    after = run_head(head, calls)
    assert not torch.equal(before, after)
    fresh = head_of("eagle3", quantization, seed=5)
    assert torch.equal(after, run_head(fresh, native_of(fresh)))


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
