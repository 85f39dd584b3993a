"""One of the two processes of test_sharded_target.py, run by path: shards a target and writes its results to a file.

python sharded_target_process.py TARGET FOLDER RANK
"""

from __future__ import annotations

import gc
import json
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from toolkit.data.batches import BatchPlan, Example, collate
from toolkit.targets.features import AuxCapture, target_features
from toolkit.targets.load import layer_bytes, load_tokenizer, read_target, shard_layers, unsharded
from toolkit.targets.target import Target
from toolkit.train import offline_features as offline
from toolkit.train.training_data import Data
from toolkit.train_settings import TrainSettings

AUX = (2, 3, 4)


def states(target: Target, ids: torch.Tensor) -> list[torch.Tensor]:
    capture = AuxCapture(target, AUX)
    found = target_features(target, capture, ids)
    capture.remove()
    return [found.aux, found.last]


def own_storages(target: Target) -> list[StorageWeakRef]:
    """The layers' parameters, which as loaded are views of one file, each in a storage of its own."""
    for parameter in target.layers.parameters():
        parameter.data = parameter.data.clone()
    return [StorageWeakRef(parameter.untyped_storage()) for parameter in target.layers.parameters()]


def pair(directory: str, kind: str) -> list[Target]:
    """The target twice, or a mixture of experts with its tokenizer."""
    if kind != "experts":
        return [read_target(directory, dtype=kind) for _ in range(2)]
    tokenizer, made = load_tokenizer(directory), []
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    for _ in range(2):
        torch.manual_seed(0)
        config = Qwen3MoeConfig(vocab_size=len(tokenizer), num_hidden_layers=5, **sizes, **experts)
        made.append(Target(model=Qwen3MoeForCausalLM(config), tokenizer=tokenizer, name="experts"))
    return made


def sharded(alone: Target, target: Target, rank: int) -> dict[str, object]:
    weights = own_storages(target)
    shard_layers(target, init_device_mesh("cpu", (2,)))
    gc.collect()
    found: dict[str, object] = {"bytes": layer_bytes(target), "kept": sum(not one.expired() for one in weights)}
    with unsharded(target.layers[-1]):
        pairs = zip(target.layers[-1].parameters(), alone.layers[-1].parameters(), strict=True)
        found["read"] = all(torch.equal(ours, theirs) for ours, theirs in pairs)
    batches = [
        torch.arange(start, start + 12)[None] % 50 + 3 for start in (rank, 20 + rank)
    ]  # each process has its own
    found["equal"] = [
        torch.equal(ours, theirs)
        for ids in batches
        for ours, theirs in zip(states(target, ids), states(alone, ids), strict=True)
    ]
    found["bytes after"] = layer_bytes(target)
    return found


def stored(target: Target, alone: Target, rank: int) -> bool:
    """Five texts of a forward each: three for the first process, two for the other."""
    offline.FORWARD_TOKENS = 1
    texts = [list(range(3 + index, 12 + 2 * index)) for index in range(5)]
    examples = [Example(str(index), text, [True] * len(text)) for index, text in enumerate(texts)]
    data = Data(examples[:4], [collate(examples[4:], 7)], BatchPlan([len(text) for text in texts[:4]], 4, 0), 7)
    group = SimpleNamespace(
        is_main_process=rank == 0, process_index=rank, num_processes=2, wait_for_everyone=dist.barrier
    )
    source = offline.offline_features(TrainSettings(), target, AUX, data, FOLDER / "features", group)
    batch = collate(examples, 7)
    found, wanted = source(batch), states(alone, batch.input_ids)
    ends = [len(text) - 1 for text in texts]
    return all(
        torch.allclose(ours[row, :end], theirs[row, :end], rtol=1e-4, atol=1e-4)
        for ours, theirs in zip((found.aux, found.last), wanted, strict=True)
        for row, end in enumerate(ends)
    )


if __name__ == "__main__":
    DIRECTORY, FOLDER, RANK = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    store = dist.FileStore(str(FOLDER / "store"), 2)
    # Processes that run different numbers of forwards wait for each other; the timeout ends that.
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=2, timeout=timedelta(seconds=120))
    answers: dict[str, object] = {}
    for name in ("bfloat16", "experts", "float32"):
        alone, target = pair(DIRECTORY, name)
        answers[name] = sharded(alone, target, RANK)
    answers["stored"] = stored(target, alone, RANK)
    (FOLDER / f"found-{RANK}.json").write_text(json.dumps(answers), encoding="utf-8")
    dist.destroy_process_group()
