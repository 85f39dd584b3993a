"""Exports: the same bits there and back, in the keys each loader reads; refused where one would drop a part."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from tests.checkpoint.conftest import check_same, config_of
from toolkit.checkpoint import eagle3_format, export_head
from toolkit.checkpoint import open_head as formats
from toolkit.checkpoint.draft_dir import DraftCheckpoint, load_draft
from toolkit.checkpoint.export_head import export_head as export
from toolkit.checkpoint.files import load_pickle
from toolkit.checkpoint.launch_lines import Shape
from toolkit.checkpoint.open_head import open_head
from toolkit.errors import ExportError
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import load_tensors

AUX = "eagle_aux_hidden_state_layer_ids"
CHAIN = Shape(3, 1, 4)
EAGLE31 = {"fc_norm": True, "norm_output": True}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
SHARED = {"own_output": False, "cut": False}
NO_CONFIDENCE = {"confidence": False, "confidence_with_markov": False}
DFLASH = {**NO_CONFIDENCE, "markov_rank": 0, "sample_from_anchor": False}
ROUND_TRIPS = [
    ("eagle3", "eagle", {}),
    ("eagle3", "sglang", EAGLE31 | {"rope_parameters": LINEAR}),
    ("eagle3", "vllm", {"norm_before_residual": True, "norm_before_fc": True}),
    ("eagle3", "vllm", {"num_hidden_layers": 3, "sliding_window": 96}),
    ("eagle3", "speculators", EAGLE31),
    ("eagle3", "speculators", {"qk_norm": True, "sliding_window": 96, "num_hidden_layers": 2}),
    ("eagle3", "gguf", {"norm_before_residual": True, "norm_before_fc": True, "rope_parameters": LINEAR}),
    ("eagle3", "toolkit", EAGLE31 | {"qk_norm": True, "num_hidden_layers": 2, "sliding_window": 96}),
    ("eagle3", "toolkit", {"fc_bias": True, "attention_bias": True}),
    ("eagle2", "sglang", {}),
    ("eagle2", "eagle", {"attention_bias": True}),
    ("eagle2", "vllm", {"fc_bias": False, "sliding_window": 96, "num_hidden_layers": 2}),
    ("dspark", "vllm", {}),
    ("dspark", "vllm", {**SHARED, "rope_parameters": LINEAR}),
    ("dspark", "speculators", DFLASH),
    ("dspark", "speculators", {**SHARED, **NO_CONFIDENCE, "sample_from_anchor": False}),
    ("dspark", "sglang", SHARED),
    ("dspark", "sglang", {**SHARED, **DFLASH}),
    ("dspark", "vllm", {**DFLASH, "causal": True}),
    ("dspark", "toolkit", {"causal": True, "correction": "dfly"}),
]


@pytest.mark.parametrize(("kind", "to", "variants"), ROUND_TRIPS)
def test_round_trip(make_draft, tiny_facts, tmp_path, kind, to, variants):
    """ours -> theirs -> ours: the same bits, token map and settings; a shifted aux id would show in the config."""
    draft = make_draft(kind, **variants)
    draft.head.to(torch.bfloat16)
    export(draft, to, tmp_path / "out", tiny_facts, CHAIN)
    check_same(draft, tmp_path / "out", tiny_facts.source)


class TestWhatLoadersRead:
    """The keys and names, as read in the loaders' sources."""

    def test_engines(self, tiny_draft, tiny_facts, tmp_path):
        export(tiny_draft, "vllm", tmp_path / "o", tiny_facts, CHAIN)
        config, names = config_of(tmp_path / "o"), load_tensors(tmp_path / "o" / "model.safetensors").keys()
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config[AUX] == [2, 3, 4] and config["eagle_config"][AUX] == [1, 2, 3]
        assert config["draft_vocab_size"] == 160 and config["vocab_size"] == tiny_facts.vocab_size
        assert "norm_output" not in config and config["norm_before_residual"] is False and "bias" not in config
        layer = {"hidden_norm", "input_layernorm", "post_attention_layernorm"}
        layer |= {f"self_attn.{p}_proj" for p in "qkvo"} | {f"mlp.{p}_proj" for p in ("gate", "up", "down")}
        expected = {"d2t", "t2d", "fc.weight", "norm.weight", "lm_head.weight"}
        assert names == expected | {f"midlayer.{name}.weight" for name in layer}

    def test_speculators(self, tiny_draft, tiny_facts, tiny_target, tmp_path):
        export(tiny_draft, "speculators", tmp_path / "o", tiny_facts, CHAIN)
        config, tensors = config_of(tmp_path / "o"), load_tensors(tmp_path / "o" / "model.safetensors")
        assert config["speculators_model_type"] == "eagle3" and config[AUX] == [2, 3, 4]
        spoken = config["speculators_config"]
        assert spoken["verifier"] == {"name_or_path": tiny_facts.source, "architectures": ["LlamaForCausalLM"]}
        assert spoken["proposal_methods"][0]["speculative_tokens"] == 3
        assert config["norm_before_residual"] is False  # vLLM reads an absent one as true
        assert "layers.0.hidden_norm.weight" in tensors and not any(name.startswith("midlayer") for name in tensors)
        assert torch.equal(tensors["embed_tokens.weight"], tiny_target.embed_tokens.weight)

    @pytest.mark.parametrize("sharded", [True, False])
    def test_eagle(self, tiny_draft, tiny_facts, tiny_target, tmp_path, monkeypatch, sharded):
        """With target_hidden_size its model takes the embedding from the head's file, else by the target's index."""
        monkeypatch.setattr(eagle3_format, "is_sharded", lambda _facts: sharded)
        export(tiny_draft, "eagle", tmp_path / "o", tiny_facts, CHAIN)
        config, tensors = config_of(tmp_path / "o"), load_pickle(tmp_path / "o" / "pytorch_model.bin")
        assert config["rope_theta"] == 10000.0 and config["rope_scaling"] is None and "d2t" in tensors
        assert tensors["t2d"].dtype == torch.bool
        assert ("embed_tokens.weight" in tensors) == ("target_hidden_size" in config) == (not sharded)

    def test_transformers_reads_the_same_rope(self, make_eagle3, tiny_draft, tiny_facts, tmp_path):
        """vLLM and SGLang read the config through transformers, which knows three ways to write a rope."""
        rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
        draft = DraftCheckpoint(make_eagle3(rope_parameters=rope), tiny_draft.token_map)
        export(draft, "vllm", tmp_path / "o", tiny_facts, CHAIN)
        read = AutoConfig.from_pretrained(tmp_path / "o")
        assert isinstance(read, LlamaConfig) and {k: read.rope_parameters[k] for k in rope} == rope

    def test_a_whole_vocabulary_has_no_map(self, make_eagle3, tiny_target, tiny_facts, tmp_path):
        """vLLM has no place for d2t then and stops at it."""
        head = make_eagle3(draft_vocab_size=tiny_target.vocab_size)
        draft = DraftCheckpoint(head, TokenMap.identity(tiny_target.vocab_size))
        export(draft, "vllm", tmp_path / "o", tiny_facts, CHAIN)
        assert not {"d2t", "t2d"} & load_tensors(tmp_path / "o" / "model.safetensors").keys()
        check_same(draft, tmp_path / "o", tiny_facts.source)


