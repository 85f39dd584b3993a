"""The decoder layer in native calls: what transformers' layer computes, a row by itself, with the weights of now."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conftest import train_tokenizer
from toolkit.infer.attention.fused_layer import _Uncached
from toolkit.infer.attention.metadata import tree_metadata
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.cpu import blocked_product
from toolkit.infer.cpu.int8_linear import quantize_model
from toolkit.infer.engine.cpu_door import install_native_ops, pack
from toolkit.targets.target import Target

pytestmark = pytest.mark.skipif(not blocked_product.available(), reason="no native products on this CPU")

SIZES = dict(
    vocab_size=400, hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=3,
    num_key_value_heads=1, head_dim=64, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    initializer_range=0.2,
)  # fmt: skip
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
    config = AutoConfig.for_model(family.partition("-")[0], **SIZES | changes)
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
    forward, (lengths, nodes) = build(family), ([3, 40, 17], 6)
    pool = PagePool(3, 64)
    for row, length in enumerate(lengths):
        pool.grow(row, length + nodes)
    table = pool.table(0, 3, pool.pages_of(64), torch.device("cpu"))
    at = torch.tensor(lengths)[:, None] + torch.tensor([0, 1, 1, 2, 2, 3])
    mask = torch.eye(nodes, dtype=torch.bool) | (torch.rand(3, nodes, nodes) < 0.5).tril()
    ids, found = torch.randint(3, 400, (3, nodes)), []
    for whole in (True, False):
        cache = KVCache(forward.kv_shape, pool)
        generator = torch.Generator().manual_seed(1)
        for one in (*cache.keys, *cache.values):
            one.copy_(torch.randn(one.shape, generator=generator))
        metadata = tree_metadata(cache, table, torch.tensor(lengths), 46, mask, at - at[:, :1])
        with torch.inference_mode():
            states = forward(ids, at, metadata if whole else InParts(metadata))
        found.append((states, torch.stack(list(cache.keys)), torch.stack(list(cache.values))))
    assert all(map(torch.equal, *found))


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
