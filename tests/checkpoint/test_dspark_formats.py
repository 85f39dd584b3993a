"""DFlash and DSpark checkpoints of other projects: read, refused in words, and written to the same bits."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.checkpoint.conftest import check_same, config_of
from toolkit.checkpoint.export_head import export_head as export
from toolkit.checkpoint.files import looks_like_target
from toolkit.checkpoint.launch_lines import Shape
from toolkit.checkpoint.open_head import exported, open_head
from toolkit.errors import DraftDirError, ExportError
from toolkit.weights import WeightsError, load_tensors, save_tensors

CHAIN = Shape(4, 1, 5)
SHARED = {"own_output": False, "cut": False}
DFLASH = {"markov_rank": 0, "confidence": False, "sample_from_anchor": False, "confidence_with_markov": False}


@pytest.fixture
def make(make_draft):
    return partial(make_draft, "dspark")


class TestWhatLoadersRead:
    """The keys and names, as read in the loaders' sources."""

    def test_dspark(self, make, tiny_facts, tmp_path):
        launch, _ = export(make(**SHARED), "sglang", tmp_path / "o", tiny_facts, CHAIN)
        config, names = config_of(tmp_path / "o"), load_tensors(tmp_path / "o" / "model.safetensors").keys()
        assert config["architectures"] == ["Qwen3DSparkModel"] and config["model_type"] == "qwen3"
        assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3] and config["target_layer_ids"] == [0, 1, 2]
        assert config["dflash_config"] == {"mask_token_id": 7, "target_layer_ids": [0, 1, 2]}
        assert config["markov_rank"] == 4 and config["markov_head_type"] == "vanilla"
        assert config["enable_confidence_head"] and config["confidence_head_with_markov"]
        assert config["layer_types"] == ["full_attention"] * 2
        assert {"fc.weight", "hidden_norm.weight", "norm.weight", "markov_head.markov_w1.weight"} <= names
        assert {
            "confidence_head.proj.bias",
            "layers.1.self_attn.q_norm.weight",
        } <= names and "lm_head.weight" not in names
        assert "--speculative-algorithm DSPARK" in launch and launch.endswith("--speculative-dspark-block-size 5")

    def test_dflash(self, make, tiny_facts, tmp_path):
        launch, _ = export(make(**SHARED, **DFLASH), "sglang", tmp_path / "o", tiny_facts, Shape(9, 1, 10))
        config = config_of(tmp_path / "o")
        assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 5
        assert "markov_rank" not in config
        assert "--speculative-algorithm DFLASH" in launch and launch.endswith("--speculative-dflash-block-size 5")

    def test_vllm(self, make, tiny_facts, tmp_path):
        launch, _ = export(make(), "vllm", tmp_path / "o", tiny_facts, CHAIN)
        assert '"method": "dspark"' in launch and '"num_speculative_tokens": 5' in launch
        assert {"d2t", "lm_head.weight"} <= load_tensors(tmp_path / "o" / "model.safetensors").keys()
        launch, _ = export(make(**DFLASH, causal=True), "vllm", tmp_path / "f", tiny_facts, CHAIN)
        assert '"method": "dflash"' in launch and config_of(tmp_path / "f")["dflash_config"]["causal"] is True

    def test_vllm_of_causal_blocks_with_the_markov_bias(self, make, tiny_facts, tmp_path):
        """Without the key vLLM would let each place see its whole block."""
        launch, _ = export(make(causal=True), "vllm", tmp_path / "o", tiny_facts, CHAIN)
        config = config_of(tmp_path / "o")
        assert '"method": "dspark"' in launch and config["architectures"] == ["Qwen3DSparkModel"]
        assert config["markov_rank"] == 4 and config["dflash_config"]["causal"] is True

    def test_a_block_whose_first_place_drafts_nothing(self, make, tiny_facts, tmp_path):
        """SGLang's and vLLM's DSpark count drafts, speculators places."""
        for to, block in (("vllm", 4), ("speculators", 5)):
            export(make(sample_from_anchor=False), to, tmp_path / to, tiny_facts, CHAIN)
            assert config_of(tmp_path / to)["block_size"] == block

    def test_speculators(self, make, tiny_facts, tmp_path):
        export(make(), "speculators", tmp_path / "o", tiny_facts, CHAIN)
        config = config_of(tmp_path / "o")
        assert config["speculators_model_type"] == "dspark" and config["aux_hidden_state_layer_ids"] == [1, 2, 3]
        assert config["sample_from_anchor"] is True and config["sliding_window_non_causal"] is True
        assert config["transformer_layer_config"]["model_type"] == "qwen3"
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
        export(make(**DFLASH), "speculators", tmp_path / "f", tiny_facts, CHAIN)
        assert config_of(tmp_path / "f")["speculators_model_type"] == "dflash"


