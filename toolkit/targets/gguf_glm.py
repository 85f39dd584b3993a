"""Reads GLM-4.5 models (GGUF architecture "glm4moe") from GGUF files, with their MTP modules.

transformers reads this family from safetensors only. In a GGUF file the modules are the last blocks: their decoder
layers have the names of the others, and their own parts are called `blk.N.nextn.*`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PreTrainedTokenizerFast

from toolkit.errors import TargetError, optional_package
from toolkit.targets.mtp_names import STITCHED
from toolkit.weights import save_tensors, write_json

ARCHITECTURE = "glm4moe"
MODULES = "nextn_predict_layers"  # the number of modules; `block_count` counts them too
STEPS = "toolkit.mtp_trained_steps"  # metadata of copies that `toolkit export --to native` writes
# `glm4moe.KEY` of the file: key of config.json.
SETTINGS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "rope.freq_base": "rope_theta",
    "rope.dimension_count": "rope_dim",
    MODULES: "num_nextn_predict_layers",
}
ABSENT = {"norm_topk_prob": False, "num_nextn_predict_layers": 0}  # llama.cpp's values of settings that are not stated
OTHER_SETTINGS = ("attention.value_length", "expert_gating_func", "vocab_size")  # checked, or known from the tensors
SIGMOID = 2  # of `expert_gating_func`
# How `tokenizer.ggml.pre` glm4 and chatglm-bpe split text; this is the pattern of the published tokenizer.json.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE = ("glm4", "chatglm-bpe")
CONTROL, USER_DEFINED = 3, 4  # of `tokenizer.ggml.token_type`
PARTS = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "embed_tokens", "shared_head.head")
OPTIONAL = re.compile(r"\.(embed_tokens|shared_head_head)\.weight$")  # a module that lacks them uses the target's
# Parameters of transformers' class that join the published ones of all experts.
JOINED = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}
EXPERT = re.compile(r"(\.experts)\.(\d+)\.")


def gguf_names(published: Iterable[str], n_blocks: int) -> dict[str, list[str]]:
    """GGUF name -> names of the published checkpoint, for a model of `n_blocks` layers and modules. The experts of a
    layer share one tensor, in the order of their numbers."""
    gguf = optional_package("gguf", "a GGUF file")

    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, n_blocks)
    found: dict[str, list[str]] = defaultdict(list)
    for name in published:
        one = EXPERT.sub(r"\1.", name).replace("_correction_bias", "_correction.bias")
        own = known.get_name(one, try_suffixes=(".weight", ".bias"))
        assert own is not None, f"{name} has no name in GGUF"
        found[own].append(name)
    return {own: sorted(names, key=_expert) for own, names in found.items()}


def _expert(name: str) -> int:
    found = EXPERT.search(name)
    return int(found[2]) if found else 0


def convert_glm(path: Path, reader: Any, dtype: torch.dtype, into: Path) -> None:
    """Write config, tokenizer and weights of a GLM-4.5 GGUF file into the folder `into`, as the family publishes them.

    reader: a `gguf.GGUFReader` of the file. Raises `TargetError` for settings, tensors or a tokenizer that are not
    read."""
    stated = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    shapes = {tensor.name: tuple(tensor.shape.tolist()) for tensor in reader.tensors}
    config = _config(path, stated, shapes)
    config.dtype = dtype
    n_modules = config.num_nextn_predict_layers
    published = gguf_names(_published_names(config, n_modules), config.num_hidden_layers + n_modules)
    missing = sorted(name for name in published.keys() - shapes.keys() if not OPTIONAL.search(name))
    unknown = sorted(shapes.keys() - published.keys())
    if missing or unknown:
        raise TargetError(
            f"{path} does not hold the tensors of a GLM-4.5 model: missing {', '.join(missing[:5]) or 'none'}; unknown "
            f"{', '.join(unknown[:5]) or 'none'}. Download it again, or give the model's directory or hub id instead"
        )
    _tokenizer(path, stated).save_pretrained(into)
    _write_weights(reader.tensors, published, dtype, into)
    config.save_pretrained(into)
    if STEPS in stated:
        write_json(into / STITCHED, {"trained_steps": stated[STEPS]})


def _config(path: Path, stated: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Glm4MoeConfig:
    own = {
        name.removeprefix(f"{ARCHITECTURE}."): value
        for name, value in stated.items()
        if name.startswith(f"{ARCHITECTURE}.")
    }
    unread = sorted(own.keys() - SETTINGS.keys() - set(OTHER_SETTINGS))
    values = {**ABSENT, **{SETTINGS[name]: _plain(value) for name, value in own.items() if name in SETTINGS}}
    lacking = sorted(set(SETTINGS.values()) - values.keys() - {"n_group", "topk_group"})
    if own.get("expert_gating_func", SIGMOID) != SIGMOID:
        unread.append("expert_gating_func")
    if own.get("attention.value_length", values.get("head_dim")) != values.get("head_dim"):
        unread.append("attention.value_length")
    if "token_embd.weight" not in shapes:
        lacking.append("token_embd.weight")
    if unread or lacking:
        raise TargetError(
            f"{path} has settings of {ARCHITECTURE} that are not read ({', '.join(unread) or 'none'}), or lacks some "
            f"({', '.join(lacking) or 'none'}); give the model's directory or hub id instead"
        )
    values["num_hidden_layers"] -= values["num_nextn_predict_layers"]
    ends = {stated[name] for end in ("eos", "eot", "eom") if (name := f"tokenizer.ggml.{end}_token_id") in stated}
    return Glm4MoeConfig(
        **{name: value for name, value in values.items() if not name.startswith("rope_")},
        rope_parameters={
            "rope_type": "default",
            "rope_theta": values["rope_theta"],
            "partial_rotary_factor": values["rope_dim"] / values["head_dim"],
        },
        vocab_size=shapes["token_embd.weight"][1],
        attention_bias="blk.0.attn_q.bias" in shapes,
        use_qk_norm="blk.0.attn_q_norm.weight" in shapes,
        tie_word_embeddings="output.weight" not in shapes,
        eos_token_id=sorted(ends),
        bos_token_id=stated.get("tokenizer.ggml.bos_token_id"),
        pad_token_id=stated.get("tokenizer.ggml.padding_token_id"),
        architectures=["Glm4MoeForCausalLM"],
    )


def _plain(value: Any) -> Any:
    """A number as config.json has it: GGUF keeps 1e-05 as the nearest float32, 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _published_names(config: Glm4MoeConfig, n_modules: int) -> Iterable[str]:
    """The names of all tensors in a published checkpoint. A module is one more layer, with parts of its own."""
    n_layers = config.num_hidden_layers
    whole = Glm4MoeConfig(**{**config.to_dict(), "num_hidden_layers": n_layers + n_modules})
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(whole).state_dict()
    for name in names:
        joined = next((end for end in JOINED if name.endswith(end)), None)
        if joined is not None:
            layer, experts = name.removesuffix(joined), range(config.n_routed_experts)
            yield from (f"{layer}.experts.{expert}.{part}.weight" for part in JOINED[joined] for expert in experts)
        elif not (config.tie_word_embeddings and name == "lm_head.weight"):
            yield name
    yield from (f"model.layers.{n_layers + k}.{part}.weight" for k in range(n_modules) for part in PARTS)


