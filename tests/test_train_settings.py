"""Settings of training: what cannot run is refused with a way out, and older names stay known."""

from __future__ import annotations

import pytest

from tests.test_recipe import refused
from toolkit.recipe import DEMO_RECIPE, RecipeError, load_recipe
from toolkit.train_settings import DataSettings, TrainSettings


@pytest.mark.parametrize(
    ("processes", "batch", "micro", "told"),
    [(3, 8, 8, "train.data.global_batch"), (1, 12, 8, "train.data.micro_batch")],
)
def test_a_batch_that_cannot_be_shared_is_refused(processes: int, batch: int, micro: int, told: str) -> None:
    """Training itself would find it after the minutes of prompts and rollouts."""
    with pytest.raises(RecipeError, match=told):
        TrainSettings(data=DataSettings(global_batch=batch, micro_batch=micro)).check_processes(processes)
    TrainSettings(data=DataSettings(global_batch=12, micro_batch=8)).check_processes(2)
    with pytest.raises(RecipeError, match="split_rows = 2, but 3 training"):
        TrainSettings(data=DataSettings(split_rows=2)).check_processes(3)
    TrainSettings(data=DataSettings(global_batch=1, micro_batch=1)).check_processes(
        2
    )  # the second one has nothing to do


def test_settings_of_another_kind_of_head_are_refused() -> None:
    """A switch that the trained head has no part for would look as if it had been tried."""
    for override, told in (
        ("train.head.fc_norm=true", "train.head.fc_norm = true: only eagle3 heads read it, not mtp; set it to false"),
        ("train.unroll.feature_weight=0.5", "only eagle2 heads read it"),
        ("train.head.sliding_window=3", "at least ttt_steps (4)"),
        ("train.unroll.curriculum=[0.5,0.5]", "sum to less than 1"),
    ):
        assert told in refused(DEMO_RECIPE, "train.head.kind=mtp", override)
    frozen = load_recipe(DEMO_RECIPE, ["train.head.kind=mtp", "train.head.lm_head=frozen"])
    assert frozen.train.head.kind == "mtp", "the target's output matrix is all that it has"
    mtp = ("train.head.kind=mtp", "train.head.layers=2", "train.unroll.curriculum=[0.5]")
    assert "leave some untrained" in refused(DEMO_RECIPE, *mtp)


@pytest.mark.parametrize("override", ["data.pack=true", "target=tensor"])
def test_what_needs_whole_rows_is_refused_with_split_ones(override: str) -> None:
    on = ["train.data.split_rows=2", "train.evaluation.real_every=null"]
    assert load_recipe(DEMO_RECIPE, on).train.data.split_rows == 2
    assert "train.data.split_rows = 2: " in refused(DEMO_RECIPE, *on, f"train.{override}")


@pytest.mark.parametrize("override", ["train.evaluation.real_every=9", "target.quantization=int8"])
def test_what_needs_the_whole_target_is_refused_with_a_sharded_one(override: str) -> None:
    """The engine's rounds on one process would wait for the others' for ever; quantised layers are not cut."""
    off = [
        "train.target=sharded",
        "train.evaluation.real_every=null",
        "train.data.features=online",
        "rollouts.keep_features=false",
    ]
    assert load_recipe(DEMO_RECIPE, off).train.target == "sharded"
    told = refused(DEMO_RECIPE, *off, override)
    assert f"{override.partition('=')[0]} = " in told and "sharded" in told
