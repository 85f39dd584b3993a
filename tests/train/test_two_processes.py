"""What two processes compute together equals what one computes: a target by tensor parallel, rows split in two.

`python -m tests.train.test_two_processes CASE FOLDER RANK` is one of the two; it prints as JSON what it found.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.data.batches import Example, collate
from toolkit.errors import TargetError
from toolkit.infer.parallel.ranks import ParallelError
from toolkit.infer.parallel.sharded_models import undivided
from toolkit.recipe import load_recipe
from toolkit.targets.features import AuxCapture, target_features
from toolkit.targets.load import read_target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train import accelerator
from toolkit.train.draft_head import anchors_of, plan_head, start_head, trained_head
from toolkit.train.row_split import _split_attention, split_rows
from toolkit.train.step import micro_step, supervised_counts
from toolkit.train.target_side import StoredFeatures, TargetSide
from toolkit.train_settings import HeadSettings, TrainSettings, UnrollSettings

REPOSITORY, K = Path(__file__).resolve().parents[2], 3
# Tokens of (prompt, answer): parts that padding fills up; a second part without a root, and a first one.
TEXTS = (((2, 21), (2, 15), (2, 10)), ((2, 4), (2, 4), (1, 5)), ((14, 9), (15, 5)))


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, in shares of the largest value."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))


def tensor_parallel(folder: Path, rank: int) -> dict[str, Any]:
    """Batches of unlike shapes, the second one packed; then both processes have the same one."""
    recipe = load_recipe(folder / "recipe.yaml", ["train.target=tensor"])
    two: Any = SimpleNamespace(num_processes=2)
    divided = accelerator.frozen_target(recipe, "cpu", two)
    whole = read_target(recipe.target.model, dtype="float32")
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
    checksums = [accelerator.weights_checksum(one, two) for one in (divided, whole)]
    return {
        "differences": differences,
        "rows": [len(q_proj.weight), len(whole.layers[0].self_attn.q_proj.weight)],
        "same_layer": same,
        "same_checksum": checksums[0] == checksums[1],
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
    for name, head, unroll in (
        ("plain", {}, {}),
        ("window", {"sliding_window": 5, "norm_output": True, "fc_norm": True}, {"checkpointing": True}),
        ("stored", {}, {"anchors": 4}),
        ("eagle2", {"kind": "eagle2"}, {}),
        ("mtp", {"kind": "mtp", "layers": 2}, {"anchors": 4}),
        ("block", {"kind": "dspark"}, {"checkpointing": True}),
        ("causal", {"kind": "dspark", "causal": True, "correction": "dfly"}, {"anchors": 4}),
    ):
        settings = TrainSettings(head=HeadSettings(**head), unroll=UnrollSettings(ttt_steps=K, **unroll))
        plan = plan_head(settings, target, token_map)
        whole = TargetSide(target, token_map, plan.aux_layer_ids, "fp32")
        draft = start_head(plan, settings, target, seed=0)
        for parameter in draft.parameters():
            parameter.data *= 4  # with small weights its attention would hardly matter
        model = trained_head(plan, settings, draft, whole.teacher)
        split = split_rows(target, plan.config, dist.group.WORLD, longest=64)
        stored = Stored(whole) if name == "stored" else None
        parts = TargetSide(target, token_map, plan.aux_layer_ids, "fp32", stored, split)
        anchors = anchors_of(plan, settings, 0)
        for texts in TEXTS:
            pairs = zip(
                step(model, parts, texts, anchors, summed=True), step(model, whole, texts, anchors), strict=True
            )
            found[f"{name} {texts}"] = max(largest(a, b) for a, b in pairs)
    return found


def step(model: Any, side: TargetSide, texts: Any, anchors: Any, *, summed: bool = False) -> list[torch.Tensor]:
    """Losses and counts by step, and the gradients. summed: over both processes."""
    generator = torch.Generator().manual_seed(6)
    examples = []
    for at, (prompt, answer) in enumerate(texts):
        ids = torch.randint(3, 393, (prompt + answer,), generator=generator).tolist()
        examples.append(Example(str(at), ids, [False] * prompt + [True] * answer, greedy=at == 1))
    batch = collate(examples, pad_id=0)
    loss, *sums = micro_step(model, side, batch, supervised_counts(batch, K), K, anchors)
    gradients = torch.autograd.grad(loss, [one for one in model.parameters() if one.requires_grad])
    values = [loss.detach(), *(one.detach() for one in sums), *(one.contiguous() for one in gradients)]
    for value in values if summed else []:
        dist.all_reduce(value)
    return values


# -- the tests ---------------------------------------------------------------------------------------------------------


def of_both(case: str, folder: Path) -> list[dict[str, Any]]:
    """What each process of a case found."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPOSITORY)}
    line = [sys.executable, "-m", "tests.train.test_two_processes", case, str(folder)]
    running = [
        subprocess.Popen([*line, str(rank)], env=environment, cwd=REPOSITORY, text=True, stdout=-1, stderr=-1)
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors for _, errors in said)
    return [json.loads(output.splitlines()[-1]) for output, _ in said]


