"""EAGLE-3 heads as GGUF files: what llama.cpp reads in them, and what of other files is read or refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from tests.targets.conftest import write_gguf as write_target
from toolkit.checkpoint import gguf_head
from toolkit.checkpoint.draft_dir import DraftCheckpoint, DraftDirError
from toolkit.checkpoint.export_head import export_head
from toolkit.checkpoint.gguf_head import vocabulary_of
from toolkit.checkpoint.launch_lines import Shape
from toolkit.checkpoint.open_head import open_head
from toolkit.targets.facts import target_facts
from toolkit.weights import WeightsError

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def written(make_eagle3, tiny_draft, tiny_facts, tmp_path):
    """Exports a head with these settings, in this dtype; returns the GGUF file."""

    def write(dtype=torch.float32, **variants):
        head = make_eagle3(**variants).to(dtype)
        export_head(DraftCheckpoint(head, tiny_draft.token_map), "gguf", tmp_path / "out", tiny_facts, Shape(3, 1, 4))
        return tmp_path / "out" / "model.gguf"

    return write


def contents(file):
    reader = gguf.GGUFReader(file)
    return {name: one.contents() for name, one in reader.fields.items()}, {one.name: one for one in reader.tensors}


def test_what_llama_cpp_reads(written, make_eagle3, tiny_draft, tiny_target):
    """Key by key and name by name as its loader has them. d2t as offsets, or the two halves of a rotary pair apart,
    would fail nowhere and accept next to nothing."""
    fields, tensors = contents(written(torch.bfloat16))
    config, state = tiny_draft.head.config, make_eagle3().to(torch.bfloat16).state_dict()
    own = {name.removeprefix("eagle3."): value for name, value in fields.items() if name.startswith("eagle3.")}
    assert fields["general.architecture"] == "eagle3" and list(own.pop("target_layers")) == [2, 3, 4]
    assert own.pop("attention.layer_norm_rms_epsilon") == np.float32(config.rms_norm_eps)
    assert own == {
        "embedding_length": 64, "feed_forward_length": 128, "block_count": 1, "context_length": 512,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
        "attention.value_length": 16, "rope.dimension_count": 16, "rope.freq_base": 10000.0,
        "target_hidden_size": 64, "norm_before_residual": False, "norm_before_fc": False,
    }  # fmt: skip
    assert tensors["d2t"].data.dtype == np.int64 and tensors["d2t"].data.tolist() == tiny_draft.token_map.ids.tolist()
    assert tensors["fc.weight"].shape.tolist() == [192, 64], "GGUF states the width first"
    kinds = {name: one.tensor_type.name for name, one in tensors.items() if name != "d2t"}
    norms = {"output_norm.weight", "blk.0.attn_norm.weight", "blk.0.attn_norm_2.weight", "blk.0.ffn_norm.weight"}
    assert {name for name, kind in kinds.items() if kind == "F32"} == norms
    assert {kind for name, kind in kinds.items() if name not in norms} == {"BF16"}
    query = gguf.dequantize(tensors["blk.0.attn_q.weight"].data, gguf.GGMLQuantizationType.BF16)
    ours = state["midlayer.self_attn.q_proj.weight"].float().numpy()
    assert (query[16:20] == ours[[16, 24, 17, 25]]).all(), "rows of the second head"
    norm = tensors["blk.0.attn_norm_2.weight"].data
    assert (norm == state["midlayer.hidden_norm.weight"].float().numpy()).all()
    tokenizer = tiny_target.tokenizer
    assert fields["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(range(tiny_target.vocab_size))
    assert fields["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1] and fields["tokenizer.ggml.add_bos_token"] is False
    assert fields["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [(torch.float16, {}), (torch.bfloat16, {"rope_parameters": LLAMA3, "rms_norm_eps": 9.999999747378752e-06})],
)
def test_file_and_folder_are_drafts(written, make_eagle3, tiny_facts, dtype, settings):
    """To the bit, numbers that float32 rounds included, and in the dtype of the head, norms too."""
    file = written(dtype, **settings)
    for name in (file, file.parent):
        read, state = open_head(name, target=tiny_facts.source), make_eagle3(**settings).to(dtype).state_dict()
        assert read.head.config == make_eagle3(**settings).config
        assert all(torch.equal(value, state[key]) for key, value in read.head.state_dict().items())
        assert {value.dtype for value in read.head.state_dict().values()} == {dtype}


def test_a_file_of_llama_cpps_converter(written, monkeypatch, tiny_facts, make_eagle3):
    """It states float32 numbers alone, and of a scaled rope no settings."""
    with monkeypatch.context() as patch:
        patch.setattr(gguf_head, "EXACT", "general.description")
        patch.setattr("toolkit.checkpoint.export_head._check_same", lambda *_: None)
        file = written(rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    config = open_head(file, target=tiny_facts.source).head.config
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-5, 5e5)
    assert "toolkit.exact" not in contents(file)[0]


def test_other_files(written, tiny_target, tmp_path):
    """A cut file, and a whole model."""
    file = written()
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:5000])
    with pytest.raises(WeightsError, match="not a complete GGUF file"):
        open_head(tmp_path / "cut.gguf")
    with pytest.raises(DraftDirError, match="architecture 'llama'"):
        open_head(write_target(tmp_path / "whole.gguf", tiny_target))


class TestVocabulary:
    def test_copied_from_a_targets_file(self, tiny_target, tmp_path, monkeypatch):
        """llama.cpp compares it with that file's, which may hold tokens in another form than the tokenizer's."""
        monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
        facts = target_facts(write_target(tmp_path / "whole.gguf", tiny_target))
        found = {name: value for name, value, *_ in vocabulary_of(facts)}
        fields, _ = contents(tmp_path / "whole.gguf")
        wanted = {name for name in fields if name.startswith("tokenizer.ggml.")}
        assert found == {name: fields[name] for name in wanted} and found["tokenizer.ggml.pre"] == "smollm"
