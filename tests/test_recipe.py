"""Recipes: what is written is what runs, and what cannot run is refused with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.heads.head_config import default_aux_layer_ids
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.pipeline.run import Run, recipe_stages
from toolkit.recipe import (
    DEMO_RECIPE,
    Recipe,
    RecipeError,
    TargetSettings,
    load_recipe,
    print_config,
    result_settings,
)
from toolkit.recipe_yaml import ALIASES, _keys

MINIMAL = "name: small\ntarget: {model: tiny}\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_a_preset_is_a_kind_with_its_settings(tmp_path: Path) -> None:
    """JetSpec by name; what the recipe gives itself stays."""
    train = load_recipe(write(tmp_path, MINIMAL), ["train.head.kind=jetspec", "train.head.markov_rank=8"]).train
    head = train.head
    assert (head.kind, head.causal, head.markov_rank, train.unroll.step_decay) == ("dspark", True, 8, 1.0)
    by_file = load_recipe(write(tmp_path, MINIMAL + "train: {head: {kind: jetspec}}\n")).train.head
    assert (by_file.kind, by_file.causal, by_file.markov_rank) == ("dspark", True, 0)
    corrected = load_recipe(write(tmp_path, MINIMAL), ["train.head.kind=jetspec", "train.head.correction=dfly"]).train
    assert (corrected.head.causal, corrected.head.correction) == (True, "dfly")
    for correction, rank, says in (("markov", 0, "raise that, or set none"), ("dfly", 8, "only the correction markov")):
        given = f"train.head.correction={correction}", f"train.head.markov_rank={rank}"
        assert says in refused(write(tmp_path, MINIMAL), "train.head.kind=dspark", *given)
    assert "train.head.causal = true: only dspark heads" in refused(write(tmp_path, MINIMAL), "train.head.causal=true")


# Layers of the targets whose recipes nobody can try here, as their configurations have them.
LAYERS = {"llama-3.1-8b": 32, "qwen3-8b": 36, "qwen3-30b-a3b": 48}
FIELDS = ("date:", "hardware:", "commit:")


@pytest.mark.parametrize("path", sorted(DEMO_RECIPE.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_runs_as_its_header_says(path: Path) -> None:
    """A key the code does not know, a shape or batch that a later stage refuses, layers of another model, a launch line
    that names another file, or a measured figure without the machine it was measured on."""
    recipe, text = load_recipe(path), path.read_text(encoding="utf-8")
    assert recipe.name == path.stem and f"toolkit run recipes/{path.name}" in text
    assert len(recipe_stages(Run(recipe, path))) == 6
    assert recipe.bench.adaptive, "the headline of a report is what serve does as it starts"
    for shape in (*recipe.bench.shapes[1:], *(recipe.train.evaluation.real_shapes or ())):
        assert DraftShape.parse(shape).as_text() == shape
    header = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    words = " ".join(header).replace("\\", "").split()
    if "launch" in words:
        line = words[words.index("launch") :]
        assert line[line.index("--recipe") + 1] == f"recipes/{path.name}" and line[2] == "recipes/accelerate/zero2.yaml"
        assert (DEMO_RECIPE.parents[1] / line[2]).is_file()
        recipe.train.check_processes(int(line[line.index("--num_processes") + 1]))
    if recipe.name in LAYERS:
        assert recipe.train.head.aux_layer_ids == default_aux_layer_ids(LAYERS[recipe.name])
    if "Measured: docs/benchmarks.md" in header:
        return
    told = {name: next(line for line in header if line.startswith(name)) != name for name in FIELDS}
    assert len(set(told.values())) == 1, f"measured on a machine, at a commit, or not at all: {told}"


def test_printed_config_reads_back_to_the_same_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A printed config that another key order, a float form or a tuple changed would be no record of the run."""
    overrides = [
        "train.optimizer.learning_rate=1e-4",
        "train.head.aux_layer_ids=[1, 3, 5]",
        "bench.shapes=['3,1,4']",
        "seed=7",
    ]
    recipe = load_recipe(DEMO_RECIPE, overrides)
    print_config(recipe)
    printed = capsys.readouterr().out
    assert load_recipe(write(tmp_path, printed)) == recipe
    assert "aux_layer_ids: [1, 3, 5]" in printed


