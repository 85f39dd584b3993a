"""One of two processes of `test_two_processes.py`, which prints as JSON what it found:

python -m tests.train.two_processes CASE FOLDER RANK
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from toolkit.data.batches import Example, collate
from toolkit.infer.parallel.sharded_models import undivided
from toolkit.recipe import load_recipe
from toolkit.targets.features import AuxCapture, target_features
from toolkit.targets.load import read_target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.accelerator import frozen_target, weights_checksum
from toolkit.train.draft_head import plan_head, start_head, trained_head
from toolkit.train.row_split import split_rows
from toolkit.train.step import micro_step, supervised_counts
from toolkit.train.target_side import StoredFeatures, TargetSide
from toolkit.train_settings import HeadSettings, TrainSettings, UnrollSettings

K = 3


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, in shares of the largest value."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1.0))


def tensor_parallel(folder: Path, rank: int) -> dict[str, Any]:
    """Batches of unlike shapes, the second one packed; then both processes have the same one."""
    recipe = load_recipe(folder / "recipe.yaml", ["train.target=tensor"])
    accelerator: Any = SimpleNamespace(num_processes=2)
    divided, whole = frozen_target(recipe, "cpu", accelerator), read_target(recipe.target.model, dtype="float32")
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randint(3, 200, shape, generator=generator) for shape in ((2, 9), (1, 14))]
    starts = [None, torch.tensor([[0] * 6 + [6] * 8])]
    differences = []
    for at in (rank, 0):
        ours, theirs = (
            target_features(one, AuxCapture(one, (0, 3, 7)), batches[at], starts[at]) for one in (divided, whole)
        )
        differences += [largest(ours.aux, theirs.aux), largest(ours.last, theirs.last)]
    q_proj = divided.layers[0].self_attn.q_proj
    with undivided(divided.layers[-1]):
        pairs = zip(divided.layers[-1].parameters(), whole.layers[-1].parameters(), strict=True)
        same = all(torch.equal(a, b) for a, b in pairs)
    return {
        "differences": differences,
        "rows": [len(q_proj.weight), len(whole.layers[0].self_attn.q_proj.weight)],
        "same_layer": same,
        "same_checksum": weights_checksum(divided, accelerator) == weights_checksum(whole, accelerator),
    }


class Stored(StoredFeatures):
    """Features of whole rows, as from a store."""

    def __init__(self, side: TargetSide) -> None:
        self.of = side.features

    def __call__(self, batch):
        return self.of(batch)


def rows_in_two(folder: Path, _rank: int) -> dict[str, Any]:
    """The largest difference of the losses and gradients, by variant and batch."""
    target = read_target(load_recipe(folder / "recipe.yaml").target.model, dtype="float32")
    token_map = TokenMap.from_ids(range(0, 393, 2), target.vocab_size)
    found: dict[str, Any] = {}
    for name, head, unroll, stored in (
        ("plain", {}, {}, False),
        ("window", {"sliding_window": 5, "norm_output": True, "fc_norm": True}, {"checkpointing": True}, False),
        ("stored", {}, {}, True),
    ):
        settings = TrainSettings(head=HeadSettings(**head), unroll=UnrollSettings(ttt_steps=K, **unroll))
        plan = plan_head(settings, target, token_map)
        whole = TargetSide(target, token_map, plan.aux_layer_ids, "fp32")
        model = trained_head(plan, settings, start_head(plan, settings, target, 0), whole.teacher)
        split = split_rows(target, plan.config, dist.group.WORLD, longest=64)
        parts = TargetSide(target, token_map, plan.aux_layer_ids, "fp32", Stored(whole) if stored else None, split)
        for lengths in ((23, 17, 12), (6,)):  # parts that padding fills up; a second part of padding alone
            pairs = zip(step(model, parts, lengths, summed=True), step(model, whole, lengths), strict=True)
            found[f"{name} {lengths}"] = max(largest(a, b) for a, b in pairs)
    return found


def step(model: Any, side: TargetSide, lengths: tuple[int, ...], *, summed: bool = False) -> list[torch.Tensor]:
    """Losses and counts by step, and the gradients. summed: over both processes."""
    generator = torch.Generator().manual_seed(6)
    examples = []
    for at, length in enumerate(lengths):
        ids = torch.randint(3, 393, (length,), generator=generator).tolist()
        examples.append(Example(str(at), ids, [False] * 2 + [True] * (length - 2), greedy=at == 1))
    batch = collate(examples, pad_id=0)
    loss, *sums = micro_step(model, side, batch, supervised_counts(batch, K), K)
    gradients = torch.autograd.grad(loss, [one for one in model.parameters() if one.requires_grad])
    values = [loss.detach(), *(one.detach() for one in sums), *gradients]
    for value in values if summed else []:
        dist.all_reduce(value)
    return values


CASES: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "tensor_parallel": tensor_parallel,
    "rows_in_two": rows_in_two,
}


if __name__ == "__main__":
    case, folder, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    print(json.dumps(CASES[case](folder, rank)))
    dist.destroy_process_group()