@pytest.mark.parametrize(
    ("to", "variants", "says"),
    [
        ("sglang", {}, "output matrix of its own, which cannot be written for sglang"),
        ("sglang", {**SHARED, "aux_layer_ids": (0, 2, 3)}, "supports only ids from 1 to"),
        ("sglang", {**SHARED, **DFLASH, "causal": True}, "blocks are causal, and SGLang lets each place see its whole"),
        ("speculators", {**DFLASH, "causal": True}, "blocks are causal, and speculators"),
        ("vllm", {"correction": "dfly"}, "its correction is dfly, which no other engine computes"),
        ("sglang", {**SHARED, "correction": "dfly"}, "its correction is dfly"),
    ],
)
def test_what_an_engine_would_change_is_refused(make, tiny_facts, tmp_path, to, variants, says):
    with pytest.raises(ExportError, match=says):
        export(make(**variants), to, tmp_path / "o", tiny_facts, CHAIN)
    assert not (tmp_path / "o").exists()


def test_targets_that_scale_their_embeddings_in_another_place_are_refused(make, tiny_facts):
    """The head would read embeddings smaller by the root of the hidden size, and nothing would say so."""
    gemma = replace(tiny_facts, config=SimpleNamespace(model_type="gemma3_text"))
    with pytest.raises(ExportError, match="vLLM scales the embeddings of a gemma3_text target"):
        exported(make(), "vllm", gemma, 4)


# -- checkpoints as others write them ----------------------------------------------------------------------------------


@pytest.fixture
def publish(make, tiny_facts, tmp_path):
    """Writes a head as another project does, with changes of its keys and tensors (None: left out)."""

    def write(form: str, changes=None, **variants):
        draft = make(**{**SHARED, **variants})
        own, state = draft.head.config, {name: value.clone() for name, value in draft.head.state_dict().items()}
        outputs = [i - 1 for i in own.aux_layer_ids]
        layer = {
            "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "rope_theta": 10000.0,
            "tie_word_embeddings": False, "torch_dtype": "float32", "use_sliding_window": False,
            "layer_types": ["full_attention"] * 2, "sliding_window": None, "max_window_layers": 5,
            **{key: getattr(own, key) for key in (
                "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
                "head_dim", "rms_norm_eps", "max_position_embeddings", "vocab_size")},
        }  # fmt: skip
        markov = {
            "markov_rank": own.markov_rank, "markov_head_type": "vanilla", "enable_confidence_head": own.confidence,
            "confidence_head_with_markov": own.confidence_with_markov,
        }  # fmt: skip
        nested = {"target_layer_ids": outputs, "mask_token_id": own.mask_token_id}
        config = {
            "z-lab": {**layer, "architectures": ["DFlashDraftModel"], "block_size": own.block_size,
                      "num_target_layers": tiny_facts.n_layers, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
                      "dflash_config": nested},
            "z-lab-new": {**layer, "architectures": ["DFlashDraftModel"],
                          "dflash_config": {**nested, "block_size": own.block_size}},
            "deepspec": {**layer, "architectures": ["Qwen3DSparkModel"], "block_size": own.block_size, **markov,
                         **nested},
            "sglang": {**layer, "architectures": ["DSparkDraftModel"], "block_size": own.block_size,
                       "dflash_config": {**nested, **markov}},
            "speculators": {
                "architectures": ["DSparkSpeculator"], "speculators_version": "0.9.0", **markov,
                "speculators_model_type": "dspark" if own.markov_rank else "dflash", "transformer_layer_config": layer,
                "draft_vocab_size": own.draft_vocab_size, "block_size": own.block_size, "target_hidden_size": None,
                "aux_hidden_state_layer_ids": list(own.aux_layer_ids), "mask_token_id": own.mask_token_id,
                "sliding_window_non_causal": False, "sample_from_anchor": own.sample_from_anchor,
            },
        }[form]  # fmt: skip
        if own.own_output:
            state |= {"d2t": draft.token_map.d2t, "t2d": draft.token_map.t2d}
        for key, value in (changes or {}).items():
            place = state if isinstance(value, torch.Tensor) or key in state else config
            if value is None:
                del place[key]
            else:
                place[key] = value
        directory = tmp_path / f"{form}-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        save_tensors(directory / "model.safetensors", state)
        return draft, directory

    return write


