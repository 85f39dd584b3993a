"""What a training is said to need, against what trainings held."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from toolkit.pipeline.run import Run, recipe_stages
from toolkit.recipe import RecipeError, load_recipe
from toolkit.targets.facts import facts_of, target_facts
from toolkit.targets.stand_in import SHAPES
from toolkit.train import needed_memory
from toolkit.train.loop import accumulation_steps
from toolkit.train.needed_memory import GB, USABLE, TrainingMemory
from toolkit.train_settings import DataSettings, HeadSettings, OptimizerSettings, TrainSettings, UnrollSettings

REPOSITORY = Path(__file__).resolve().parents[2]
HELD = """
import json, sys
from dataclasses import replace
from pathlib import Path
from toolkit.recipe import load_recipe
from toolkit.train.loop import Trainer
run = Path(sys.argv[1])
recipe = load_recipe(run / "recipe.yaml", ["train.precision=bf16"])
trainer = Trainer(recipe, run / "rollouts/rollouts.jsonl", run / "token_map/token_map.safetensors", Path(sys.argv[2]))
trainer.optimise(0, [0, 1, 2, 3])
zero, size = trainer.model.optimizer, lambda tensors: sum(one.nbytes for one in tensors)
states = [one for state in zero.optimizer.state.values() for one in state.values() if getattr(one, "ndim", 0)]
states += [staged for staged, _ in zero._muon_pending_momentum.values()]
held = {"target": trainer.target.model.parameters(), "its draft rows": [trainer.side.teacher.draft_weight]}
held |= {"head": trainer.model.parameters(), "its fp32 copy": zero.single_partition_of_fp32_groups}
print(json.dumps({name: size(tensors) for name, tensors in (held | {"optimizer": states}).items()}))
"""


@pytest.mark.process
def test_what_a_trainer_holds(tiny_run, tmp_path):
    """To the byte, of both optimizers' parameters: Muon trains the matrices, AdamW the others."""
    line = [sys.executable, "-c", HELD, str(tiny_run), str(tmp_path / "train")]
    done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    recipe = load_recipe(tiny_run / "recipe.yaml", ["train.precision=bf16"])
    memory = TrainingMemory(target_facts(recipe.target.model), 4, 197, 1e9, on_gpu=False)
    assert memory.needed(recipe.train, 1).always == json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("row, pieces", [("before", 2**23), ("automatic", 2**28), ("pieces 2^30", 2**30)])
def test_what_an_h100_held(row, pieces, monkeypatch):
    """The benchmark has no DeepSpeed: its head is there four times in bf16, with AdamW's moments and its first weights,
    and once more for serving."""
    path = REPOSITORY / "benchmarks" / "results" / "training-gpu-llama-before-nvidia-h100-80gb-hbm3.json"
    measured = next(one for one in json.loads(path.read_text())["rows"] if one["row"] == row)
    monkeypatch.setattr(needed_memory, "logits_at_once", lambda memory: pieces)
    facts = facts_of(AutoConfig.for_model(**SHAPES["llama-3.1-8b"]), "llama")
    settings = TrainSettings(
        precision="bf16", unroll=UnrollSettings(ttt_steps=7), optimizer=OptimizerSettings(name="adamw"),
        data=DataSettings(max_length=2048, global_batch=2, micro_batch=2),
    )  # fmt: skip
    need = TrainingMemory(facts, 2, 32000, 80e9).needed(settings, 1)
    held = need.always["target"] + need.always["its draft rows"] + 5 * need.always["head"]
    assert held + need.at_once["unroll and loss"] == pytest.approx(measured["peak_memory_bytes"], rel=0.05)


def test_refused_before_anything_is_loaded(tiny_run, monkeypatch):
    monkeypatch.setattr(needed_memory, "usable_memory", lambda: 10_000_000)
    path = tiny_run / "recipe.yaml"
    run = Run(load_recipe(path, ["prompts.synthesize=1"]), path, trains=True)
    monkeypatch.setattr(Run, "load_target", lambda *_: pytest.fail("a target was loaded"))
    train = next(stage for stage in recipe_stages(run) if stage.name == "train")
    for first in (lambda: run.target, train.check):  # `check` comes before files of an earlier training are moved
        with pytest.raises(RecipeError, match=r"needs 0.1 GB in each, and 92% of 0.0 GB(.*\n)+ +GB held: target 0.0"):
            first()