def test_defaults_and_values_arrive_typed(tmp_path: Path) -> None:
    """An integer where a float belongs must not change the settings' hash between 1 and 1.0; lists become tuples."""
    recipe = load_recipe(
        write(tmp_path, MINIMAL + "train: {epochs: 2, optimizer: {learning_rate: 1e-3, betas: [0, 0.9]}}\n")
    )
    assert recipe == Recipe("small", TargetSettings("tiny"), train=recipe.train)
    assert (type(recipe.train.epochs), recipe.train.optimizer.learning_rate, recipe.train.optimizer.betas) == (
        float,
        1e-3,
        (0.0, 0.9),
    )


def test_wrong_input_says_key_value_and_need(tmp_path: Path) -> None:
    """A misspelt or misplaced setting that is ignored costs a training run before anybody sees it."""
    path = write(tmp_path, MINIMAL)
    for override, told in (
        ("train.max_step=3", "did you mean train.max_steps?"),
        ("learning_rate=1e-3", "did you mean train.optimizer.learning_rate?"),
        ("target.revision=123", 'write it in quotes: "123"'),
        ("train.epochs=many", 'train.epochs = "many": it must be a valid number'),
        ("train.optimizer.betas=[0.9]", "betas[1] is missing"),
        ("train=3", "train = 3: it must be a mapping of keys"),
        ("train.unroll.ttt_steps", "not of the form section.key=value"),
        ("rollouts.server_model=x", "set rollouts.server too, or this to null"),
        ("bench.shapes=['4,1,5','4,1,5']", "each value once"),
        ("token_map.coverage=0.9", "exactly one of size and coverage"),
    ):
        assert told in refused(path, override), override


def test_the_right_key_is_named_wherever_it_was_typed(tmp_path: Path) -> None:
    """`data.batch_size` led to prompts.sources, as a whole section of others was read as a key."""
    path, keys = write(tmp_path, MINIMAL), set(_keys(Recipe, ""))
    assert ALIASES.keys() <= keys, "a key that was renamed"
    names = {other: key for key, others in ALIASES.items() for other in others.split()}
    for section in ("", "data.", "train.", "training.optimizer."):
        typed = {section + other: key for other, key in names.items() if f"train.{other}" not in keys}
        lines = refused(path, *(f"{one}=1" for one in typed)).splitlines()
        for one, key in typed.items():
            assert any(line.endswith(f"unknown key {one}; did you mean {key}?") for line in lines), one
    for typed, key in [
        ("rollouts.temperature_", "rollouts.temperature"),
        ("bench.max_new_tokens", "bench.max_tokens"),
        ("model.path", "target.model"),
        ("training.ttt-steps", "train.unroll.ttt_steps"),
    ]:
        assert f"did you mean {key}?" in refused(path, f"{typed}=1")


def test_missing_and_doubled_keys_are_refused(tmp_path: Path) -> None:
    """YAML silently keeps the last of two equal keys; a recipe must not."""
    assert "target.model is missing" in refused(write(tmp_path, "name: x\ntarget: {}\n"))
    assert "given twice: seed" in refused(write(tmp_path, MINIMAL + "seed: 1\nseed: 2\n"))
    assert "holds a list" in refused(write(tmp_path, "- name\n"))
    assert "a value is no text" in refused(write(tmp_path, MINIMAL + 'run_dir: "\\ud83d"\n'))
    with pytest.raises(FileNotFoundError, match="recipes/smollm2-135m.yaml"):
        load_recipe(tmp_path / "absent.yaml")


def test_result_settings_leave_out_what_does_not_decide_the_result() -> None:
    """Were batch size or checkpoint interval among them, changing one would throw finished work away."""
    recipe = load_recipe(DEMO_RECIPE)
    train, rollouts = result_settings(recipe.train), result_settings(recipe.rollouts)
    assert "wandb" not in train["tracking"] and "micro_batch" not in train["data"]
    assert "max_running_requests" not in rollouts and {"temperature", "max_tokens", "held_out"} <= rollouts.keys()
    assert train["optimizer"]["betas"] == [0.9, 0.95]
