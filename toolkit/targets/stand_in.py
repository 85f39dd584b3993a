"""Stand-in targets: the published shape of a model with random weights and a tokenizer that is trained here.

`stand-in:qwen3-8b` takes the time and the memory of Qwen3-8B without its download, so a recipe can be rehearsed
(pipeline/rehearsal.py). What it writes means nothing, and it hardly ever ends an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from toolkit.errors import TargetError
from toolkit.jsonl import read_rows
from toolkit.targets.cache import build_once, cache_root
from toolkit.targets.chat_templates import CHATML
from toolkit.weights import sha256_json

PREFIX = "stand-in:"
# Fields of each model's config.json on Hugging Face's hub.
_QWEN3 = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6}
_LLAMA3 = {"vocab_size": 128256, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
_SMOLLM2 = {"vocab_size": 49152, "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
_LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _shape(
    model_type: str,
    common: Mapping[str, Any],
    sizes: tuple[int, int, int, int, int],
    rope: Mapping[str, Any] | float,
    **more: Any,
) -> dict[str, Any]:
    """sizes: hidden, intermediate, layers, heads, kv heads."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    rope = {"rope_type": "default", "rope_theta": rope} if isinstance(rope, float) else dict(rope)
    sized = dict(zip(keys, sizes, strict=True))
    return {"model_type": model_type, **common, **sized, "rope_parameters": rope, "tie_word_embeddings": False, **more}


_EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _shape("llama", _SMOLLM2, (576, 1536, 30, 9, 3), 1e5, tie_word_embeddings=True),
    "llama-3.1-8b": _shape("llama", _LLAMA3, (4096, 14336, 32, 32, 8), _LLAMA3_ROPE),
    "llama-3.3-70b": _shape("llama", _LLAMA3, (8192, 28672, 80, 64, 8), _LLAMA3_ROPE),
    "qwen3-8b": _shape("qwen3", _QWEN3, (4096, 12288, 36, 32, 8), 1e6),
    "qwen3-32b": _shape("qwen3", _QWEN3, (5120, 25600, 64, 64, 8), 1e6),
    "qwen3-30b-a3b": _shape("qwen3_moe", _QWEN3, (2048, 6144, 48, 32, 4), 1e6, **_EXPERTS),
}
TEXTS = Path(__file__).parent.parent / "bench" / "builtin_prompts.jsonl"  # what the tokenizer is trained on


def is_stand_in(name: str | Path) -> bool:
    return str(name).startswith(PREFIX)


def stand_in_directory(name: str) -> Path:
    """The folder with the config and the tokenizer of `stand-in:<model>`, in the cache; built once. It has no weights.

    Raises `TargetError` for a model without a shape here."""
    shape = SHAPES.get(name.removeprefix(PREFIX))
    if shape is None:
        known = ", ".join(PREFIX + one for one in SHAPES)
        raise TargetError(f"target {name} has no published shape here; give one of {known}")
    key = sha256_json([shape, CHATML, TEXTS.read_text(encoding="utf-8")])[:16]
    return build_once(cache_root() / "targets" / f"stand-in-{key}", lambda into: _build(shape, into))


def _build(shape: dict[str, Any], into: Path) -> None:
    fields = {key: value for key, value in shape.items() if key != "model_type"}
    tokenizer = _tokenizer(shape["vocab_size"])
    config = AutoConfig.for_model(
        shape["model_type"], **fields, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, dtype="bfloat16"
    )
    config.save_pretrained(into)
    tokenizer.model_max_length = shape["max_position_embeddings"]
    tokenizer.save_pretrained(into)


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the built-in prompts with ChatML; the other ids of the vocabulary are written "[number]"."""
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [turn for _, row in read_rows(TEXTS) for turn in row["turns"]]
    learnt.train_from_iterator(texts, trainer)
    stored = json.loads(learnt.to_str())["model"]
    vocab = stored["vocab"] | {f"[{at}]": at for at in range(len(stored["vocab"]), vocab_size)}
    whole = Tokenizer(models.BPE(vocab, [tuple(pair) for pair in stored["merges"]]))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    whole.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def random_model(config: PretrainedConfig, dtype: torch.dtype, device: str | torch.device) -> PreTrainedModel:
    """The model of `config` with random weights, made on `device`: every process there makes the same ones."""
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()
