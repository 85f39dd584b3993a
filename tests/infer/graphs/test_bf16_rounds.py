"""In bf16 recorded rounds part from eager ones at near-ties alone: other buckets round in another order."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.infer.graphs.test_graph_rounds import ROWS, engine_with, wrong_lengths
from toolkit.bench.near_tie import Divergence, find_divergence, plain_logits
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.graphs.recordings import GraphSettings
from toolkit.infer.request.params import SamplingParams
from toolkit.targets.target import Target

ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
LENGTHS, TOKENS = (5, 19, 2, 33, 9, 14, 3), 40


def in_bf16(target: Target, draft: DraftCheckpoint | None, device: str) -> tuple[Target, DraftCheckpoint | None]:
    """Copies of both. Not by `to(dtype)`, which would round the rotary frequencies too."""
    model = AutoModelForCausalLM.from_config(target.model.config, dtype=torch.bfloat16)
    model.load_state_dict(target.model.state_dict())
    head = None if draft is None else replace(draft, head=copy.deepcopy(draft.head).to(device, torch.bfloat16))
    return Target(model.to(device), target.tokenizer, target.name), head


def divergences_and_accepted(target: Target, draft: Any, shape: str, capture: Any) -> tuple[list[Divergence], int]:
    """Where answers of recorded rounds diverge from those of eager ones, and how many drafts were accepted."""
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(1, 24, (length,), generator=generator).tolist() for length in LENGTHS]
    params = [SamplingParams(max_tokens=TOKENS + i, ignore_eos=True) for i in range(len(prompts))]
    answers, accepted = [], 0
    for graphs in (None, GraphSettings(ROWS, capture)):
        engine = engine_with(target, draft, shape, graphs)
        requests = engine.generate(prompts, params)
        engine.close()
        answers.append([request.output_ids for request in requests])
        accepted += sum(event.accepted for request in requests for event in request.events)
    found = []
    for prompt, eager, recorded in zip(prompts, *answers, strict=True):

        def logits_after(ids: Sequence[int], prompt: list[int] = prompt) -> torch.Tensor:
            return plain_logits(target, [*prompt, *ids])

        found.append(find_divergence(eager, recorded, logits_after, target.dtype))
    return [one for one in found if one is not None], accepted


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize(
    "name, shape", [("none", ""), ("eagle3", "3,3,8"), pytest.param("eagle3", "3,1,4", marks=pytest.mark.slow)]
)
def test_graphs_equal_eager_rounds_but_for_near_ties(small_target, build, recording, device, name, shape):
    """On a GPU with real graphs, on kernels; on a CPU by replay."""
    target, draft = in_bf16(small_target, None if name == "none" else build(name), device)
    found, accepted = divergences_and_accepted(target, draft, shape, recording if device == "cpu" else None)
    print(f"{device}, {name} {shape}: {len(found)} of {len(LENGTHS)} answers part at near-ties")
    assert all(one.near_tie for one in found), found
    assert draft is None or accepted > 0


@pytest.mark.slow
def test_a_wrong_round_is_no_near_tie(small_target, build, recording, monkeypatch):
    """Else the test above would say nothing."""
    wrong_lengths(monkeypatch)
    found, _ = divergences_and_accepted(*in_bf16(small_target, build("eagle3"), "cpu"), "3,3,8", recording)
    assert not all(one.near_tie for one in found)
