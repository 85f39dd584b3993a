"""A directory of a tiny GLM-4.5 model as a GGUF file, written tensor by tensor as llama.cpp's converter would."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from toolkit.weights import load_tensors, read_json

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction": "exp_probs_b",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.head": "nextn.shared_head_head",
    "shared_head.norm": "nextn.shared_head_norm",
}
ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_tensors(directory: Path) -> dict[str, np.ndarray]:
    """The tensors by their GGUF names; the experts of a layer are one tensor."""
    files = read_json(directory / "model.safetensors.index.json")["weight_map"]
    state: dict[str, torch.Tensor] = {}
    for file in sorted(set(files.values())):
        state |= load_tensors(directory / file)
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, value in state.items():
        tensor = value.float().contiguous().numpy()
        if name in ENDS:
            found[ENDS[name]] = tensor
            continue
        layer, rest = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name).groups()
        part, kind = rest.removesuffix("_bias").removesuffix(".weight").removesuffix(".bias"), "weight"
        if rest.endswith("bias"):
            kind = "bias"
        expert = re.search(r"experts\.(\d+)\.", part)
        if expert is None:
            found[f"blk.{layer}.{NAMES[part]}.{kind}"] = tensor
        else:
            whole = f"blk.{layer}.{NAMES[part.replace(expert[0], 'experts.')]}.weight"
            experts.setdefault(whole, {})[int(expert[1])] = tensor
    return found | {name: np.stack([parts[place] for place in sorted(parts)]) for name, parts in experts.items()}


def write_glm_gguf(path: Path, directory: Path, *, quantised: bool = False, **settings: int) -> Path:
    """quantised: matrices in blocks of 8 bits. settings: further `glm4moe.*` numbers."""
    config, tokenizer = AutoConfig.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    modules = int(read_json(directory / "config.json").get("num_nextn_predict_layers", 0))
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "glm4moe")
    writer.add_block_count(config.num_hidden_layers + modules)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    if modules:
        writer.add_nextn_predict_layers(modules)
    for name, value in settings.items():
        writer.add_uint32(f"glm4moe.{name}", value)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quantised else gguf.LlamaFileType.ALL_F32)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("glm4")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    writer.add_token_types([3] * 3 + [1] * (len(tokenizer) - 3))  # 3: control token
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_eot_token_id(0)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for name, tensor in gguf_tensors(directory).items():
        if quantised and tensor.ndim > 1 and "ffn_gate_inp" not in name:
            packed = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
