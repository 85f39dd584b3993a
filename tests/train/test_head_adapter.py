"""A head that is trained on rollouts at hand, for a target that moves."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from toolkit import LLM, SamplingParams
from toolkit.checkpoint.draft_dir import DraftCheckpoint, DraftDirError, load_draft
from toolkit.data.batches import Example
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.targets.load import load_target
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.head_adapter import HeadAdapter


@pytest.fixture
def target(tiny_target_directory: Path) -> Target:
    """One of its own: the tests change its weights."""
    return load_target(tiny_target_directory)


def rollout(prompt: list[int], answer: list[int]) -> Example:
    return Example("", prompt + answer, [False] * len(prompt) + [True] * len(answer))


def test_a_moved_target_gets_its_drafts_back(target, tiny_target_directory, tiny_draft_directory):
    """The loop of a reinforcement learning: the target moves, the engine writes, the head learns, the engine drafts."""
    with torch.no_grad():
        for one in target.model.parameters():
            one.add_(0.02 * torch.randn(one.shape, generator=torch.Generator().manual_seed(len(one))))
    adapter = HeadAdapter(target, load_draft(tiny_draft_directory), learning_rate=3e-3, batch=4)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(tiny_target_directory, tiny_draft_directory, shape="3,1,4", prefix_cache=False) as llm:
        llm.update_weights(target.model.state_dict())
        prompts = [[token, token + 1, token + 2] for token in range(10, 42, 4)]
        before = llm.generate(prompts, params)
        rollouts = [rollout(one.prompt_ids, one.token_ids) for one in before]
        first = adapter.train(rollouts)
        for _ in range(60):
            last = adapter.train(rollouts)
        llm.refresh_draft(adapter.state_dict())
        after = llm.generate(prompts, params)
    assert last < first
    assert [one.token_ids for one in after] == [one.token_ids for one in before]
    steps = [sum(len(one.events) for one in answers) for answers in (before, after)]
    assert steps[1] < 0.8 * steps[0], steps
    adapter.close()
    assert not target.layers[2]._forward_pre_hooks, "hooks stay on the target"


def test_a_head_that_scores_with_the_target_follows_its_matrix(target):
    """The rows of the token map are a copy. Rows of the old target would teach, and score, what it would have said."""
    torch.manual_seed(0)
    head = MtpHead(MtpConfig.from_target_config(target.config, vocab_size=target.vocab_size))
    kept = TokenMap.from_ids(range(0, target.vocab_size, 2), target.vocab_size)
    adapter = HeadAdapter(target, DraftCheckpoint(head=head, token_map=kept))
    with torch.no_grad():
        target.lm_head.weight.mul_(-1)
    frozen = target.model.state_dict()["model.norm.weight"].clone()
    adapter.train([rollout([5, 6, 7], [8, 9, 10, 11])])
    rows = target.lm_head.weight[kept.ids]
    assert torch.equal(adapter.model.output.matrix, rows) and torch.equal(adapter.side.teacher.draft_weight, rows)
    assert torch.equal(target.model.state_dict()["model.norm.weight"], frozen), "the target is not trained"
    assert all(one.grad is None for one in target.model.parameters())


def test_answers_without_a_supervised_id_teach_nothing(target, tiny_draft_directory, tiny_draft):
    """An answer of one id predicts no second one: no step of the optimizer, and no loss that looks like a good one."""
    adapter = HeadAdapter(target, load_draft(tiny_draft_directory))
    assert math.isnan(adapter.train([rollout([5, 6, 7], [8])])) and math.isnan(adapter.train([]))
    assert all(torch.equal(one, tiny_draft.head.state_dict()[name]) for name, one in adapter.state_dict().items())


def test_a_head_for_another_target_is_refused(target, tiny_draft_directory):
    draft = load_draft(tiny_draft_directory)
    draft.head.config = replace(draft.head.config, vocab_size=9999)
    with pytest.raises(DraftDirError):
        HeadAdapter(target, draft)
