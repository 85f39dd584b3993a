"""Tiny random targets with MTP modules, written as their families publish them: names, shards and config keys."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Cache

from toolkit.targets import load  # noqa: F401 (registers MiMo)
from toolkit.weights import load_tensors, read_json, save_tensors, write_json

LAYERS = 4
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "n_routed_experts": 4}
GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}
DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
# Family: model type and settings of the target, the key that counts its modules.
FAMILIES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "deepseek": ("deepseek_v3", {**EXPERTS, **GROUPS, **LATENT}, "num_nextn_predict_layers"),
    "glm": ("glm4_moe", {**EXPERTS, **GROUPS, "head_dim": 16, "use_qk_norm": True}, "num_nextn_predict_layers"),
    "mimo": ("mimo", {}, "num_nextn_predict_layers"),
    "ernie": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
        "num_nextn_predict_layers",
    ),
    "qwen3-next": ("qwen3_next", {**QWEN_EXPERTS, **DELTA}, None),
    "qwen3.5": ("qwen3_5_text", DELTA, "mtp_num_hidden_layers"),
    "llama": ("llama", {}, "num_nextn_predict_layers"),
}
HYBRID = ("qwen3-next", "qwen3.5")  # with linear-attention layers
SERVES_HYBRIDS = hasattr(Cache, "get_conv_state")  # transformers 5.23 and later
FAMILIES = {name: row for name, row in FAMILIES.items() if SERVES_HYBRIDS or name not in HYBRID}
# What the modules' own parts are called in the published checkpoints: enorm, hnorm, eh_proj, last norm, decoder layer.
IN_PLACE = tuple(f"model.layers.{LAYERS}{part}" for part in (".enorm", ".hnorm", ".eh_proj", ".shared_head.norm", ""))
QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0")
NAMES: dict[str, tuple[str | None, ...]] = {
    "deepseek": IN_PLACE,
    "glm": IN_PLACE,
    "llama": IN_PLACE,
    "mimo": tuple(
        f"model.mtp_layers.0{part}"
        for part in (".token_layernorm", ".hidden_layernorm", ".input_proj", ".final_layernorm", "")
    ),
    "ernie": (
        "model.mtp_emb_norm.0",
        "model.mtp_hidden_norm.0",
        "model.mtp_linear_proj.0",
        None,
        "model.mtp_block.0",
    ),  # fmt: skip
    "qwen3-next": QWEN,
    "qwen3.5": QWEN,
}


def random_(model: torch.nn.Module, seed: int) -> None:
    """Large weights, norms too: answers vary, and a part that is left out shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.dim() > 1:
            value.data.copy_(torch.randn(value.shape, generator=generator) * 0.15)
        elif name.endswith("A_log"):
            value.data.fill_(math.log(0.02))  # linear attention that forgets slowly
        elif "norm" in name or "bias" in name:
            value.data.copy_(torch.rand(value.shape, generator=generator) * 0.5 + 0.5)


def module_config(family: str, **sizes: int) -> Any:
    """The configuration of the module's decoder layer: one layer of the family, dense in ERNIE, else with experts."""
    kind, settings, _ = FAMILIES[family]
    one = {**SIZES, **settings, **sizes, "num_hidden_layers": 1, "vocab_size": 8, "pad_token_id": None}
    one |= {"first_k_dense_replace": 0} if "first_k_dense_replace" in settings else {}
    one |= {"moe_layer_start_index": 9, "moe_layer_end_index": 9} if family == "ernie" else {}
    one |= {"layer_types": ["full_attention"]} if family in HYBRID else {}
    return AutoConfig.for_model(kind, **one)


def calm(model: torch.nn.Module) -> None:
    """Layers that change little: the next token depends on the last one mostly, and a module drafts it often."""
    for name, value in model.named_parameters():
        if ".layers." in name and value.dim() > 1:
            value.data.mul_(0.2)
    model.get_input_embeddings().weight.data.mul_(8)  # as large as what a module's projection gives


def write_native_target(
    directory: Path, family: str, tokenizer: Any, *, copies: bool = True, agreeing: bool = False, **sizes: int
) -> Path:
    """Write a target of `family` with one MTP module into `directory`; two shards of the target, one of the module.

    copies: the module repeats embedding and output matrix, where the family does. agreeing: many drafts are right.
    sizes: in place of SIZES."""
    kind, settings, counts = FAMILIES[family]
    config = AutoConfig.for_model(kind, **{**SIZES, **settings, **sizes, "vocab_size": len(tokenizer)})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    random_(model, 0)
    if agreeing:
        calm(model)
    model.get_output_embeddings().weight.data[[0, 2]] = 0  # stop ids hardly ever win
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    whole = load_tensors(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()

    block = AutoModelForCausalLM.from_config(module_config(family, **sizes), dtype=torch.float32)
    random_(block, 1)
    if agreeing:
        calm(block)
    block.save_pretrained(directory / "block")
    enorm, hnorm, eh_proj, norm, layer = NAMES[family]
    tensors = {
        f"{layer}.{name.removeprefix('model.layers.0.')}": value
        for name, value in load_tensors(directory / "block" / "model.safetensors").items()
        if name.startswith("model.layers.0.")
    }
    generator, size = torch.Generator().manual_seed(2), SIZES["hidden_size"]
    for name in (enorm, hnorm, norm):
        if name is not None:
            tensors[f"{name}.weight"] = torch.rand(size, generator=generator) + 0.5
    if agreeing and norm is not None:
        tensors[f"{norm}.weight"] = model.get_decoder().norm.weight.detach().clone()
    tensors[f"{eh_proj}.weight"] = torch.randn(size, 2 * size, generator=generator) * (0.05 if agreeing else 0.15)
    if agreeing:
        tensors[f"{eh_proj}.weight"][:, slice(size, None) if family == "mimo" else slice(size)] += torch.eye(size)
    if copies and NAMES[family] is IN_PLACE:
        tensors[f"{layer}.embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        tensors[f"{layer}.shared_head.head.weight"] = model.get_output_embeddings().weight.detach().clone()

    names = sorted(whole)
    shards = [{name: whole[name] for name in names[place::2]} for place in range(2)] + [tensors]
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-0000{number}-of-00003.safetensors"
        save_tensors(directory / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    stated = read_json(directory / "config.json")
    write_json(directory / "config.json", stated | ({counts: 1} if counts else {}))
    return directory


def change_module(directory: Path, change: Any) -> None:
    """Replace the module's tensors by change(tensors)."""
    index = read_json(directory / "model.safetensors.index.json")
    file = "model-00003-of-00003.safetensors"
    tensors = change(load_tensors(directory / file))
    save_tensors(directory / file, tensors)
    kept = {name: one for name, one in index["weight_map"].items() if one != file}
    write_json(directory / "model.safetensors.index.json", {**index, "weight_map": kept | dict.fromkeys(tensors, file)})
