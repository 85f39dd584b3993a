"""Tuned MTP modules go back into a copy of their target: its other tensors keep their bytes, and it drafts the same."""

from __future__ import annotations

import hashlib

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoint.native_targets import FAMILIES, NAMES, change_module, write_native_target
from toolkit.checkpoint.draft_dir import save_draft
from toolkit.checkpoint.native_mtp import find_native, load_native
from toolkit.cli import main
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.load.load_engine import load_engine
from toolkit.infer.request.params import SamplingParams
from toolkit.targets.facts import read_tensors, target_facts, tensor_names
from toolkit.targets.load import read_target
from toolkit.tokenmap.files import load_freq_list
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import read_json

PROMPTS = [[(7 * place * place + n) % 380 + 5 for place in range(5 + n)] for n in range(6)]


def native_of(directory):
    target, facts = read_target(directory), target_facts(directory)
    return load_native(target, facts, find_native(facts))


@pytest.fixture
def tuned(tiny_target, tmp_path):
    """A family's target, and a draft directory of its module with other weights."""

    def make(family: str):
        directory = write_native_target(tmp_path / family, family, tiny_target.tokenizer, agreeing=True)
        draft = native_of(directory)
        generator = torch.Generator().manual_seed(3)
        state = {
            name: value + 0.05 * torch.randn(value.shape, generator=generator)
            for name, value in draft.head.state_dict().items()
        }
        meta = {"target": {"name": str(directory), "revision": None}}
        return directory, save_draft(tmp_path / "tuned", state, draft.head.config, None, meta)

    return make


def stitched(draft, out, *words: str) -> int:
    return main(["export", "--draft", str(draft), "--to", "native", "--out", str(out), *words])


def answers(config: EngineConfig):
    loaded = load_engine(config)
    done = loaded.engine.generate(PROMPTS, SamplingParams(max_tokens=16, ignore_eos=True))
    loaded.engine.close()
    return [one.output_ids for one in done], [[event.accepted for event in one.events] for one in done]


def hashes(directory) -> dict[str, str]:
    facts = target_facts(directory)
    return {
        name: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
        for name, value in read_tensors(facts, tensor_names(facts)).items()
    }


SLOW = [pytest.param(one, marks=pytest.mark.slow) for one in ("ernie", "qwen3-next") if one in FAMILIES]


@pytest.mark.parametrize("family", ["deepseek", "mimo", *SLOW])
def test_a_copy_drafts_what_the_draft_directory_drafted(family, tuned, tmp_path, capsys):
    """Every accepted draft is the same; the target's own tensors are bit for bit what they were, and its logits."""
    directory, draft = tuned(family)
    assert stitched(draft, tmp_path / "copy") == 0
    said = capsys.readouterr().out
    assert "a copy of the target with its module, read back and equal" in said
    copy = tmp_path / "copy"
    if family == "mimo":  # other engines find the module in the copy, without a draft path
        assert "--speculative-algorithm EAGLE --speculative-num-steps 3" in said and "draft-model-path" not in said
        assert '{"method": "mtp", "num_speculative_tokens": 3}' in said
    by_draft = answers(EngineConfig(target=str(directory), draft=draft, shape="2,1,3"))
    assert answers(EngineConfig(target=str(copy), shape="2,1,3")) == by_draft
    assert answers(EngineConfig(target=str(directory), shape="2,1,3"))[1] != by_draft[1], "the tuning changed nothing"
    before, after = hashes(directory), hashes(copy)
    record = read_json(copy / "stitched.json")
    changed = {name for name in before if before[name] != after[name]}
    assert before.keys() == after.keys() and changed == set(record["tensors"])
    assert record["files_written"] == ["model-00003-of-00003.safetensors"] and len(record["files_copied"]) == 2
    ids = torch.tensor(PROMPTS[5])[None]
    logits = [AutoModelForCausalLM.from_pretrained(one)(ids).logits for one in (directory, copy)]
    assert torch.equal(*logits)


def test_a_fresh_module_is_added_to_a_target_that_had_none(tiny_target, tiny_target_directory, tmp_path, capsys):
    """A single file of weights gets an index, and config.json the number of modules."""
    torch.manual_seed(4)
    config = MtpConfig.from_target_config(tiny_target.config, vocab_size=tiny_target.vocab_size)
    meta = {"target": {"name": str(tiny_target_directory), "revision": None}}
    kept = TokenMap.from_ids(range(100), tiny_target.vocab_size)
    draft = save_draft(tmp_path / "fresh", MtpHead(config).state_dict(), config, kept, meta)
    copy = tmp_path / "copy"
    assert stitched(draft, copy) == 0
    said = capsys.readouterr().out
    assert f"toolkit serve --target {copy}" in said and "other engines serve no MTP module in a llama model" in said
    assert load_freq_list(copy / "freq_100.pt", tiny_target.vocab_size) == kept
    assert read_json(copy / "config.json")["num_nextn_predict_layers"] == 1
    assert answers(EngineConfig(target=str(copy), draft="native", shape="3,2,6")) == answers(
        EngineConfig(draft=draft, shape="3,2,6")
    )
    ids = torch.tensor(PROMPTS[5])[None]
    logits = [AutoModelForCausalLM.from_pretrained(one)(ids).logits for one in (tiny_target_directory, copy)]
    assert torch.equal(*logits)


def test_a_module_that_cannot_be_written_is_refused(tuned, tmp_path, capsys):
    """Before anything is written."""
    directory, draft = tuned("mimo")
    change_module(directory, lambda t: {**t, f"{NAMES['mimo'][2]}.weight_scale": torch.ones(1)})
    assert stitched(draft, tmp_path / "copy") == 2
    assert "is quantised" in capsys.readouterr().err and not (tmp_path / "copy").exists()


def test_heads_of_another_form_are_refused(tuned, tiny_target_directory, tmp_path, capsys):
    """Another family's layer, an existing folder."""
    _, draft = tuned("deepseek")
    assert stitched(draft, tmp_path / "copy", "--target", str(tiny_target_directory)) == 2
    assert "it has the layer of another family" in capsys.readouterr().err
    (tmp_path / "copy").mkdir()
    assert stitched(draft, tmp_path / "copy") == 2 and "exists; give a new folder" in capsys.readouterr().err
