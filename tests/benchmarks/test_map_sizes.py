"""The benchmark of map sizes: every size end to end, and dynamic rows beside a static map of equal drafting time."""

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


def test_a_static_map_of_equal_time(sizes):
    """Between measured sizes, in steps of 256 rows, and never beyond them; times that fall are taken as level."""
    assert sizes.size_of_time([1024, 2048, 4096], [1.0, 2.0, 4.0], 3.0) == 3072
    assert sizes.size_of_time([1024, 2048, 4096], [1.0, 2.0, 4.0], 9.0) == 4096
    assert sizes.size_of_time([1024, 2048, 4096], [2.0, 1.0, 4.0], 3.0) == 3072
    assert sizes.size_of_time([1024, 2048], [1.0, 2.0], 0.1) == 1024


def test_differences_are_paired_by_prompt(sizes):
    """Prompts differ by far more than the two modes do; paired, the difference is exact."""
    ours, others = {"a": (30, 10), "b": (60, 10)}, {"a": (20, 10), "b": (50, 10)}
    difference, interval = sizes.paired_difference(ours, others)
    assert difference == 1.0 and interval == (1.0, 1.0)


def test_every_size_and_dynamic_rows_run(tiny_target, sizes):
    """With all ids the forecast is exact. The difference is that of the two rows at the end."""
    target = copy.deepcopy(tiny_target)  # it is packed
    whole = TokenMap.identity(target.vocab_size)
    head = MtpHead(MtpConfig.from_target_config(target.config, vocab_size=target.vocab_size))
    draft = DraftCheckpoint(head=head.eval().requires_grad_(False), token_map=whole)
    trial = Trial(target, draft, PROMPTS, Sampling(16, 0.0, 0), EngineConfig(max_running_requests=1)).with_room()
    map_of = lambda size: TokenMap.from_ids(range(size), whole.vocab_size)  # noqa: E731
    trials = SizeTrials(trial, lambda: draft, DraftShape(2, 3, 6))
    results, (difference, interval) = sizes.measure_all(trials, [12, 250, whole.size], map_of, dynamic_rows=20)
    assert [one.name for one in results[:3]] == ["12", "250", str(whole.size)] and results[3].name.endswith(" + 20")
    assert results[4].name.endswith("(equal time)") and all(one.speedup > 0 for one in results)
    assert difference == pytest.approx(results[3].accept_length - results[4].accept_length)
    assert interval[0] <= difference <= interval[1]
    assert results[2].predicted_accept_length == pytest.approx(results[2].accept_length)