REFUSED = [
    ("sglang", {"norm_before_residual": True}, "norm_before_residual"),
    ("eagle", {"num_hidden_layers": 2}, "num_hidden_layers 2"),
    ("sglang", {"aux_layer_ids": (0, 3, 5)}, "only ids from 1 to 6"),
    ("gguf", {"aux_layer_ids": (2, 3)}, "reads three, each below 7"),
]


@pytest.mark.parametrize(("to", "variants", "says"), REFUSED)
def test_what_a_loader_would_drop_is_refused(make_eagle3, tiny_draft, tiny_facts, tmp_path, to, variants, says):
    """Each would be served in silence, with an accept_length near 1."""
    draft = DraftCheckpoint(make_eagle3(**variants), tiny_draft.token_map)
    with pytest.raises(ExportError) as caught:
        export(draft, to, tmp_path / "o", tiny_facts, CHAIN)
    assert says in str(caught.value) and list(tmp_path.iterdir()) == []


SPOILED = {
    "a bit of a tensor": lambda result: result.tensors["fc.weight"].view(-1)[:1].neg_(),
    "the aux ids": lambda result: result.config.update({AUX: [1, 3, 5], "eagle_config": {}}),
    "a name": lambda result: result.tensors.update({"fc2.weight": result.tensors.pop("fc.weight")}),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_mismatch_raises_and_leaves_nothing(tiny_draft, tiny_facts, tmp_path, monkeypatch, what):
    """The reading back is the exporter's only judge: it must see every kind of difference."""

    def spoil(*given):
        result = formats.exported(*given)
        result.tensors = {name: value.clone() for name, value in result.tensors.items()}
        SPOILED[what](result)
        return result

    monkeypatch.setattr(export_head, "exported", spoil)
    with pytest.raises(ValueError, match=r"another head|missing|same draft vocabulary|differ"):
        export(tiny_draft, "vllm", tmp_path / "o", tiny_facts, CHAIN)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(tiny_draft, tiny_facts, tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ExportError, match="exists; give a new folder"):
        export(tiny_draft, "vllm", tmp_path, tiny_facts, CHAIN)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_card_has_the_measured_figures_and_no_others(tiny_draft, tiny_facts, tmp_path):
    """A figure nobody measured must not be in it."""
    export(tiny_draft, "vllm", tmp_path / "bare", tiny_facts, CHAIN)
    bare = (tmp_path / "bare" / "README.md").read_text()
    assert "Nothing was measured" in bare and "accept_length" not in bare
    row = {"shape": "adaptive", "num_steps": 4, "top_k": 1, "num_draft_tokens": 5, "temperature": 0.0}
    row |= {"accept_length": 1.75, "interval": [1.66, 1.87], "verify_steps": 1505, "speedup": None}
    meta = {"measured": {"rows": [row], "date": "2026-11-21", "commit": "34cba7b", "hardware": {}, "settings": {}}}
    export(DraftCheckpoint(tiny_draft.head, tiny_draft.token_map, meta), "vllm", tmp_path / "o", tiny_facts, CHAIN)
    card = (tmp_path / "o" / "README.md").read_text()
    assert "| adaptive | 4 | 1 | 5 | 0.00 | 1.75 | [1.66, 1.87] | 1505 | - |" in card


def test_launch_lines(tiny_draft, tiny_facts, tmp_path):
    """Typed as they stand: the three numbers in SGLang's order, vLLM's chain length, the absolute folder."""
    lines = {to: export(tiny_draft, to, tmp_path / to, tiny_facts, Shape(5, 4, 16))[0] for to in ("sglang", "vllm")}
    assert lines["sglang"].endswith(
        f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {tmp_path}/sglang "
        "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
    )
    settings = json.loads(lines["vllm"].rpartition(" --speculative-config ")[2].strip("'"))
    python = export(tiny_draft, "eagle", tmp_path / "eagle", tiny_facts, Shape(5, 4, 16))[0]
    assert python.endswith("use_eagle3=True, depth=4, top_k=4, total_token=16)")  # depth: levels behind the first
    assert settings == {"method": "eagle3", "model": f"{tmp_path}/vllm", "num_speculative_tokens": 5}


def test_to_our_own_keeps_what_was_resolved(make_eagle3, publish, tiny_facts, tmp_path):
    """A foreign head becomes a draft directory that states all, the user's word included; what it measured stays."""
    directory = publish("specforge", make_eagle3(), lambda config, _: config.update(norm_output=True))
    draft = open_head(directory, target=tiny_facts.source, overrides={"norm_output": False})
    draft.meta["measured"] = {"best_shape": "4,1,5"}
    export(draft, "toolkit", tmp_path / "own", tiny_facts, CHAIN)
    own = load_draft(tmp_path / "own")
    assert not own.head.config.norm_output and own.meta["target"]["name"] == tiny_facts.name
    assert any("given with --set" in line for line in own.meta["imported"])
    assert own.meta["measured"]["best_shape"] == "4,1,5"
