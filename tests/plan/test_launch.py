"""Settings for other engines: forecast accept lengths by modelled step times, and the engine's flags."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.plan.launch import check_servable, settings_text
from toolkit.plan.step_time import gpu_named
from toolkit.targets.facts import target_facts
from toolkit.tokenmap.token_map import TokenMap

H100 = gpu_named("H100")
LENGTHS = {(2, 1, 3): 2.5, (4, 1, 5): 3.6, (4, 4, 16): 4.1}


@pytest.fixture
def facts(tiny_target_directory):
    return target_facts(str(tiny_target_directory))


@pytest.fixture
def head(tiny_draft, tmp_path):
    return replace(tiny_draft, path=tmp_path / "ckpt")


def shared(target, config_class, head_class, path) -> DraftCheckpoint:
    config = config_class.from_target_config(target.config, vocab_size=target.vocab_size)
    return DraftCheckpoint(head_class(config), TokenMap.identity(target.vocab_size), path=path)


def test_flags_are_those_of_the_engine(facts, head):
    """One line for each batch size; the head is exported before it serves."""
    slow = {1: 0.02}  # a plain step so slow that drafts pay
    text = settings_text("sglang", H100, facts, head, {(4, 4, 16): 4.1}, 300.0, [1, 8], slow)
    lines = text.splitlines()
    assert lines[0] == "sglang on H100, step times as given:" and lines[1].startswith("batch 1: 4,4,16")
    assert lines[2] == lines[4] and shlex.split(lines[2]) == [
        "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "OUT", "--speculative-num-steps", "4",
        "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "16",
    ]  # fmt: skip
    assert lines[5].endswith(f"toolkit export --draft {head.path} --to sglang --out OUT") and len(lines) == 6
    nothing = settings_text("sglang", H100, facts, head, {(4, 1, 5): 1.01}, 300.0, [1])
    assert "batch 1: serve without drafts (the best setting: 4,1,5" in nothing and "export" not in nothing
    text = settings_text("vllm", H100, facts, head, {(4, 1, 5): 3.6}, 300.0, [1], slow)
    flag, settings = shlex.split(text.splitlines()[2])
    assert flag == "--speculative-config"
    assert json.loads(settings) == {"method": "eagle3", "model": "OUT", "num_speculative_tokens": 4}


def test_mtp_layers_are_read_from_the_targets_checkpoint(facts, tiny_target, tmp_path):
    """A trained module becomes part of a copy of the target; a native one is there already."""
    torch.manual_seed(0)
    draft, slow = shared(tiny_target, MtpConfig, MtpHead, tmp_path / "mtp"), {1: 0.02}
    text = settings_text("vllm", H100, facts, draft, {(1, 1, 2): 1.9}, 300.0, [1], slow)
    assert '"model"' not in text and "OUT is the model to serve: toolkit export" in text and "--to native" in text
    native = replace(draft, path=None, meta={"native": {}})
    text = settings_text("sglang", H100, facts, native, {(1, 1, 2): 1.9}, 300.0, [1], slow)
    assert "export" not in text and "--speculative-draft-model-path" not in text
    check_servable("sglang", native)
