"""What a greedy rollout says of the target's argmax is not computed again, and is what would be computed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.train.conftest import write_tiny_rollouts
from toolkit.data.batches import collate
from toolkit.data.examples import load_examples
from toolkit.train.step import TrainedHead, micro_step, supervised_counts
from toolkit.train.target_side import TargetSide

STEPS = 3


@pytest.fixture(scope="module")
def path(tiny_target, tmp_path_factory):
    path = tmp_path_factory.mktemp("greedy") / "rollouts.jsonl"
    write_tiny_rollouts(tiny_target, path, count=8)
    return path


def _batch(target, path, *written):
    """The rollouts of the tiny target with these provenances, the last one for all that are left."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for index, row in enumerate(rows):
        row["provenance"] = written[min(index, len(written) - 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return collate(load_examples(path, "train", 64, target.name)[0], pad_id=0)


def _step(target, draft, batch):
    """The step, and how many of the target's choices it computed."""
    side = TargetSide(target, draft.token_map, draft.head.config.aux_layer_ids, "fp32")
    computed: list[int] = []
    choice = side.teacher.choice
    side.teacher.choice = lambda hidden: computed.append(len(hidden)) or choice(hidden)
    model = TrainedHead(draft.head, 0.8)
    micro = micro_step(model, side, batch, supervised_counts(batch, STEPS), STEPS)
    side.capture.remove()
    return micro, sum(computed)


def test_only_greedy_rollouts_speak_for_the_argmax(tiny_target, tiny_draft, path):
    """Losses and right predictions are those of the computed argmax, to the last bit; what was sampled, written by
    another target, or has no provenance is computed, row by row."""
    own = {"target": tiny_target.name, "temperature": 0.0}
    known, none_computed = _step(tiny_target, tiny_draft, _batch(tiny_target, path, own))
    computed, every = _step(tiny_target, tiny_draft, _batch(tiny_target, path, None))
    assert none_computed == 0 < every
    assert torch.equal(known.by_step, computed.by_step) and torch.equal(known.right, computed.right)
    for other in (own | {"temperature": 1.0}, own | {"target": "another"}, {"temperature": 0.0}):
        mixed, some = _step(tiny_target, tiny_draft, _batch(tiny_target, path, own, own, own, other))
        assert 0 < some < every and torch.equal(mixed.right, computed.right)
    greedy = _batch(tiny_target, path, own)
    wrong = greedy.input_ids.clone()
    wrong[greedy.response] = tiny_draft.token_map.ids[0]
    changed = _step(tiny_target, tiny_draft, replace(greedy, input_ids=wrong))[0]
    assert not torch.equal(changed.right, known.right), "the step reads the rollout's ids"


def test_earlier_turns_are_not_what_was_written(tiny_target, path):
    """A template renders them again: their ids may be others."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["provenance"] = {"target": tiny_target.name, "temperature": 0.0}
        (start, end), middle = row["response_spans"][0], sum(row["response_spans"][0]) // 2
        row["response_spans"] = [[start, middle - 1], [middle, end]]
    turns = path.with_name("turns.jsonl")
    turns.write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = collate(load_examples(turns, "train", 64, tiny_target.name)[0], pad_id=0)
    assert batch.response.any() and not batch.greedy.any()
