"""The tiny target as a GGUF file, written tensor by tensor as llama.cpp's converter would."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from toolkit.targets.target import Target

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_tensors(target: Target) -> dict[str, np.ndarray]:
    config, state = target.config, target.model.state_dict()
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer in range(target.n_layers):
        for ours, theirs in GGUF_NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs)
            if heads:  # llama.cpp keeps rotary pairs side by side
                weight = weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
            tensors[f"blk.{layer}.{theirs}.weight"] = weight
    return {name: tensor.float().contiguous().numpy() for name, tensor in tensors.items()}


def write_gguf(path: Path, target: Target, pre: str = "smollm", quantised: bool = False) -> Path:
    gguf = pytest.importorskip("gguf")
    config, tokenizer = target.config, target.tokenizer
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(target.n_layers)
    writer.add_context_length(target.max_context)
    writer.add_embedding_length(target.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(target.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quantised else gguf.LlamaFileType.ALL_F32)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    writer.add_token_types([3] * 3 + [1] * (len(tokenizer) - 3))  # 3: control token
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)
    for name, tensor in gguf_tensors(target).items():
        if quantised and tensor.ndim == 2:
            packed = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny_gguf(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target in float32 GGUF."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_target)


@pytest.fixture(scope="session")
def tiny_gguf_q8(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with matrices packed in 8 bits, and an unknown `tokenizer.ggml.pre`."""
    return write_gguf(
        tmp_path_factory.mktemp("gguf-q8") / "tiny-q8.gguf", tiny_target, pre="newest-rule", quantised=True
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test here may touch the user's cache."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def sample_ids(tiny_target: Target) -> torch.Tensor:
    return torch.arange(3, 40)[None] * 7 % tiny_target.vocab_size
