"""The benchmark of the recipes: the published one computes what it says, and the command makes a whole record."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState

from toolkit.bench.records import read_record
from toolkit.data.batches import Example, collate, supervised_mask
from toolkit.recipe import load_recipe
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import plan_head, start_head, trained_head
from toolkit.train.split_data import read_data
from toolkit.train.step import TargetSide, micro_step

DESIGNED = {"variant", "tokens", "seconds_per_step", "tokens_per_s", "peak_memory_bytes", "accept_length", "loss"}


def test_published_loss_is_ours_with_a_lagging_mask_over_all_positions(script, tiny_target, run_folder) -> None:
    """Another attention, teacher, weight of a step or alignment in the published recipe would make a straw man of it:
    by the same mask, ours over B*L is the same number, with the same gradients."""
    published = script("training_published")
    settings = published.published_settings(load_recipe(run_folder / "recipe.yaml").train)
    token_map = TokenMap.from_ids(range(0, tiny_target.vocab_size, 2), tiny_target.vocab_size)
    plan = plan_head(settings, tiny_target, token_map)
    head = start_head(plan, settings, tiny_target, seed=0)
    side = TargetSide(tiny_target, token_map, plan.aux_layer_ids, "fp32")
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, tiny_target.vocab_size, (length,), generator=generator).tolist() for length in (9, 14)]
    batch = collate([Example(str(len(one)), one, [at > 3 for at in range(len(one))]) for one in ids], 2)
    denominators = torch.full((3,), float(batch.response.numel()))
    ours = micro_step(trained_head(plan, settings, head, side.teacher), side, batch, denominators, 3, shift=1).loss
    expected = torch.autograd.grad(ours, list(head.parameters()))
    features = side.features(batch)
    theirs = published.PublishedHead(head, 3, settings.step_decay, token_map.t2d)(
        features.aux,
        tiny_target.embed_tokens(batch.input_ids).detach(),
        tiny_target.logits(features.last).detach(),
        supervised_mask(batch.response, 0, 1, batch.lengths),
    )
    assert theirs.item() == pytest.approx(ours.item(), rel=1e-5) and theirs.item() > 1
    for mine, other in zip(expected, torch.autograd.grad(theirs, list(head.parameters())), strict=True):
        torch.testing.assert_close(other, mine, rtol=1e-3, atol=1e-6)


def test_lagging_mask_stands_two_before_what_it_supervises(script) -> None:
    """Root t predicts x_{t+2}: the mask of the recipe misses A1 and goes one past the end, as SpecForge issue 885."""
    batch = collate([Example("a", list(range(9)), [False] * 3 + [True] * 6), Example("b", [1, 2], [False, True])], 0)
    mask = script("training_published").lagging_mask(batch)
    assert mask[0].nonzero().flatten().tolist() == [3, 4, 5, 6, 7] and not mask[1].any()
    exact = supervised_mask(batch.response, 0)[0]
    assert exact.nonzero().flatten().tolist() == [2, 3, 4, 5, 6]


def test_the_whole_command(script, run_folder, monkeypatch, tmp_path, capsys, alone) -> None:
    """A variant that trained on other tokens, a budget that is not kept, or a row without its interval would make a
    false record. One process does it all here: peaks are then not each variant's own, and are not looked at."""
    training, out = script("training"), tmp_path / "record.json"

    def here(job):
        AcceleratorState._reset_state(reset_partial_state=True)
        return training.work(job)

    monkeypatch.setattr(training, "in_own_process", here)
    sizes = ["--tokens", "150", "--step-tokens", "40", "--steps", "1", "--max-tokens", "8", "--seeds", "3"]
    recipe = ["--recipe", str(run_folder / "recipe.yaml"), "train.learning_rate=0.01"]
    monkeypatch.setattr(sys, "argv", ["training.py", *recipe, *sizes, "--out", str(out)])
    assert training.main() == 0
    record = read_record(out, "training")
    rows = record["rows"]
    assert all(set(row) >= DESIGNED for row in rows)
    assert [(row["layout"], row["variant"]) for row in rows] == [
        (layout, variant) for layout in ("rollouts", "one row", None) for variant in ("published", "ours")
    ]
    assert [row["tokens"] for row in rows[2:4]] == [40, 40]
    published, ours = rows[4:]
    assert published["tokens"] == ours["tokens"] >= 150 and published["steps"] == ours["steps"] > 1
    assert published["tokens"] - 150 < 2 * 17, "the budget ends with the batch that fills it"
    for row in (published, ours):
        low, high = row["interval"]
        assert 1 <= low <= row["accept_length"] <= high <= 5 and row["seed"] == 3 and row["verify_steps"] > 0
        assert 1 <= row["forecast"] <= 5 and row["num_steps"] == 4
    settings = record["settings"]["train"]
    assert (settings["published"]["learning_rate"], settings["ours"]["learning_rate"]) == (1e-4, 0.01)
    assert settings["published"]["ttt_curriculum"] == [] and settings["published"]["lm_head"] is None, "none of ours"
    shown = capsys.readouterr().out
    assert "accept_length" in shown and "one row" in shown


