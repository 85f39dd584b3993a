"""Sizes computed from configurations equal those of built models; unsupported models are refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3MoeConfig,
)

from toolkit.errors import PlanError
from toolkit.heads.eagle3 import Eagle3Head
from toolkit.plan.model_size import (
    head_size,
    native_mtp,
    size_of_config,
    target_size,
)

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    ("config", "layers_with_experts", "token_bytes"),
    [
        (LlamaConfig(**TINY, tie_word_embeddings=True), 0, 3 * 2 * 2 * 8 * 2),
        (Qwen3MoeConfig(**TINY, **MOE, decoder_sparse_step=1, mlp_only_layers=[]), 3, 3 * 2 * 2 * 8 * 2),
        (DeepseekV3Config(**{**TINY, **LATENT}), 2, 3 * (16 + 8) * 2),
    ],
)
def test_parts_add_up(config, layers_with_experts, token_bytes):
    """A part counted twice, a tied matrix counted as another, or shared experts as routed ones break the sum."""
    size = size_of_config(config, "tiny")
    model = AutoModelForCausalLM.from_config(config)
    assert size.parameters == sum(value.numel() for value in model.parameters())
    assert size.head == 96 * 32 and size.embedding == (0 if config.tie_word_embeddings else 96 * 32)
    assert size.moe_layers == layers_with_experts and size.experts == layers_with_experts * 8 * 3 * 32 * 16
    assert size.active == size.body + size.head + size.experts / 4 and size.cache.bytes(1) == token_bytes


def test_sliding_layers_stop_growing():
    """A window's cache is full at its length; a model counted as if all layers saw everything would not fit."""
    config = GptOssConfig(**TINY, num_local_experts=4, num_experts_per_tok=2, sliding_window=64)
    cache, a_layer = size_of_config(config, "tiny").cache, 2 * 2 * 8 * 2
    kinds = [kind == "full_attention" for kind in config.layer_types]
    assert cache.bytes(1000) == sum(1000 if full else 64 for full in kinds) * a_layer
    assert cache.bytes(10) == 3 * 10 * a_layer
    every = size_of_config(MistralConfig(**TINY, sliding_window=64), "tiny").cache
    assert every.bytes(1000) == 3 * 64 * a_layer


def test_target_by_directory_and_config(tmp_path):
    """fp8 is read from config.json, MTP layers too; --weight-bits has the last word; a revision goes to hub ids."""
    config = DeepseekV3Config(**{**TINY, **LATENT}, architectures=["DeepseekV3ForCausalLM"]).to_dict()
    config |= {"quantization_config": {"quant_method": "fp8"}, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    size, _, source, revision = target_size(str(tmp_path / "config.json"))
    assert (size.bits, size.native_mtp, source, revision) == (8, 1, str(tmp_path), None)
    assert target_size(str(tmp_path), 16)[0].bits == 16
    mtp = native_mtp(size)
    assert mtp.layers == mtp.moe_layers == 1 and mtp.experts == size.experts / 2 and mtp.head == size.head
    assert mtp.shared_head and not size.shared_head
    with pytest.raises(PlanError, match="has no MTP layers"):
        native_mtp(size_of_config(LlamaConfig(**TINY), "plain"))


def test_size_of_a_real_head(tiny_draft):
    """All that the head holds is counted, of each of its layers."""
    config = tiny_draft.head.config
    size = size_of_config(LlamaConfig(**{**TINY, "hidden_size": config.hidden_size}), "x")
    head = head_size(tiny_draft.head, size)
    assert head.parameters == sum(value.numel() for value in tiny_draft.head.parameters())
    three = Eagle3Head(dataclasses.replace(config, num_hidden_layers=3))
    deep = head_size(three, size)
    assert deep.layers == 3 and deep.cache.bytes(1) == 3 * head.cache.bytes(1) and deep.body > 2 * head.body
