"""The benchmark of map sizes: every size end to end."""

from __future__ import annotations

import copy

import pytest

from toolkit.bench.answers import Sampling
from toolkit.bench.engine_context import Trial
from toolkit.bench.map_size import SizeTrials
from toolkit.bench.prompts import Prompt
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.tokenmap.token_map import TokenMap

PROMPTS = [
    Prompt(str(at), "count", (text,)) for at, text in enumerate(("count apples", "numbers and rivers", "spring"))
]


@pytest.fixture
def sizes(script):
    return script("map_sizes")


def test_every_size_runs(tiny_target, sizes):
    """With all ids the forecast is exact."""
    target = copy.deepcopy(tiny_target)  # it is packed
    whole = TokenMap.identity(target.vocab_size)
    head = MtpHead(MtpConfig.from_target_config(target.config, vocab_size=target.vocab_size))
    draft = DraftCheckpoint(head=head.eval().requires_grad_(False), token_map=whole)
    trial = Trial(target, draft, PROMPTS, Sampling(16, 0.0, 0), EngineConfig(max_running_requests=1)).with_room()
    map_of = lambda size: TokenMap.from_ids(range(size), whole.vocab_size)  # noqa: E731
    trials = SizeTrials(trial, lambda: draft, DraftShape(2, 3, 6))
    results = sizes.measure_all(trials, [12, 250, whole.size], map_of)
    assert [one.name for one in results] == ["12", "250", str(whole.size)] and all(one.speedup > 0 for one in results)
    assert results[2].predicted_accept_length == pytest.approx(results[2].accept_length)