def test_a_recipe_takes_the_advised_settings():
    """Also one with fresh rollouts, which a sharded target cannot write."""
    path, own = REPOSITORY / "recipes" / "qwen3-8b.yaml", ["train.on_policy.every=9", "train.on_policy.prompts=5"]
    memory = TrainingMemory(facts_of(AutoConfig.for_model(**SHAPES["qwen3-8b"]), "qwen3"), 2, 32000, 80e9)
    told = memory.told(load_recipe(path, own).train, 8)
    advised = [word for line in told.splitlines() for word in line.split(": ")[0].split() if "=" in word]
    assert "train.target=sharded" in advised and load_recipe(path, [*own, *advised]).train.on_policy.every is None


def test_the_table_of_the_docs():
    """Its rows: the target whole where it fits, else sharded."""
    page = (REPOSITORY / "docs" / "training.md").read_text(encoding="utf-8")
    path = REPOSITORY / "recipes" / "qwen3-8b.yaml"
    ways = {"": (), ", sharded": ("train.target=sharded", "train.evaluation.real_every=null")}
    trains = {said: load_recipe(path, ["train.head.aux_layer_ids=null", *way]).train for said, way in ways.items()}
    for name in ("qwen3-8b", "qwen3-30b-a3b", "qwen3-32b", "llama-3.3-70b"):
        memory, row = TrainingMemory(facts_of(AutoConfig.for_model(**SHAPES[name]), name), 2, None, 80e9), f"| {name} |"
        for processes in (1, 2, 8):
            sizes = {said: memory.needed(train, processes).total for said, train in trains.items()}
            fitting = [said for said, size in sizes.items() if size <= USABLE * memory.memory]
            said = fitting[0] if fitting else ", no"
            row += f" {sizes.get(said, min(sizes.values())) / GB:.0f} GB{said} |"
        assert row in page


def test_processes_that_share_rows_or_the_target_need_less(monkeypatch):
    own = ["train.precision=bf16", "train.evaluation.real_every=null", "train.data.pack=false"]
    settings = load_recipe(REPOSITORY / "recipes" / "qwen3-8b.yaml", own).train
    memory = TrainingMemory(facts_of(AutoConfig.for_model(**SHAPES["qwen3-8b"]), "qwen3"), 2, 32000, 80e9)

    def gb(rows: int, **changes):
        data = replace(settings.data, split_rows=rows)
        return memory.needed(replace(settings, data=data, **changes), 8).total / 1e9

    assert gb(1, target="tensor") == gb(1, target="sharded") < gb(1) - 10
    with monkeypatch.context() as two_machines:
        two_machines.setenv("LOCAL_WORLD_SIZE", "4")
        assert gb(1, target="tensor") > gb(1, target="sharded") + 1
    assert gb(8) < gb(1) - 3
    long = replace(settings, data=replace(settings.data, split_rows=8, micro_batch=1, max_length=131072))
    at_once = replace(memory, facts=replace(memory.facts, max_context=131072)).needed(long, 8).at_once
    assert max(at_once.values()) == at_once["a forecast"] > 3 * 7 * 131072 * 4096 * 2  # its row is whole
    large = replace(settings, head=HeadSettings(kind="mtp", layers=7))  # 1.6 billion weights, of which a billion gather
    two, three = (memory.needed(large, 8, stage) for stage in (2, 3))
    assert 8 * three.always["head"] == two.always["head"] and two.total - three.total > 0.7 * GB
    whole = replace(settings, data=replace(settings.data, split_rows=8, micro_batch=2, global_batch=16))
    assert accumulation_steps(whole, 8) == 8  # all eight hold a part of each of two rows
