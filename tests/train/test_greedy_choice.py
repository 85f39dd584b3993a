"""What a greedy rollout says of the target's argmax is not computed again, and is what would be computed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.train.conftest import write_tiny_rollouts
from toolkit.data.batches import collate, load_examples
from toolkit.train.step import TargetSide, micro_step, supervised_counts
from toolkit.train.trained_head import TrainedHead

STEPS = 3


@pytest.fixture(scope="module")
def batches(tiny_target, tmp_path_factory):
    """The same rollouts of the tiny target, marked by their provenance: greedy, one of them sampled, and unmarked."""
    path = tmp_path_factory.mktemp("greedy") / "rollouts.jsonl"
    write_tiny_rollouts(tiny_target, path, count=8)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = []
    for temperatures in ([0.0] * 8, [0.0] * 7 + [1.0], [None] * 8):
        for row, temperature in zip(rows, temperatures, strict=True):
            row["provenance"] = {} if temperature is None else {"temperature": temperature}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found.append(collate(load_examples(path, "train", 64)[0], pad_id=0))
    return found


def _step(target, draft, batch, shift=0):
    side = TargetSide(target, draft.token_map, draft.head.config.aux_layer_ids, "fp32")
    computed: list[torch.Tensor] = []
    choice = side.teacher.choice
    side.teacher.choice = lambda hidden: computed.append(hidden) or choice(hidden)
    model = TrainedHead(draft.head, 0.8)
    micro = micro_step(model, side, batch, supervised_counts(batch, STEPS, shift), STEPS, shift)
    side.capture.remove()
    return micro, bool(computed)


def test_only_greedy_rollouts_speak_for_the_argmax(tiny_target, tiny_draft, batches):
    """Losses and right predictions are those of the computed argmax, to the last bit; with one sampled answer among
    them, without provenance, and under a shifted mask, whose next id may be the template's, it is computed."""
    (known, skipped), (_, mixed), (computed, unmarked) = (_step(tiny_target, tiny_draft, batch) for batch in batches)
    assert [skipped, mixed, unmarked] == [False, True, True]
    assert _step(tiny_target, tiny_draft, batches[0], shift=1)[1]
    assert torch.equal(known.by_step, computed.by_step) and torch.equal(known.right, computed.right)
    wrong = batches[0].input_ids.clone()
    wrong[batches[0].response] = tiny_draft.token_map.ids[0]
    told = _step(tiny_target, tiny_draft, replace(batches[0], input_ids=wrong))[0]
    assert not torch.equal(told.right, known.right), "it is the rollout's ids that are read"
