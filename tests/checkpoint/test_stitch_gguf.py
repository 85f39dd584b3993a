"""Tuned MTP modules go back into a copy of their target's GGUF file: it drafts the same, the rest keeps its bytes."""

from __future__ import annotations

import gguf
import pytest
import torch

from tests.checkpoint.native_targets import change_module, write_native_target
from tests.checkpoint.test_stitch_native import answers, native_of, stitched
from tests.targets.glm_gguf import write_glm_gguf
from toolkit.checkpoint.draft_dir import save_draft
from toolkit.checkpoint.native_mtp import find_native, load_native
from toolkit.infer.load.config import EngineConfig
from toolkit.targets.facts import target_facts
from toolkit.targets.load import load_target
from toolkit.weights import read_json, write_json

COUNTED = ("glm4moe.block_count", "glm4moe.nextn_predict_layers", "toolkit.mtp_trained_steps")


@pytest.fixture
def tuned(tiny_target, tmp_path, monkeypatch):
    """A GLM-4.5 GGUF file, with or without its module, and a draft directory of the module with other weights."""

    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))

    def make(*, module: bool = True, quantised: bool = False):
        sizes = {"n_routed_experts": 12}  # numbers of one digit and of two
        directory = write_native_target(tmp_path / "glm", "glm", tiny_target.tokenizer, agreeing=True, **sizes)
        draft = native_of(directory)
        generator = torch.Generator().manual_seed(3)
        state = {
            name: value + 0.05 * torch.randn(value.shape, generator=generator)
            for name, value in draft.head.state_dict().items()
        }
        if not module:
            change_module(directory, lambda tensors: {})
            config = read_json(directory / "config.json")
            write_json(directory / "config.json", {**config, "num_nextn_predict_layers": 0})
        path = write_glm_gguf(tmp_path / "glm.gguf", directory, quantised=quantised)
        meta = {"target": {"name": str(path), "revision": None}, "training": {"unroll": {"ttt_steps": 2}}}
        return path, save_draft(tmp_path / "tuned", state, draft.head.config, None, meta)

    return make


def contents(path):
    """Tensors and metadata by name, as bytes."""
    reader = gguf.GGUFReader(path)
    fields = {
        name: [part.tobytes() for part in one.parts]
        for name, one in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    return {one.name: (one.tensor_type.name, one.data.tobytes()) for one in reader.tensors}, fields


@pytest.mark.parametrize("module", [True, False])
def test_a_copy_drafts_what_the_draft_directory_drafted(module, tuned, tmp_path, capsys):
    """Whether the file had a module or not. Only the module, and the two counts of it, are other bytes."""
    path, draft = tuned(module=module)
    assert stitched(draft, tmp_path / "copy", "--shape", "2,1,3") == 0
    copy, said = tmp_path / "copy" / "glm.gguf", capsys.readouterr().out
    assert f"toolkit serve --target {copy}" in said
    assert f"llama-server -m {copy} --spec-type draft-mtp --spec-draft-n-max 2" in said
    by_draft = answers(EngineConfig(target=str(path), draft=draft, shape="2,1,3"))
    assert answers(EngineConfig(target=str(copy), shape="2,1,3")) == by_draft
    (before, fields), (after, now) = contents(path), contents(copy)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == set(read_json(copy.parent / "stitched.json")["tensors"]) and before.keys() <= after.keys()
    assert all(name.startswith("blk.4.") for name in changed) and len(changed) == 20
    assert {name: one for name, one in now.items() if name not in COUNTED} == {
        name: one for name, one in fields.items() if name not in COUNTED
    }
    assert [gguf.GGUFReader(copy).get_field(name).contents() for name in COUNTED] == [5, 1, 2]
    target, facts = load_target(copy), target_facts(copy)
    assert load_native(target, facts, find_native(facts)).meta["native"]["trained_steps"] == 2


def test_a_quantised_file_gets_a_module_in_bfloat16(tuned, tmp_path):
    """Blocks of few bits would undo the tuning; the target's own blocks stay as they are."""
    path, draft = tuned(quantised=True)
    assert stitched(draft, tmp_path / "copy") == 0
    before, after = contents(path)[0], contents(tmp_path / "copy" / "glm.gguf")[0]
    assert after["blk.3.attn_q.weight"] == before["blk.3.attn_q.weight"]
    assert before["blk.4.attn_q.weight"][0] == "Q8_0" and after["blk.4.attn_q.weight"][0] == "BF16"
    assert after["blk.4.ffn_gate_inp.weight"][0] == after["blk.4.nextn.enorm.weight"][0] == "F32"


def test_a_list_of_tokens_is_refused(tuned, tmp_path, capsys):
    """llama.cpp has no use for it, and the file would be passed over."""
    _, draft = tuned()
    assert stitched(draft, tmp_path / "copy", "--token-map", "ids.pt") == 2
    assert "llama.cpp drafts all tokens" in capsys.readouterr().err and not (tmp_path / "copy").exists()