@pytest.fixture(scope="module")
def biased_run(tiny_run, tiny_target_directory, tmp_path_factory) -> Path:
    """A recipe for the tiny target with biases, of which a sum over processes may count some twice."""
    folder = tmp_path_factory.mktemp("biased")
    shutil.copytree(tiny_target_directory, folder / "target")
    torch.manual_seed(7)
    sizes = {"attention_bias": True, "mlp_bias": True, "initializer_range": 0.2}
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(tiny_target_directory, **sizes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder / "target")
    recipe = yaml.safe_load((tiny_run / "recipe.yaml").read_text())
    recipe["target"]["model"] = str(folder / "target")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.mark.process
def test_features_by_tensor_parallel_are_those_of_the_whole_target(biased_run):
    """fp32; each process has the features of its own batch, and holds half of each layer. What training reads of the
    weights, a layer to copy and the checksum of a resumed run, is that of the whole target."""
    for found in of_both("tensor_parallel", biased_run):
        assert max(found["differences"]) < 1e-5
        assert 2 * found["rows"][0] == found["rows"][1] and found["same_layer"] and found["same_checksum"]


@pytest.mark.process
def test_rows_in_two_parts_train_as_whole_ones(tiny_run):
    """fp32: losses, counts of right predictions and gradients. A position, key, token, label or teacher's row that is
    not the one of the whole row moves them by far more; so does a gradient that does not come back."""
    for found in of_both("rows_in_two", tiny_run):
        assert len(found) == 7 * len(TEXTS) and max(found.values()) < 1e-5, found


def test_heads_that_do_not_divide_are_refused_before_loading(tiny_run, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(accelerator, "_load", lambda *_: pytest.fail("the target was loaded"))
    recipe = load_recipe(tiny_run / "recipe.yaml", ["train.target=tensor"])
    with pytest.raises(ParallelError, match=r"4 attention heads and 2 key heads, which 3 .*set train.target=sharded"):
        accelerator.frozen_target(recipe, "cpu", SimpleNamespace(num_processes=3))


def test_the_attention_of_the_target_must_be_plain(tiny_target):
    """Half of the positions would see too far, or not far enough."""
    split = SimpleNamespace(longest=64)
    with pytest.raises(TargetError, match="has a sliding window.*train.data.split_rows=1"):
        _split_attention(tiny_target.layers[0], *[torch.zeros(1, 2, 4, 8)] * 3, None, row_split=split, sliding_window=8)


if __name__ == "__main__":
    case, folder, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    print(json.dumps({"tensor_parallel": tensor_parallel, "rows_in_two": rows_in_two}[case](folder, rank)))
    dist.destroy_process_group()
