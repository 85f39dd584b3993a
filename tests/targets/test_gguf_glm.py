"""GLM-4.5 GGUF files: the target and its MTP module are those of the directory that the file was written from."""

from __future__ import annotations

import gguf
import pytest
import torch

from tests.checkpoint.native_targets import change_module, write_native_target
from tests.targets.glm_gguf import write_glm_gguf
from toolkit.checkpoint.native_mtp import find_native, load_native
from toolkit.errors import TargetError
from toolkit.targets.facts import target_facts
from toolkit.targets.gguf_file import converted_gguf
from toolkit.targets.load import load_target
from toolkit.weights import read_json, write_json


@pytest.fixture
def directory(tiny_target, tmp_path):
    """Twelve experts: their numbers have one digit or two. A layer with biases, as GLM-4.5-Air has."""
    return write_native_target(
        tmp_path / "glm", "glm", tiny_target.tokenizer, n_routed_experts=12, attention_bias=True, norm_topk_prob=False
    )


def loaded(name):
    target, facts = load_target(name), target_facts(name)
    return target, load_native(target, facts, find_native(facts)).head.state_dict()


def test_target_and_module_are_the_directory_s(directory, tmp_path, sample_ids):
    """Every weight, bit for bit, and the same logits: a setting that is read wrongly changes those."""
    target, module = loaded(directory)
    read, own = loaded(write_glm_gguf(tmp_path / "glm.gguf", directory))
    assert read.dtype == torch.float32 and module.keys() == own.keys()
    assert all(torch.equal(module[name], own[name]) for name in module)
    assert torch.equal(target.model(sample_ids).logits, read.model(sample_ids).logits)
    assert read.stop_ids == {0, 2} and read.template_sha256 == target.template_sha256
    assert read.config.num_hidden_layers == target.config.num_hidden_layers


def test_text_is_split_as_the_family_splits_it(directory, tmp_path):
    """The file names the rule by a word only."""
    tokenizer = load_target(write_glm_gguf(tmp_path / "glm.gguf", directory)).tokenizer
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("IT'S 2024!\n\n  now")
    assert [piece for piece, _ in pieces] == ["IT", "'S", "Ġ", "202", "4", "!ĊĊ", "Ġ", "Ġnow"]
    assert tokenizer("<|im_end|>")["input_ids"] == [2]
    assert tokenizer.decode(tokenizer("It's 2024")["input_ids"]) == "It's 2024"


def test_a_quantised_file_becomes_bfloat16(directory, tmp_path, sample_ids):
    """8-bit blocks and bf16 round by less than 1 % each."""
    target, module = loaded(directory)
    path = write_glm_gguf(tmp_path / "glm.gguf", directory, quantised=True)
    read, own = loaded(path)
    assert read.dtype == own["layers.0.eh_proj.weight"].dtype == torch.bfloat16
    for name, value in module.items():
        assert (own[name].float() - value).norm() <= 0.02 * value.norm(), name
    weights = read_json(converted_gguf(path) / "model.safetensors.index.json")["weight_map"]
    assert len(set(weights.values())) == 6, "a file for each of five blocks, and one for the ends"


def test_a_file_without_a_module_is_a_target(directory, tmp_path):
    change_module(directory, lambda tensors: {})
    config = read_json(directory / "config.json")
    write_json(directory / "config.json", {**config, "num_nextn_predict_layers": 0})
    facts = target_facts(write_glm_gguf(tmp_path / "glm.gguf", directory))
    assert facts.n_layers == 4 and find_native(facts) is None


def test_the_module_s_copies_of_the_embedding_may_be_absent(directory, tmp_path):
    change_module(directory, lambda t: {n: v for n, v in t.items() if "embed_tokens" not in n and "head.head" not in n})
    assert "layers.0.eh_proj.weight" in loaded(write_glm_gguf(tmp_path / "glm.gguf", directory))[1]


@pytest.mark.parametrize(
    ("change", "settings", "said"),
    [
        (lambda t: t, {"rope.dimension_sections": 8}, r"not read \(rope.dimension_sections\)"),
        (lambda t: t, {"expert_gating_func": 1}, r"not read \(expert_gating_func\)"),
        (lambda t: t, {"attention.value_length": 8}, r"not read \(attention.value_length\)"),
        (lambda t: {n: v for n, v in t.items() if "enorm" not in n}, {}, "missing blk.4.nextn.enorm.weight"),
        (lambda t: {n: v for n, v in t.items() if "q_norm" not in n}, {}, "missing blk.4.attn_q_norm.weight"),
    ],
)
def test_what_is_not_read_is_named(change, settings, said, directory, tmp_path):
    """A setting that is passed over would change every answer."""
    change_module(directory, change)
    with pytest.raises(TargetError, match=said):
        load_target(write_glm_gguf(tmp_path / "glm.gguf", directory, **settings))


def test_a_file_of_another_family_with_a_module_is_refused(tmp_path):
    """transformers reads neither DeepSeek-V3 nor its module from GGUF; the message names the module."""
    for key, value, said in (
        ("deepseek2.nextn_predict_layers", 1, "holds 1 MTP modules .deepseek2.*only glm4moe files"),
        ("split.count", 3, "one of 3 parts"),
    ):
        writer = gguf.GGUFWriter(tmp_path / "other.gguf", "deepseek2")
        writer.add_uint32(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(TargetError, match=said):
            load_target(tmp_path / "other.gguf")
