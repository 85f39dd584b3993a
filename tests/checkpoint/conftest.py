"""Checkpoints as other projects publish them, written with their key names: tiny and random."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.open_head import open_head
from toolkit.heads.draft_head import head_class
from toolkit.targets.facts import target_facts
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import save_tensors

AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="session")
def tiny_facts(tiny_target_directory):
    return target_facts(tiny_target_directory)


# Fields of a random head, besides those of the target.
KINDS = {
    "eagle3": {"aux_layer_ids": (2, 3, 4)},
    "eagle2": {},
    "dspark": {
        "aux_layer_ids": (1, 2, 3), "num_hidden_layers": 2, "block_size": 5, "markov_rank": 4, "mask_token_id": 7,
    },
}  # fmt: skip


@pytest.fixture
def make_draft(tiny_target, tiny_draft):
    """Builds a random head of the tiny target with any of the variants, and the map of 160 ids (cut) or of all."""

    def make(kind: str, cut: bool = True, **variants) -> DraftCheckpoint:
        torch.manual_seed(9)
        head_type, size = head_class(kind), tiny_target.vocab_size
        kept = tiny_draft.token_map if cut and kind != "eagle2" else TokenMap.identity(size)
        own = {**KINDS[kind]} if kind == "eagle2" else {**KINDS[kind], "draft_vocab_size": kept.size}
        config = head_type.config_class.from_target_config(tiny_target.config, vocab_size=size, **own)
        head = head_type(replace(config, **variants)).eval().requires_grad_(False)
        for name, value in head.named_parameters():
            if "norm" in name or name.endswith("bias"):  # ones and zeros would hide a norm that is left out
                value.copy_(torch.rand_like(value) + 0.5)
        return DraftCheckpoint(head, kept)

    return make


@pytest.fixture
def make_eagle3(make_draft):
    """Builds a random EAGLE-3 head."""
    return lambda **variants: make_draft("eagle3", **variants).head


def check_same(draft: DraftCheckpoint, directory, target: str | None = None) -> None:
    """The head that is read from `directory` has the same settings, token map, bits and dtype."""
    read = open_head(directory, target=target)
    assert read.head.config == draft.head.config and read.token_map == draft.token_map
    state = read.head.state_dict()
    assert state.keys() == draft.head.state_dict().keys()
    for name, value in draft.head.state_dict().items():
        assert torch.equal(state[name], value) and state[name].dtype == value.dtype, name


def config_of(directory) -> dict:
    return json.loads((directory / "config.json").read_text())


def layer_config(config) -> dict:
    """What every project's config.json says about the layer, as transformers 4 wrote it."""
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "bos_token_id": 1,
        "torch_dtype": "float32",
        "use_cache": True,
    }


@pytest.fixture
def publish(tiny_draft, tmp_path):
    """Writes a head as `project` does; `change(config, tensors)` edits it before it is written."""

    def write(project: str, head, change=None, name: str = "published"):
        config, tensors = PROJECTS[project](head, tiny_draft.token_map)
        if change is not None:
            change(config, tensors)
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        if project in ("safeailab", "eagle1"):
            torch.save(tensors, directory / "pytorch_model.bin")
        else:
            save_tensors(directory / "model.safetensors", tensors)
        return directory

    return write


def _outputs(head) -> list[int]:
    return [i - 1 for i in head.config.aux_layer_ids]


def _named(head, prefix: str) -> dict[str, torch.Tensor]:
    return {name.replace("midlayer.", prefix): value.clone() for name, value in head.state_dict().items()}


def _safeailab(head, token_map):
    config = {**layer_config(head.config), "architectures": ["LlamaForCausalLM"], "draft_vocab_size": token_map.size}
    return config, {**_named(head, "midlayer."), "d2t": token_map.d2t, "t2d": token_map.t2d}


def _specforge(head, token_map):
    config, tensors = _safeailab(head, token_map)
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "head_dim": head.config.head_dim,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "eagle_config": {AUX: _outputs(head), "use_aux_hidden_state": True},
        "tie_word_embeddings": False,
    }
    if head.config.fc_norm:
        config["fc_norm"] = True
    return config, tensors


def _angelslim(head, token_map):
    config, tensors = _specforge(head, token_map)
    config.pop("eagle_config")
    return config | {"architectures": ["Eagle3LlamaForCausalLM"], "use_sliding_window": False}, tensors


def _modelopt(head, token_map):
    config, _ = _specforge(head, token_map)
    config["eagle_config"] |= {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True}
    config["eagle_config"] |= {"use_mtp_layernorm": False}
    return config, {**_named(head, "layers.0."), "d2t": token_map.d2t}


def _nemo(head, token_map):
    """NeMo AutoModel keeps the module that wraps the layer in the names."""
    config, tensors = _specforge(head, token_map)
    bare = ("lm_head.weight", "d2t", "t2d")
    return config, {
        name if name in bare else "model." + name.replace("midlayer.", "layers.0."): value
        for name, value in tensors.items()
    }


def _speculators(head, token_map):
    own = head.config
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "nobody/at-hand", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            **layer_config(own),
            "model_type": "qwen3" if own.qk_norm else "llama",
            "head_dim": own.head_dim,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "attention_bias": False,
            "mlp_bias": False,
        },
        "draft_vocab_size": token_map.size,
        "norm_before_residual": own.norm_before_residual,
        "norm_before_fc": own.norm_before_fc,
        "fc_norm": own.fc_norm,
        "norm_output": own.norm_output,
        "target_hidden_size": None,
        "embed_requires_grad": False,
        AUX: list(own.aux_layer_ids),
    }
    return config, {**_named(head, "layers.0."), "d2t": token_map.d2t, "t2d": token_map.t2d}


def _eagle1(head, _token_map):
    config = {**layer_config(head.config), "architectures": ["LlamaForCausalLM"], "bias": head.config.fc_bias}
    tensors = {name: value.clone() for name, value in head.state_dict().items()}
    return config, tensors


PROJECTS = {
    "safeailab": _safeailab,
    "specforge": _specforge,
    "angelslim": _angelslim,
    "modelopt": _modelopt,
    "nemo": _nemo,
    "speculators": _speculators,
    "eagle1": _eagle1,
}
