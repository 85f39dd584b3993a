"""A stored curve of 50 steps (gate 5 of the design): what is not meant to change arithmetic reproduces it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from toolkit.data.batches import Example, collate
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.train.step import TrainedHead, micro_step, supervised_counts
from toolkit.train.target_side import TargetSide
from toolkit.train.warm_start import initialise_random

CURVE = Path(__file__).with_name("trajectory.json")
STEPS, BATCHES, K, RATE = 50, 5, 4, 4e-3


def _batches(vocabulary: int) -> list:
    """Prompts and answers of random tokens and many lengths, seen ten times: the head learns them by heart."""
    generator = torch.Generator().manual_seed(5)
    examples = []
    for index in range(4 * BATCHES):
        prompt, answer = torch.randint(3, 30, (2,), generator=generator).tolist()
        ids = torch.randint(3, vocabulary, (prompt + answer + 2,), generator=generator).tolist()
        examples.append(Example(str(index), ids, [False] * prompt + [True] * (answer + 2)))
    return [collate(examples[start : start + 4], pad_id=0) for start in range(0, len(examples), 4)]


def _train(target, draft) -> dict[str, list]:
    head = Eagle3Head(Eagle3Config.from_dict(draft.head.config.to_dict()))
    initialise_random(head, seed=0)
    side = TargetSide(target, draft.token_map, head.config.aux_layer_ids, "fp32")
    model = TrainedHead(head, 0.8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    rows: dict[str, list] = {"loss_by_step": [], "right_by_step": []}
    batches = _batches(target.vocab_size)
    for step in range(STEPS):
        batch = batches[step % BATCHES]
        loss, by_step, right, *_ = micro_step(model, side, batch, supervised_counts(batch, K), K)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows["loss_by_step"].append(by_step.tolist())
        rows["right_by_step"].append(right.int().tolist())
    side.capture.remove()
    return rows


def test_the_stored_curve(tiny_target, tiny_draft):
    """fp32, so only the order of sums may differ: 1e-4 relative in every step's losses, where a change of arithmetic
    (a shift, a weight, a denominator) is off by percents. TOOLKIT_RECORD_TRAJECTORY=1 writes the curve anew."""
    rows = _train(tiny_target, tiny_draft)
    right = [step[0] for step in rows["right_by_step"]]
    assert sum(right[-BATCHES:]) > 3 * sum(right[:BATCHES]), "the head must learn, or its curve shows little"
    if os.environ.get("TOOLKIT_RECORD_TRAJECTORY"):
        CURVE.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    stored = json.loads(CURVE.read_text(encoding="utf-8"))
    for key, tolerance in (("loss_by_step", {"rtol": 1e-4, "atol": 0}), ("right_by_step", {"rtol": 0, "atol": 1})):
        ours, theirs = (torch.tensor(one[key], dtype=torch.float64) for one in (rows, stored))
        torch.testing.assert_close(ours, theirs, **tolerance, msg=lambda text, key=key: f"{key}: {text}")
