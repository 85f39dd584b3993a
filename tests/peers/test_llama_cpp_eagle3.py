"""llama.cpp drafts with an exported EAGLE-3 head as our engine does: the same tokens, and as many drafts offered and
accepted, prompt by prompt.

Opt-in. TOOLKIT_LLAMA_SERVER names its `llama-server`, built from the source in llama-cpp-python 0.3.36 or a newer one;
TOOLKIT_PEERS_DRAFT a trained EAGLE-3 head (the ckpt/ of a run) of a Llama target. Both sides in float32.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.peers.llama_server import llamas_answers, our_answers
from tests.targets.conftest import write_gguf
from toolkit.bench.prompts import builtin_prompts, limited
from toolkit.checkpoint.draft_dir import DraftCheckpoint, load_draft, save_draft
from toolkit.cli import main
from toolkit.heads.eagle3 import Eagle3Head
from toolkit.infer.request.chat_prompt import chat_ids
from toolkit.targets.load import read_target

# Each changes which drafts are accepted, and none so far that nearly none is.
VARIANTS: dict[str, dict[str, Any]] = {
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


class Given(NamedTuple):
    """The head's target as a float32 GGUF file, prompts, the ids that end an answer, and features of a prompt."""

    file: Path
    prompts: list[list[int]]
    ends: set[int]
    features: torch.Tensor


@pytest.fixture(scope="module")
def trained() -> DraftCheckpoint:
    return load_draft(os.environ["TOOLKIT_PEERS_DRAFT"])


@pytest.fixture(scope="module")
def given(trained: DraftCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Given:
    loaded = read_target(trained.meta["target"]["name"], dtype="float32")
    chats = [[{"role": "user", "content": one.turns[0]}] for one in limited(builtin_prompts(), 14)]
    file = tmp_path_factory.mktemp("target") / "target.gguf"
    prompts = [chat_ids(loaded.tokenizer, chat) for chat in chats]
    with torch.no_grad():
        states = loaded.model(torch.tensor(prompts[:1]), output_hidden_states=True).hidden_states
    features = torch.cat([states[layer][0] for layer in trained.head.config.aux_layer_ids], dim=-1)
    return Given(write_gguf(file, loaded), prompts, set(loaded.stop_ids), features)


@torch.no_grad()
def varied(draft: DraftCheckpoint, features: torch.Tensor, **settings: Any) -> DraftCheckpoint:
    """The head with other settings. Norms get the weight that keeps the usual size of what they read."""
    head = Eagle3Head(replace(draft.head.config, **settings)).eval().requires_grad_(False)
    head.load_state_dict(draft.head.state_dict(), strict=False)
    if head.config.norm_before_fc:
        head.input_norm.weight.fill_(float(features.square().mean(-1).sqrt().median()))
    if head.config.norm_before_residual:
        norm, width = head.midlayer.hidden_norm, head.config.hidden_size
        usual = (features @ head.fc.weight.T).square().mean(-1).sqrt().median()
        for one in "qkv":
            getattr(head.midlayer.self_attn, f"{one}_proj").weight[:, width:].mul_(norm.weight / usual)
        norm.weight.fill_(float(usual))
    return replace(draft, head=head)


@pytest.mark.parametrize(
    ("variant", "drafts", "count"), [("as trained", 1, 8), ("as trained", 3, 8), *((name, 3, 4) for name in VARIANTS)]
)
def test_tokens_and_counts(variant, drafts, count, trained, given, verdicts, tmp_path) -> None:
    """Where a rotation, a norm, an auxiliary layer or an id of the map is another one, other drafts are accepted."""
    head, own = varied(trained, given.features, **VARIANTS.get(variant, {})), tmp_path / "own"
    save_draft(own, head.head.state_dict(), head.head.config, head.token_map, {"target": trained.meta["target"]})
    assert main(["export", "--draft", str(own), "--to", "gguf", "--out", str(tmp_path / "out")]) == 0
    asked = given.prompts[: 2 * count]
    answers = zip(asked, our_answers(asked, drafts, draft=str(own)), strict=True)
    # Where we go on after the end of an answer, llama.cpp writes the next best token.
    open_ended = [pair for pair in answers if not given.ends.intersection(pair[1]["output_ids"])]
    prompts, ours = zip(*open_ended[:count], strict=True)
    draft = ("--spec-type", "draft-eagle3", "-md", str(tmp_path / "out" / "model.gguf"))
    theirs = llamas_answers(given.file, prompts, drafts, tmp_path / "log", *draft)
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
    assert list(ours) == theirs and len(ours) == count
    assert sum(one["accepted"] for one in ours) > 5 * count, "counts near zero would compare nothing"