def test_a_row_longer_than_the_target_reads_is_refused(script, tiny_target, run_folder) -> None:
    """Positions past the context were never trained: their figures would be those of another forward."""
    data = read_data(
        load_recipe(run_folder / "recipe.yaml").train, run_folder / "rollouts/rollouts.jsonl", tiny_target, 0
    )
    with pytest.raises(ValueError, match="600 ids came, but the target reads at most 512"):
        script("training_jobs").joined(data, 600, 2, tiny_target.max_context)
    texts = script("training_jobs").joined(data, 50, 2, tiny_target.max_context).train
    assert [len(text.input_ids) for text in texts] == [50, 50]


def test_on_and_off_policy_differ_in_the_answers_alone(
    script, tiny_target_directory, monkeypatch, tmp_path, capsys, alone
) -> None:
    """The same prompts, held-out rows and token map; the file's answers word for word, and none taken for greedy."""
    measured, training = script("on_policy"), script("training")
    conversations, seen = tmp_path / "talks.jsonl", {}
    with conversations.open("w") as handle:
        for index in range(14):
            asked = {"role": "user", "content": f"what is {index}"}
            turns = [asked, {"role": "assistant", "content": f"it is {index} and one more thing to say"}]
            handle.write(json.dumps({"id": f"t{index}", "messages": [*turns, asked, turns[1]]}) + "\n")

    def here(job):
        AcceleratorState._reset_state(reset_partial_state=True)
        rows = [json.loads(line) for line in (job.run / "rollouts/rollouts.jsonl").read_text().splitlines()]
        seen[job.variant] = {row["id"]: row for row in rows}, (job.run / training_jobs.TOKEN_MAP).read_bytes()
        return training.work(job)

    training_jobs = script("training_jobs")
    monkeypatch.setattr(measured, "in_own_process", here)
    recipe = tmp_path / "recipe.yaml"
    train = {"ttt_steps": 3, "global_batch": 2, "micro_batch": 2, "precision": "fp32"}
    rollouts = {"max_tokens": 40, "held_out": 0.3, "temperature": 0.0}
    target = {"model": str(tiny_target_directory), "dtype": "float32"}
    recipe.write_text(yaml.safe_dump({"name": "tiny", "target": target, "rollouts": rollouts, "train": train}))
    out = tmp_path / "record.json"
    sizes = ["--tokens", "60", "--seeds", "1", "--max-tokens", "8", "token_map.size=200"]
    monkeypatch.setattr(
        sys, "argv", ["on_policy.py", str(conversations), "--recipe", str(recipe), *sizes, "--out", str(out)]
    )
    assert measured.main() == 0
    rows = read_record(out, "training")["rows"]
    assert [row["variant"] for row in rows] == ["off-policy", "on-policy"] and rows[0]["tokens"] >= 60
    assert all(1 <= row["accept_length"] <= 5 and row["verify_steps"] > 0 for row in rows)
    (given, given_map), (own, own_map) = seen["off-policy"], seen["on-policy"]
    assert given_map == own_map and list(given) == list(own)
    trained = [name for name, row in own.items() if row["split"] == "train"]
    assert 0 < len(trained) < len(own)
    for name, row in given.items():
        if name not in trained:
            assert row == own[name]
            continue
        assert row["messages"][-1]["content"] == f"it is {name[1:]} and one more thing to say"
        assert row["messages"][:-1] == own[name]["messages"][:-1] and len(row["messages"]) == 2
        assert row["provenance"]["temperature"] > 0 and row["provenance"]["target"] != own[name]["provenance"]["target"]
    assert "off-policy" in capsys.readouterr().out
