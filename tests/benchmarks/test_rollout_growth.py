"""The table of refreshes is what the training measured."""

from __future__ import annotations

import json

import pytest

from toolkit.train import fresh_rollouts
from toolkit.train.metric_rows import rollouts_row


def test_rows_of_the_metrics(script, tmp_path) -> None:
    """Under a key that the training does not write, every speed would be absent; a speedup upside down would be less
    than one where drafting pays."""
    share = {"last_run": {"seconds": 3.0, "tokens": 90}}
    row = {"drafting": {"verify_steps": 40, "accepted": 20}, "response_spans": [[3, 93]]}
    plain = {"drafting": {"verify_steps": 0, "accepted": 0}, "response_spans": [[3, 83]]}
    speeds = [{"decode_tokens_per_s": 45.0, "plain_tokens_per_s": 30.0}, {"decode_tokens_per_s": 32.0}]
    stats = [fresh_rollouts._stats([one], 0, [share], [speed]) for one, speed in zip((row, plain), speeds, strict=True)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps(row) + "\n"
            for step, fresh in zip((6, 12), stats, strict=True)
            for row in ({"step": step, "loss": 1.0, "tokens": 100 * step}, {"step": step, **rollouts_row(fresh)})
        )
    )
    growth = script("rollout_growth")
    rows = growth.refreshes(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["tokens"], row["accept_length"]) for row in rows] == [(6, 600, 1.5), (12, 1200, None)]
    assert rows[0]["speedup"] == pytest.approx(1.5) and rows[1]["speedup"] is None
    growth.show(rows)


def test_settings_are_those_of_the_run(script, tmp_path) -> None:
    """A record without target and temperatures could not be set beside another."""
    settings = {"seed": 3, "target": {"model": "m"}, "train": {"rollout_prompts": 4}}
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "manifest.json").write_text(json.dumps({"settings": settings}))
    found = script("rollout_growth").settings_of(tmp_path)
    assert found.pop("prompts") is found.pop("rollouts") is None and found == settings
