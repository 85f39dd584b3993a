import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.errors import TargetError
from toolkit.targets.gguf_file import converted_gguf
from toolkit.targets.load import read_target
from toolkit.weights import load_strict, load_tensors


def test_a_gguf_file_is_the_model_it_was_written_from(tiny_gguf, tiny_target, sample_ids):
    """A wrong permutation of q and k, or a lost norm, still loads and talks nonsense; float32 files stay float32."""
    target = read_target(tiny_gguf)
    assert target.dtype == torch.float32
    difference = (target.model(sample_ids).logits - tiny_target.model(sample_ids).logits).abs().max()
    assert difference < 1e-4


def test_tokens_template_and_ends_survive(tiny_gguf, tiny_target):
    """Prompts are rendered with the converted tokenizer; a lost template or eos id would make every answer endless."""
    target = read_target(tiny_gguf)
    assert target.stop_ids == tiny_target.stop_ids
    assert target.template_sha256 == tiny_target.template_sha256
    text = "the quick brown fox, while seven wizards"
    pieces = [piece for piece, _ in target.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 2024")]
    assert pieces == ["in", "Ġ", "2", "0", "2", "4"], "digits stand alone as in training"
    assert target.tokenizer(text)["input_ids"] == tiny_target.tokenizer(text)["input_ids"]
    assert target.tokenizer.model_max_length == target.max_context
    assert target.tokenizer.pad_token_id == tiny_target.tokenizer.pad_token_id


def test_packed_weights_are_written_as_a_plain_model(tiny_gguf_q8, tiny_target, sample_ids):
    """Weights left in GGUF blocks, or a config that still says so, cannot be loaded by anything but the GGUF loader."""
    directory = converted_gguf(tiny_gguf_q8)
    config = LlamaConfig.from_pretrained(directory)
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    tensors = load_tensors(directory / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    model = LlamaForCausalLM(config)
    load_strict(model, tensors, str(directory))
    ours, exact = model.float()(sample_ids).logits, tiny_target.model(sample_ids).logits
    # 8-bit blocks and bf16 each round by less than 1 %; a model of wrong weights differs by more than 100 %.
    assert (ours - exact).norm() / exact.norm() < 0.1


def test_the_second_load_converts_nothing(tiny_gguf, own_cache, monkeypatch):
    """Conversion takes a minute for a real model; it must happen once a file, whatever the file is called."""
    first = converted_gguf(tiny_gguf)
    monkeypatch.setattr("toolkit.targets.gguf_file.convert", lambda *_: pytest.fail("converted again"))
    renamed = own_cache.parent / "renamed.gguf"
    renamed.write_bytes(tiny_gguf.read_bytes())
    assert converted_gguf(renamed) == first and first.parent == own_cache / "targets"


def test_a_gguf_target_has_the_file_s_hash_as_revision(tiny_gguf):
    """A draft head remembers the weights it was trained for; asking for other ones must not load these."""
    target = read_target(tiny_gguf)
    assert target.revision.startswith("gguf-") and target.name == str(tiny_gguf)
    assert read_target(tiny_gguf, revision=target.revision).fingerprint == target.fingerprint
    with pytest.raises(TargetError, match="revision is 'main'"):
        read_target(tiny_gguf, revision="main")


def test_a_damaged_file_leaves_no_cache_folder(tiny_gguf, own_cache):
    """A download cut short must name the file, and must not poison the cache for the whole one."""
    broken = own_cache.parent / "broken.gguf"
    broken.write_bytes(tiny_gguf.read_bytes()[:-5000])
    with pytest.raises(TargetError, match="broken.gguf"):
        read_target(broken)
    assert not [path for path in (own_cache / "targets").iterdir() if path.is_dir()]
