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

from toolkit.infer.parallel.sharded_models import undivided
from toolkit.recipe import load_recipe
from toolkit.targets.features import AuxCapture, target_features
from toolkit.targets.load import read_target
from toolkit.train.accelerator import frozen_target, weights_checksum


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


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


CASES: dict[str, Callable[[Path, int], dict[str, Any]]] = {"tensor_parallel": tensor_parallel}


if __name__ == "__main__":
    case, folder, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    print(json.dumps(CASES[case](folder, rank)))
    dist.destroy_process_group()