def _write_weights(tensors: Iterable[Any], published: Mapping[str, list[str]], dtype: torch.dtype, into: Path) -> None:
    """Write one safetensors file a block, so that no more than a block is in memory as floats."""
    gguf = optional_package("gguf", "a GGUF file")

    blocks: dict[str, list[Any]] = defaultdict(list)
    for tensor in tensors:
        blocks[tensor.name.split(".")[1] if tensor.name.startswith("blk.") else "ends"].append(tensor)
    files: dict[str, str] = {}
    for number, block in enumerate(blocks.values(), start=1):
        shard: dict[str, torch.Tensor] = {}
        for tensor in block:
            names = published[tensor.name]
            value = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
            kept = torch.float32 if tensor.name.endswith("exp_probs_b.bias") else dtype  # as the family publishes it
            parts = value.to(kept).unbind() if EXPERT.search(names[0]) else [value.to(kept)]
            shard |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
        file = f"model-{number:05d}-of-{len(blocks):05d}.safetensors"
        save_tensors(into / file, shard)
        files |= dict.fromkeys(shard, file)
    write_json(into / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})


def _tokenizer(path: Path, stated: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    own = {name.removeprefix("tokenizer."): value for name, value in stated.items() if name.startswith("tokenizer.")}
    if own.get("ggml.model") != "gpt2" or own.get("ggml.pre") not in PRE or own.get("ggml.add_bos_token"):
        raise TargetError(
            f"{path} has a tokenizer that is not read: model {own.get('ggml.model')!r}, pre {own.get('ggml.pre')!r}, "
            f"add_bos_token {bool(own.get('ggml.add_bos_token'))}; 'gpt2', 'glm4' and False are needed. Give the "
            "model's directory or hub id instead"
        )
    tokens, merges = own["ggml.tokens"], [tuple(merge.split(" ", 1)) for merge in own["ggml.merges"]]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=own["ggml.pre"] == "glm4"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, own["ggml.token_type"], strict=True):
        if kind in (CONTROL, USER_DEFINED):
            backend.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{name}_token": tokens[own[f"ggml.{gguf}_token_id"]]
        for name, gguf in named.items()
        if f"ggml.{gguf}_token_id" in own
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=stated[f"{ARCHITECTURE}.context_length"], **special
    )
    tokenizer.chat_template = own.get("chat_template")
    return tokenizer
