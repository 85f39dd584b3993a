"""Which try the table of few tokens tests, and what its intervals are over."""

from __future__ import annotations

import sys

import numpy as np
import pytest


def row(split: str, rate: float, forecast: float, **more) -> dict:
    """A training's row, or a test's: two prompts of ten verify steps, of which the first is twice as easy."""
    counts = [(forecast * 20 * 2 / 3, 10), (forecast * 20 / 3, 10)]
    known = {"source": "s", "asked_tokens": 9, "variant": "ours", "seed": 0, "warmup_ratio": 0.1, "digest": "d"}
    known |= {"optimizer": "adamw", "shape": "chain", "num_steps": 4, "top_k": 1, "num_draft_tokens": 5}
    known |= {"temperature": 0.0, "prompts": 2, "tokens": 9, "start_tokens": 3, "start_seconds": 1.0, "seconds": 2.0}
    known |= {"processor_seconds": 2.0, "seconds_per_step": 0.1, "diverged": None, "by_prompt": counts}
    known |= {"split": split, "learning_rate": rate, "forecast": forecast, "forecast_by_prompt": counts}
    return known | {"accept_length": forecast if split == "test" else None, **more}


def test_the_choice_is_validation_s_alone(script) -> None:
    """Two tries of which the test half prefers the other: a table that chose by it would show 1.9. A diverged training
    has no forecast, and one of another seed is no try."""
    table = script("few_tokens_table")
    tries = [row("validation", 1e-4, 1.3), row("validation", 1e-3, 1.5)]
    tries += [{**row("validation", 1e30, 0.0), "forecast": None, "diverged": "inf"}]
    other = row("validation", 1e-3, 1.2, seed=1)
    tests = [row("test", 1e-4, 1.9), row("test", 1e-3, 1.4)]
    rows = [*tries, other, *tests]
    (found,) = table.summary(rows)
    assert found["learning_rate"] == 1e-3 and found["accept_length"] == found["forecast"] == pytest.approx(1.4)
    assert (found["tries"], found["diverged"], found["validation_forecast"]) == (3, 1, 1.5)
    assert not found["at_edge"] and found["seeds"] == [0]
    assert table.warnings(rows)[-1].startswith("the test half was looked at for 2 choices of ours")
    assert table.summary([*tries, tests[0]]) == [], "validation has chosen another, which is not tested yet"
    (edge,) = table.summary([*tries[:2], tests[1]])
    assert edge["at_edge"] and edge["interval"] is not None


def test_a_ratio_is_paired_by_prompt_and_seed(script) -> None:
    """Prompts differ far more than heads: a constant factor between two heads has to come out without a spread, which
    an interval over prompts drawn apart would bury; both single values have a wide one."""
    table = script("few_tokens_table")
    random = np.random.default_rng(0)
    steps = random.integers(5, 40, size=(3, 30, 1)).astype(float)
    ours = np.concatenate(
        (steps * random.uniform(1, 4, size=(1, 30, 1)) * random.uniform(0.9, 1.1, (3, 1, 1)), steps), -1
    )
    theirs = ours * (0.8, 1.0)
    ratio, (low, high) = table.crossed([ours, theirs])
    assert low == pytest.approx(high) and ratio == pytest.approx(1.25) == low
    value, (low, high) = table.crossed([ours])
    assert value == pytest.approx(ours[..., 0].sum() / ours[..., 1].sum()) and high - low > 0.3
    rows = [
        row(split, 1e-3, 1.2, variant="published", seed=seed) for split in ("validation", "test") for seed in (0, 1)
    ]
    rows += [row(split, 1e-2, 1.5, seed=seed) for split in ("validation", "test") for seed in (1, 2, 0)]
    published, mine = table.summary(rows)
    assert published["accept_length_ratio"] is None and mine["seeds"] == [1, 2, 0]
    assert mine["accept_length_ratio"] == pytest.approx(1.25) == mine["accept_length_ratio_interval"][0]


def test_the_spread_of_seeds_is_in_the_interval(script) -> None:
    """Prompts that are all alike, and seeds that differ: an interval over prompts alone would have no width."""
    table = script("few_tokens_table")
    same = np.full((3, 20, 2), 10.0)
    same[..., 0] = np.array([10.0, 12.0, 14.0])[:, None]
    value, (low, high) = table.crossed([same])
    assert value == pytest.approx(1.2) and low < 1.1 and high > 1.3
    assert table.crossed([same[:1]])[1] == (1.0, 1.0)


def test_unequal_numbers_of_tries_are_told(script, capsys) -> None:
    """As many tries for each recipe is what makes their comparison fair."""
    table = script("few_tokens_table")
    rows = [row(split, 1e-3, 1.2, variant="published") for split in ("validation", "test")]
    rows += [row("validation", 1e-2, 1.5), row("validation", 1e-3, 1.4), row("test", 1e-2, 1.5)]
    table.show(rows, table.summary(rows))
    shown = capsys.readouterr().out
    assert "warning: not as many tries for each: {'published': 1, 'ours': 2}" in shown and "1.25 [1.25, 1.25]" in shown


def test_rows_of_several_machines_are_told(script) -> None:
    told = script("few_tokens_table").warnings(
        [row("test", 1, 1, commit="a", machine="x"), row("test", 1, 1, commit="a")]
    )
    assert told == ["rows of several machines stand side by side: unknown, x"]


def test_a_seed_that_diverged_is_named(script) -> None:
    """A recipe that fails for one of three seeds must not look as good as one that never does."""
    table = script("few_tokens_table")
    rows = [row(split, 1e-3, 1.5, seed=seed) for split in ("validation", "test") for seed in (0, 2)]
    rows.insert(1, {**row("validation", 1e-3, 0.0, seed=1), "forecast": None, "diverged": "nan"})
    (found,) = table.summary(rows)
    assert found["seeds"] == [0, 2] and found["diverged_seeds"] == [1] and found["diverged"] == 0
    assert table.in_words(found)[-1] == "0.0 (n=2, 1 diverged)"


def test_records_are_shown_without_a_source(script, monkeypatch, tmp_path, capsys) -> None:
    few, table = script("few_tokens"), script("few_tokens_table")
    monkeypatch.setattr(sys, "argv", ["few_tokens.py", "--show"])
    assert few.main() == 0 and "over published" in capsys.readouterr().out
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match="has no record training-few-tokens"):
        few.main()
    monkeypatch.setattr(sys, "argv", ["few_tokens.py"])
    with pytest.raises(SystemExit, match="no source came"):
        few.main()
