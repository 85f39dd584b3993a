"""The rollout stage leaves the features it computed anyway, and training reads them, from wherever they came."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from toolkit.data.examples import load_examples
from toolkit.data.feature_store import FeatureSpec, FeatureStore, FeatureStoreError
from toolkit.pipeline.run import Run, recipe_stages
from toolkit.pipeline.stages import run_stages
from toolkit.recipe import RecipeError, load_recipe
from toolkit.targets.features import AuxCapture
from toolkit.train.training_data import features_of, offline_features, read_data

RECIPE = """
name: tiny
target: {{model: {target}}}
run_dir: {folder}/run
prompts: {{sources: [{folder}/prompts.jsonl]}}
rollouts: {{max_tokens: 24, max_running_requests: 4, held_out: 0.25, keep_features: true}}
token_map: {{size: 128}}
train: {{precision: fp32, unroll: {{ttt_steps: 2}}, data: {{features: offline, max_length: 50}}}}
"""


@pytest.fixture
def recipe(tiny_target_directory: Path, tmp_path: Path) -> Path:
    """Twelve conversations of one turn, two or three. Every 17th id ends an answer of the target, whose weights are
    random: else each would be cut, and with it its conversation."""
    target = shutil.copytree(tiny_target_directory, tmp_path / "target")
    ends = list(range(0, json.loads((target / "config.json").read_text())["vocab_size"], 17))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(target=target, folder=tmp_path))
    rows = [
        {"id": f"p{at}", "messages": [{"role": "user", "content": f"count {at} apples {t}"} for t in range(1 + at % 3)]}
        for at in range(12)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "tiny.yaml"


def write_rollouts(path: Path, *overrides: str) -> Run:
    run = Run(load_recipe(path, overrides), path)
    run_stages(run.folder, recipe_stages(run), until="rollouts")
    return run


def opened(run: Run) -> FeatureStore:
    """The store as training has it, and how many texts it had to make itself."""
    data = read_data(run.recipe.train, run.folder / "rollouts" / "rollouts.jsonl", run.target, run.recipe.seed)
    alone = SimpleNamespace(is_main_process=True, process_index=0, num_processes=1, wait_for_everyone=lambda: None)
    return offline_features(run.recipe.train, run.target, (2, 3, 4), data, run.folder / "features", alone).store


def texts_of_rollouts(run: Run) -> dict[str, list[int]]:
    """By conversation, cut as training cuts them."""
    path = run.folder / "rollouts" / "rollouts.jsonl"
    splits = (load_examples(path, split, run.recipe.train.data.max_length)[0] for split in ("train", "held_out"))
    return {example.id: example.input_ids for examples in splits for example in examples}


def test_rollouts_leave_the_features_training_reads(recipe: Path) -> None:
    """Of every conversation the whole last text, cut as training cuts it; training makes only those that it ends at the
    border of a turn. Each position is that of a forward over the text (fp32, 1e-4 where states are of size 1)."""
    run = write_rollouts(recipe)
    spec = FeatureSpec.of(run.target, (2, 3, 4, 6))
    store = FeatureStore(run.folder / "features", spec)
    rows = [json.loads(line) for line in (run.folder / "rollouts" / "rollouts.jsonl").read_text().splitlines()]
    texts = texts_of_rollouts(run)
    bordered = {row["id"] for row in rows if len(row["messages"]) > 2 and len(row["input_ids"]) > 50}
    single = {row["id"] for row in rows if len(row["messages"]) == 2}
    assert len(texts) > 6 and bordered and any(len(texts[name]) == 50 for name in single), "every cut occurs"
    assert {name for name, ids in texts.items() if ids in store} == texts.keys() - bordered
    assert len(store) == len(texts) - len(bordered), "the texts of earlier turns are not stored"
    capture = AuxCapture(run.target, spec.layer_ids)
    for ids in (ids for ids in texts.values() if ids in store):
        torch.testing.assert_close(store.read(ids), next(features_of(run.target, capture, [ids])), rtol=1e-4, atol=1e-4)
    capture.remove()
    shards = {path: path.stat().st_mtime_ns for path in store.folder.glob("shard-*")}
    whole = opened(run)
    assert len(whole) == len(texts) and all(ids in whole for ids in texts.values())
    assert shards.items() <= {path: path.stat().st_mtime_ns for path in store.folder.glob("shard-*")}.items()


def test_new_rollouts_set_the_features_aside(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They would take room for nothing; a switch of where features come from is no new rollout, and no new training."""
    run = write_rollouts(recipe)
    capsys.readouterr()
    for off in (("rollouts.keep_features=false",), ("rollouts.keep_features=false", "train.data.features=online")):
        other = Run(load_recipe(recipe, off), recipe)
        run_stages(other.folder, recipe_stages(other), until="rollouts")
        assert capsys.readouterr().out.count("skipped") == 2
        assert recipe_stages(other)[3].settings == recipe_stages(run)[3].settings
    write_rollouts(recipe, "rollouts.max_tokens=20", "rollouts.keep_features=false")
    assert not (run.folder / "features").exists() and list((run.folder / "replaced").glob("*/features/shard-*"))


def test_mistakes_are_told_before_any_rollout(recipe: Path, monkeypatch) -> None:
    """Features that nothing reads, and a disk without room for the longest texts there can be."""
    with pytest.raises(RecipeError, match=r"rollouts\.keep_features .* train\.data\.features=offline"):
        load_recipe(recipe, ["train.data.features=online"])
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100_000))
    # Eight conversations of several turns count as 49 positions, four of one turn as their prompt and five tokens.
    with pytest.raises(FeatureStoreError, match=r"at most 0\.\d+ MB .*0\.100 MB") as told:
        write_rollouts(recipe, "rollouts.max_tokens=5")
    assert not (recipe.parent / "run" / "rollouts" / "rollouts.jsonl").exists()
    announced = int(re.search(r"1280 bytes per token x (\d+) tokens", str(told.value))[1])
    monkeypatch.undo()
    run = write_rollouts(recipe, "rollouts.max_tokens=5")
    stored = sum(len(ids) - 1 for ids in texts_of_rollouts(run).values())
    assert stored <= announced < 12 * 49, "an upper bound, and a closer one than texts of train.data.max_length"
