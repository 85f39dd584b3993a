"""llama.cpp drafts with an exported EAGLE-3 head as our engine does: the same tokens, and as many drafts offered and
accepted, prompt by prompt.

Opt-in. TOOLKIT_LLAMA_SERVER names its `llama-server`, built from the source in llama-cpp-python 0.3.36 or a newer one;
TOOLKIT_PEERS_DRAFT a trained EAGLE-3 head (the ckpt/ of a run) of a Llama target. Both sides in float32.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.peers.llama_server import PROMPTS, llamas_answers, our_answers
from tests.targets.conftest import write_gguf
from toolkit.bench.prompts import builtin_prompts, limited
from toolkit.checkpoint.draft_dir import DraftCheckpoint, load_draft, save_draft
from toolkit.cli import main
from toolkit.heads.eagle3 import Eagle3Head
from toolkit.infer.request.chat_prompt import chat_ids
from toolkit.targets.load import load_target

# Each changes what is accepted, and none so far that nothing is.
VARIANTS: dict[str, dict[str, Any]] = {
    "as trained": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "a scaled rope": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 100000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
        }
    },
}  # fmt: skip
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif("TOOLKIT_LLAMA_SERVER" not in os.environ, reason="TOOLKIT_LLAMA_SERVER names no llama-server"),
    pytest.mark.skipif("TOOLKIT_PEERS_DRAFT" not in os.environ, reason="TOOLKIT_PEERS_DRAFT names no trained head"),
]


@pytest.fixture(scope="module")
def trained() -> DraftCheckpoint:
    return load_draft(os.environ["TOOLKIT_PEERS_DRAFT"])


@pytest.fixture(scope="module")
def target(trained: DraftCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """The head's target as a float32 GGUF file, and prompts."""
    loaded = load_target(trained.meta["target"]["name"], dtype="float32")
    chats = [[{"role": "user", "content": one.turns[0]}] for one in limited(builtin_prompts(), PROMPTS)]
    file = tmp_path_factory.mktemp("target") / "target.gguf"
    return write_gguf(file, loaded), [chat_ids(loaded.tokenizer, chat) for chat in chats]


@torch.no_grad()
def varied(draft: DraftCheckpoint, **settings: Any) -> DraftCheckpoint:
    """The head with other settings; a norm that it lacks gets the width of what it reads."""
    head = Eagle3Head(replace(draft.head.config, **settings)).eval().requires_grad_(False)
    head.load_state_dict(draft.head.state_dict(), strict=False)
    if head.config.norm_before_fc:
        generator = torch.Generator().manual_seed(3)
        head.input_norm.weight.copy_(torch.rand(head.input_norm.weight.shape, generator=generator) + 3)
    return replace(draft, head=head)


@pytest.mark.parametrize(
    ("drafts", "variant"), [(1, "as trained"), *((3, name) for name in VARIANTS)], ids=lambda one: str(one)
)
def test_tokens_and_counts(drafts, variant, trained, target, verdicts, tmp_path) -> None:
    """Where a rotation, a norm, an auxiliary layer or an id of the map is another one, other drafts are accepted."""
    file, prompts = target
    head, own = varied(trained, **VARIANTS[variant]), tmp_path / "own"
    save_draft(own, head.head.state_dict(), head.head.config, head.token_map, {"target": trained.meta["target"]})
    assert main(["export", "--draft", str(own), "--to", "gguf", "--out", str(tmp_path / "out")]) == 0
    ours = our_answers(prompts, drafts, draft=str(own))
    draft = ("--spec-type", "draft-eagle3", "-md", str(tmp_path / "out" / "model.gguf"))
    theirs = llamas_answers(file, prompts, drafts, tmp_path / "log", *draft)
    verdicts.append(
        {
            "judge": "llama.cpp of llama-cpp-python 0.3.36",
            "head": variant,
            "compared": f"float32, greedy, chain of {drafts}, {len(ours[0]['output_ids'])} tokens of each prompt",
            "prompts": [
                {
                    "tokens_equal": mine["output_ids"] == its["output_ids"],
                    **{
                        who: {"drafted": one["drafted"], "accepted": one["accepted"]}
                        for who, one in (("ours", mine), ("theirs", its))
                    },
                }
                for mine, its in zip(ours, theirs, strict=True)
            ],
        }
    )
    assert ours == theirs
    assert sum(one["accepted"] for one in ours) > 20, "counts near zero would compare nothing"
