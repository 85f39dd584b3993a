"""vLLM drafts with a MiMo module as our engine does: the same tokens, and as many accepted drafts, prompt by prompt.

Opt-in: TOOLKIT_VLLM_PYTHON names the interpreter of an environment with vLLM's CPU build. The target is tiny and
random. vLLM drafts one token with this module.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.checkpoint.native_targets import write_native_target
from tests.peers.test_vllm import vllms_answers
from toolkit import LLM, SamplingParams
from toolkit.weights import read_json, write_json

PROMPTS, MAX_TOKENS = 8, 48
CONFIG = """from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        "TOOLKIT_VLLM_PYTHON" not in os.environ, reason="TOOLKIT_VLLM_PYTHON names no interpreter that has vLLM"
    ),
]


@pytest.fixture
def target(tiny_target, tmp_path: Path) -> Path:
    """vLLM reads MiMo's configuration by the code of its repository, so the tiny one brings that along."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}  # its attention on a CPU has no heads of 16
    directory = write_native_target(tmp_path / "mimo", "mimo", tiny_target.tokenizer, agreeing=True, **heads)
    (directory / "configuration_mimo.py").write_text(CONFIG, encoding="utf-8")
    config = read_json(directory / "config.json")
    write_json(directory / "config.json", {**config, "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}})
    return directory


def test_tokens_and_counts(target: Path) -> None:
    """The order of hidden state and embedding, the zeroed first embedding, a norm: each changes what is accepted."""
    asked = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    prompts = [[(17 * place * place + 5 * n) % 380 + 5 for n in range(6 + place)] for place in range(PROMPTS)]
    with LLM(target=target, draft="native", shape="1,1,2", dtype="float32", prefix_cache=False) as llm:
        ours = [llm.generate([prompt], asked)[0] for prompt in prompts]
    mine = [
        {
            "output_ids": one.token_ids,
            "drafts": len(one.events),
            "accepted_by_depth": [sum(event.accepted for event in one.events)],
        }
        for one in ours
    ]
    _, theirs = vllms_answers("native", str(target), prompts, steps=1, trust_remote_code=True, context_length=256)
    assert mine == theirs
    assert sum(one["accepted_by_depth"][0] for one in mine) > 20, "counts near zero would compare nothing"
