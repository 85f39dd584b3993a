"""EAGLE-3 heads as GGUF files, in the form that llama.cpp reads (architecture "eagle3").

    a checkpoint for other engines          GGUF
    eagle_aux_hidden_state_layer_ids        eagle3.target_layers, the same numbers: id k is the input of layer k
    d2t, offsets                            d2t, target ids
    q_proj, k_proj: halves of a rotary      the two values of a pair side by side
      pair apart
    rope_parameters                         eagle3.rope.freq_base, and of a scaled rope rope_freqs.weight: what each
                                            frequency is divided by
    norms in the head's dtype               float32

GGUF has numbers of float32 and no names of rope scalings, so `toolkit.exact` repeats what they round, for our reader.

"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.errors import DraftDirError, ExportError, TargetError, optional_package
from toolkit.heads.decoder_layer import Rope
from toolkit.targets.facts import TargetFacts
from toolkit.targets.gguf_file import open_gguf
from toolkit.targets.load import load_tokenizer
from toolkit.weights import WeightsError

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
ARCHITECTURE, MODEL_FILE, EXACT = "eagle3", "model.gguf", "toolkit.exact"
# Key of config.json -> key of the file's metadata, which has the architecture before it.
NUMBERS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
    "target_hidden_size": "target_hidden_size",
}
SWITCHES = {key: key for key in ("norm_before_residual", "norm_before_fc")}
LAYERS, EPS, THETA, SCALING = "target_layers", "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.type"
HEAD_DIM = ("attention.value_length", "rope.dimension_count")  # as large as attention.key_length here
OTHER = ("vocab_size", "rope.scaling.factor")  # nothing is read of these
TENSORS = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    **{f"midlayer.self_attn.{one}_proj.weight": f"blk.0.attn_{one}.weight" for one in "qkv"},
    **{f"midlayer.mlp.{one}_proj.weight": f"blk.0.ffn_{one}.weight" for one in ("gate", "up", "down")},
}
ROTATED = {"blk.0.attn_q.weight": "num_attention_heads", "blk.0.attn_k.weight": "num_key_value_heads"}
ROPE_FREQS = "rope_freqs.weight"


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path names: itself, or that of a folder which has no config.json."""
    if path.suffix == ".gguf":
        return path
    return path / MODEL_FILE if (path / MODEL_FILE).is_file() and not (path / "config.json").is_file() else None


def is_gguf_head(path: Path) -> bool:
    """Whether a GGUF file holds an EAGLE-3 head. Raises `WeightsError` when it is damaged."""
    return _opened(path).get_field("general.architecture").contents() == ARCHITECTURE


