"""A head that is trained on rollouts at hand, for a target that moves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from toolkit import LLM, SamplingParams
from toolkit.checkpoint.draft_dir import DraftCheckpoint, load_draft
from toolkit.data.batches import Example
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.targets.load import read_target
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.head_adapter import HeadAdapter


@pytest.fixture
def target(tiny_target_directory: Path) -> Target:
    """One of its own: the tests change its weights."""
    return read_target(tiny_target_directory)


def rollout(prompt: list[int], answer: list[int]) -> Example:
    return Example("", prompt + answer, [False] * len(prompt) + [True] * len(answer))


def mtp_draft(target: Target, token_map: TokenMap | None = None) -> DraftCheckpoint:
    """A head that scores with the target's output matrix."""
    torch.manual_seed(0)
    head = MtpHead(MtpConfig.from_target_config(target.config, vocab_size=target.vocab_size))
    return DraftCheckpoint(head=head, token_map=token_map or TokenMap.identity(target.vocab_size))


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


def test_a_head_that_scores_with_the_target_follows_its_matrix(target):
    """The rows of the token map are a copy. Rows of the old target would teach, and score, what it would have said."""
    draft = mtp_draft(target, TokenMap.from_ids(range(0, target.vocab_size, 2), target.vocab_size))
    old = HeadAdapter(target, draft)
    with torch.no_grad():
        target.lm_head.weight.mul_(-1)
    text = [rollout([5, 6, 7], [8, 9, 10, 11])]
    assert old.train(text) == HeadAdapter(target, draft).train(text)


def test_a_target_in_training_gets_no_gradients_from_its_head(target):
    """An output matrix that is trained: the head's loss would be backpropagated into it, and with the rows of a token
    map a second batch would go through the graph of the first."""
    token_map = TokenMap.from_ids(range(0, target.vocab_size, 2), target.vocab_size)
    adapter = HeadAdapter(target, mtp_draft(target, token_map))
    target.model.requires_grad_(True)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    adapter.batch = 1
    adapter.train([rollout([5, 6, 7], [8, 9, 10, 11]), rollout([5, 6], [9, 4, 12])])
    assert all(one.grad is None for one in [*target.model.parameters(), *adapter.head.parameters()])
    assert all(torch.equal(value, before[name]) for name, value in target.model.state_dict().items())
    assert not any(one.requires_grad for one in adapter.state_dict().values()), "the engine would hold a graph"


def test_nothing_of_the_adapter_stays_on_the_target(target, monkeypatch):
    """A hook would keep the states of the target's own training, with their graph; also after a batch that failed."""
    adapter = HeadAdapter(target, mtp_draft(target))

    def hooks() -> int:
        return sum(len(one._forward_pre_hooks) + len(one._forward_hooks) for one in target.model.modules())

    seen = []
    own = adapter.optimizer.step
    monkeypatch.setattr(adapter.optimizer, "step", lambda: seen.append(hooks()) or own())
    adapter.train([rollout([5, 6, 7], [8, 9, 10, 11])])
    assert seen[0] > 0 == hooks()
    monkeypatch.setattr(adapter.optimizer, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        adapter.train([rollout([5, 6, 7], [8, 9, 10, 11])])
    assert hooks() == 0 and all(one.grad is None for one in adapter.head.parameters())