@pytest.mark.parametrize(
    ("form", "variants"),
    [
        ("z-lab", DFLASH),
        ("z-lab-new", DFLASH),
        ("deepspec", {}),
        ("sglang", {}),
        ("speculators", DFLASH),
        ("speculators", {"own_output": True, "cut": True, "sample_from_anchor": False}),
    ],
)
def test_forms_of_others(publish, form, variants):
    draft, directory = publish(form, **variants)
    check_same(draft, directory)
    assert not looks_like_target(config_of(directory))
    assert [one.line for one in open_head(directory).resolutions if one.warning] == []


@pytest.mark.parametrize("name", ["causal_head", "causal", "is_causal"])
def test_causal_blocks_by_all_names(publish, name):
    """JetSpec's, vLLM's and ASpec's. Read as a bidirectional head it would draft otherwise than it was trained."""
    keys = {"target_layer_ids": [0, 1, 2], "mask_token_id": 7}
    draft, directory = publish("z-lab", {"dflash_config": {**keys, name: True}}, **DFLASH, causal=True)
    check_same(draft, directory)
    assert not [one.line for one in open_head(directory).resolutions if one.warning]
    assert not open_head(directory, overrides={"causal": False}).head.config.causal


@pytest.mark.parametrize(("architecture", "causal"), [("Qwen3DFlashDraftModel", False), ("JetSpecDraftModel", True)])
def test_other_names_of_the_architecture(publish, architecture, causal):
    """NeMo AutoModel's, and that of a SpecForge fork, which makes blocks causal without a key in the config."""
    draft, directory = publish("z-lab-new", {"architectures": [architecture]}, **DFLASH, causal=causal)
    check_same(draft, directory)
    _, directory = publish("z-lab-new", {"architectures": [architecture], "is_causal": not causal}, **DFLASH)
    assert open_head(directory).head.config.causal is not causal, "a key in the config decides"


REFUSED = [
    ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}, "a sliding window"),
    ({"layers.0.self_attn.q_proj.bias": torch.zeros(64)}, "unexpected: layers.0.self_attn.q_proj.bias"),
    ({"mask_token_id": None}, "states no mask_token_id"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}, "are different layers"),
    ({"markov_rank": 8}, "markov_rank is 8, but by the tensors 4"),
    ({"is_causal": True, "causal": False}, "causal is False and is_causal is True; give the right one with --set"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED)
def test_what_cannot_be_the_head_is_refused_with_the_cause(publish, changes, says):
    """Each of these some engine skips in silence, or computes another way."""
    _, directory = publish("deepspec", changes)
    with pytest.raises((DraftDirError, WeightsError)) as caught:
        open_head(directory)
    assert says in str(caught.value)


def test_a_mask_embedding_that_is_the_vocabularys_row(publish, tiny_target, tiny_target_directory):
    """The target's row of the mask token is what the head reads anyway."""
    row = tiny_target.embed_tokens.weight[7].detach().clone()
    draft, directory = publish("deepspec", {"mask_embedding": row})
    read = open_head(directory, target=str(tiny_target_directory))
    assert read.head.config == draft.head.config
    _, directory = publish("z-lab", **DFLASH)
    torch.save(torch.zeros(64), directory / "mask_embedding.pt")
    with pytest.raises(DraftDirError, match="mask_embedding of its own"):
        open_head(directory, target=str(tiny_target_directory))