# -- write -------------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], vocabulary: Vocabulary) -> None:
    """Write a head. config, tensors: as in a checkpoint for vLLM. vocabulary: its target's.

    Raises `ExportError` for a rope that llama.cpp cannot be told.
    """
    gguf = optional_package("gguf", "a GGUF file")

    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    for key, name in NUMBERS.items():
        writer.add_uint32(f"{ARCHITECTURE}.{name}", config[key])
    for name in HEAD_DIM:
        writer.add_uint32(f"{ARCHITECTURE}.{name}", config["head_dim"])
    for key, name in SWITCHES.items():
        writer.add_bool(f"{ARCHITECTURE}.{name}", bool(config.get(key)))
    rope = config["rope_parameters"]
    writer.add_float32(f"{ARCHITECTURE}.{EPS}", config["rms_norm_eps"])
    writer.add_float32(f"{ARCHITECTURE}.{THETA}", rope["rope_theta"])
    writer.add_array(f"{ARCHITECTURE}.{LAYERS}", config[AUX_KEY])
    writer.add_string(EXACT, json.dumps({"rms_norm_eps": config["rms_norm_eps"], "rope_parameters": rope}))
    for name, value, kind, nested in vocabulary:
        writer.add_key_value(name, value, kind, sub_type=nested)
    factors = _rope_factors(config)
    if factors is not None:
        writer.add_tensor(ROPE_FREQS, factors)
    if "d2t" in tensors:
        d2t = tensors["d2t"]
        writer.add_tensor("d2t", (d2t + torch.arange(d2t.numel())).numpy())
    types = gguf.GGMLQuantizationType
    kinds = {torch.float32: types.F32, torch.float16: types.F16, torch.bfloat16: types.BF16}
    for name, tensor in tensors.items():
        if name in ("d2t", "t2d"):
            continue
        there, value = TENSORS[name], tensor.detach().float().cpu()
        if there in ROTATED:
            value = _swapped(value, config[ROTATED[there]], 2)
        kind = types.F32 if value.ndim == 1 else kinds[tensor.dtype]
        writer.add_tensor(there, gguf.quantize(value.contiguous().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope_factors(config: Mapping[str, Any]) -> np.ndarray | None:
    """What llama.cpp divides each frequency by [head_dim / 2]; None: by one. Raises `ExportError`."""
    given, dim = config["rope_parameters"], config["head_dim"]
    if given.get("rope_type", "default") == "default":
        return None
    rope = Rope(given, dim, config["max_position_embeddings"])
    if rope.scaling != 1:
        raise ExportError(
            f"the head's rope {given} scales queries and keys by {rope.scaling:.3f}, which is not written for llama.cpp"
        )
    plain = given["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return (plain / rope.inv_freq.double()).float().numpy()


def _swapped(weight: Tensor, heads: int, inner: int) -> Tensor:
    """Rows of a head [inner, n] as [n, inner]: with inner 2, pairs that lie half a head apart come side by side."""
    return weight.reshape(heads, inner, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


# -- read --------------------------------------------------------------------------------------------------------------


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings in the keys of a config.json, and tensors under the names of an EAGLE-3 checkpoint.

    Raises `DraftDirError` for a file that holds no EAGLE-3 head or one whose rope cannot be told, `WeightsError` for
    damage and quantised tensors.
    """
    reader = _opened(path)
    fields = reader.fields
    architecture = fields["general.architecture"].contents()
    if architecture != ARCHITECTURE:
        raise DraftDirError(
            f"{path} holds a model of llama.cpp's architecture {architecture!r}; a draft head is of {ARCHITECTURE!r}. "
            "A whole model is a `target`"
        )
    begin = f"{ARCHITECTURE}."
    stated = {name.removeprefix(begin): fields[name].contents() for name in fields if name.startswith(begin)}
    config = {key: stated.pop(name) for key, name in (NUMBERS | SWITCHES).items() if name in stated}
    lacking = [NUMBERS[key] for key in NUMBERS if key not in config and key not in ("head_dim", "num_key_value_heads")]
    lacking += [name for name in (LAYERS, EPS, THETA) if name not in stated]
    lacking += ["tokenizer.ggml.tokens"] if "tokenizer.ggml.tokens" not in fields else []
    if lacking:
        raise DraftDirError(f"{path} lacks {', '.join(lacking)}; copy the file again from its source")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])  # as llama.cpp reads it
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config |= {"architectures": [ARCHITECTURE], "vocab_size": len(fields["tokenizer.ggml.tokens"].data)}
    config[AUX_KEY] = list(stated.pop(LAYERS))
    tensors = {tensor.name: _tensor(tensor, path) for tensor in reader.tensors}
    exact = json.loads(fields[EXACT].contents()) if EXACT in fields else None
    config |= _rounded(path, {**config, **(exact or {})}, exact is not None, stated, tensors.pop(ROPE_FREQS, None))
    differing = [name for name in HEAD_DIM if stated.pop(name, config["head_dim"]) != config["head_dim"]]
    if differing:
        raise DraftDirError(f"{path}: {', '.join(differing)} differ from attention.key_length; they must be equal")
    config |= {name: value for name, value in stated.items() if name not in OTHER}  # unknown keys are reported
    return config, _ours(config, tensors)


def _rounded(
    path: Path, config: dict[str, Any], exact: bool, stated: dict[str, Any], factors: Tensor | None
) -> dict[str, Any]:
    """Epsilon and rope: the exact ones, compared with what llama.cpp reads, or from that. Raises `DraftDirError`."""
    eps, theta, scaling = stated.pop(EPS), stated.pop(THETA), stated.pop(SCALING, "none")
    if not exact:
        if factors is not None or scaling != "none":
            raise DraftDirError(
                f"{path} has a scaled rope ({scaling}{'' if factors is None else ', rope_freqs'}), whose settings it "
                "does not state; use the checkpoint that it was converted from"
            )
        return {
            "rms_norm_eps": float(str(np.float32(eps))),  # 1e-05, where the file has 9.99999975e-06
            "rope_parameters": {"rope_type": "default", "rope_theta": float(str(np.float32(theta)))},
        }
    wanted = _rope_factors(config)
    same = factors is None if wanted is None else factors is not None and np.array_equal(wanted, factors.numpy())
    rope = config["rope_parameters"]
    if not same or (np.float32(config["rms_norm_eps"]), np.float32(rope["rope_theta"])) != (eps, theta):
        raise DraftDirError(f"{path}: {EXACT} and what llama.cpp reads differ; export the head again")
    return {"rms_norm_eps": config["rms_norm_eps"], "rope_parameters": rope}


def _tensor(tensor: Any, path: Path) -> Tensor:
    gguf = optional_package("gguf", "a GGUF file")

    types, data = gguf.GGMLQuantizationType, np.array(tensor.data)
    if tensor.tensor_type == types.BF16:
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
    if tensor.tensor_type not in (types.F32, types.F16, types.I64):
        raise WeightsError(
            f"{path}: {tensor.name} is quantised ({tensor.tensor_type.name}); a quantised head cannot be read"
        )
    return torch.from_numpy(data)


def _ours(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by our names; those that nobody knows keep theirs, which the import refuses."""
    names = {there: here for here, there in TENSORS.items()}
    layer = next((value.dtype for name, value in tensors.items() if name in ROTATED), torch.float32)
    found = {}
    for name, value in tensors.items():
        if name == "d2t":
            value = value - torch.arange(value.numel())
        elif name in ROTATED and value.shape[0] == config[ROTATED[name]] * config["head_dim"]:
            value = _swapped(value, config[ROTATED[name]], config["head_dim"] // 2)
        elif value.ndim == 1 and torch.equal(value.to(layer).float(), value.float()):
            value = value.to(layer)  # norms are float32 for llama.cpp
        found[names.get(name, name)] = value
    return found


def _opened(path: Path) -> Any:
    try:
        return open_gguf(path)
    except TargetError as error:
        raise WeightsError(str(error)) from error


# Name, value, GGUF type, and the type of an array's elements.
Vocabulary = list[tuple[str, Any, Any, Any]]
PREFIX = "tokenizer.ggml."
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of token in GGUF files


def vocabulary_of(facts: TargetFacts) -> Vocabulary:
    """Copied from a target that is a GGUF file, else made of its tokenizer, as llama.cpp's converter does.

    Raises `TargetError` for a tokenizer that is no byte-level BPE, or has more tokens than the target.
    """
    gguf = optional_package("gguf", "a GGUF file")

    kinds = gguf.GGUFValueType
    if facts.name.endswith(".gguf"):
        fields = open_gguf(Path(facts.name)).fields
        return [
            (name, one.contents(), one.types[0], one.types[-1] if one.types[0] == kinds.ARRAY else None)
            for name, one in fields.items()
            if name.startswith(PREFIX)
        ]
    tokenizer = load_tokenizer(facts.name, facts.revision)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"] if tokenizer.is_fast else {}
    texts = {number: text for text, number in tokenizer.get_vocab().items()}
    if model.get("type") != "BPE" or model.get("byte_fallback") or max(texts) >= facts.vocab_size:
        raise TargetError(
            f"the tokenizer of {facts.name} ({model.get('type')}, {max(texts) + 1} tokens) is not written to GGUF; one "
            f"of byte-level BPE with at most {facts.vocab_size} tokens is. Give the target's GGUF file as `target`"
        )
    added = tokenizer.added_tokens_decoder
    types = [
        UNUSED if i not in texts else NORMAL if i not in added else CONTROL if added[i].special else USER_DEFINED
        for i in range(facts.vocab_size)
    ]
    empty = tokenizer("")["input_ids"]  # what the tokenizer adds to every text
    found: Vocabulary = [
        (PREFIX + "model", "gpt2", kinds.STRING, None),
        (PREFIX + "pre", "default", kinds.STRING, None),  # how text is split; a draft splits none
        (PREFIX + "tokens", [texts.get(i, f"[PAD{i}]") for i in range(facts.vocab_size)], kinds.ARRAY, kinds.STRING),
        (PREFIX + "token_type", types, kinds.ARRAY, kinds.INT32),
        (PREFIX + "merges", [one if isinstance(one, str) else " ".join(one) for one in model["merges"]],
         kinds.ARRAY, kinds.STRING),
        (PREFIX + "add_bos_token", empty[:1] == [tokenizer.bos_token_id], kinds.BOOL, None),
        (PREFIX + "add_eos_token", empty[-1:] == [tokenizer.eos_token_id], kinds.BOOL, None),
    ]  # fmt: skip
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "padding": tokenizer.pad_token_id}
    return found + [(f"{PREFIX}{name}_token_id", i, kinds.UINT32, None) for name, i in ids.items() if i is not None]
