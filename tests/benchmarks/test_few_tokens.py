"""The table of few tokens: interrupted anywhere, it goes on; what it says of a cell is that cell's."""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState

from toolkit.bench.records import read_record
from toolkit.jsonl import read_rows
from toolkit.recipe import load_recipe
from toolkit.train.trained_head import TrainedHead


def test_cut_off_and_continued(script, run_folder, monkeypatch, tmp_path, capsys, alone) -> None:
    """A cell trained twice, one lost at an interruption, a row under another cell's name, a source whose files change,
    or a diverged training that looks like a good one would each make a false table."""
    few, cells = script("few_tokens"), script("training_cells")
    trained, cut_off = Counter(), SimpleNamespace(after=3)

    def here(wanted, at_once):
        assert at_once == 2
        for cell in wanted:
            if sum(trained.values()) == cut_off.after:
                raise KeyboardInterrupt
            AcceleratorState._reset_state(reset_partial_state=True)
            trained[cell.key[:4]] += 1
            yield cell, cells.trained(cell)

    monkeypatch.setattr(few, "in_processes", here)
    monkeypatch.setattr(few, "in_own_process", cells.prepare)
    rows, out = tmp_path / "rows.jsonl", tmp_path / "record.json"
    before = sorted((file, file.stat().st_mtime_ns) for file in run_folder.rglob("*"))
    sources = [str(run_folder), f"file:{run_folder / 'rollouts/rollouts.jsonl'}"]
    sizes = ["--tokens", "260", "60", "--seeds", "1", "0", "--max-tokens", "8", "--jobs", "2"]
    chosen = [
        "--only",
        "ours",
        "too hot",
        "--variant",
        "too hot train.learning_rate=1e30 train.init=copied",
        "--engine",
        "ours",
    ]
    recipe = ["--recipe", str(run_folder / "recipe.yaml"), "token_map.size=200"]
    command = ["few_tokens.py", *sources, *recipe, *sizes, *chosen, "--rows", str(rows), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(KeyboardInterrupt):
        few.main()
    assert len(list(read_rows(rows))) == 3
    with rows.open("a") as handle:
        handle.write('{"torn')
    with pytest.raises(ValueError, match="is of .*rollouts.jsonl; call .* otherwise"):
        cells.prepare(tmp_path / "rows-sources" / "file", run_folder / "recipe.yaml", few.load_recipe(recipe[1]))
    monkeypatch.setattr(sys, "argv", [*command, "--minutes", "0"])
    assert few.main() == 0 and sum(trained.values()) == 3, "out of minutes at once"
    monkeypatch.setattr(sys, "argv", command)
    cut_off.after = None
    assert few.main() == 0
    names = (run_folder.name, "file")
    variants = ("ours", "too hot")
    order = [(s, v, t, seed) for t in (60, 260) for seed in (1, 0) for s in names for v in variants]
    assert trained == Counter(order), "each once"
    monkeypatch.setattr(sys, "argv", [*command, "--show"])
    assert few.main() == 0 and sum(trained.values()) == len(order)
    assert before == sorted((file, file.stat().st_mtime_ns) for file in run_folder.rglob("*")), "sources are read only"
    record = read_record(out, "training")
    found = {(row["source"], row["variant"], row["asked_tokens"], row["seed"]): row for row in record["rows"]}
    assert list(found) == order and len(list(read_rows(rows))) == len(order)
    in_an_epoch = sum(11 + index - 6 for index in range(3, 12))  # supervised, of the nine that train
    for (_, variant, tokens, _), row in found.items():
        if variant == "too hot":
            assert "loss" in row["diverged"] and "forecast" not in row
            continue
        low, high = row["forecast_interval"]
        assert 1 <= low <= row["forecast"] <= high <= 5 and row["diverged"] is None
        assert tokens <= row["tokens"] < tokens + 2 * 17
        assert row["unique_tokens"] == (in_an_epoch if tokens == 260 else row["tokens"]), "260 are two epochs"
        assert row["verify_steps"] > 0 and 1 <= row["accept_length"] <= 5
    assert found["file", "ours", 60, 0]["forecast_verify_steps"] > 0
    (cell,) = (one for one in record["cells"] if (one["source"], one["tokens"], one["variant"]) == ("file", 60, "ours"))
    pair = [found["file", "ours", 60, seed]["forecast"] for seed in (0, 1)]
    assert cell["forecast"]["mean"] == pytest.approx(sum(pair) / 2) and cell["forecast"]["seeds"] == 2
    assert cell["forecast"]["spread"] == pytest.approx(abs(pair[0] - pair[1]) / 2**0.5)
    shown = capsys.readouterr().out
    assert "2 diverged" in shown and "260 tokens" in shown


def test_a_cell_that_fails_is_told(script, run_folder, tmp_path, capfd) -> None:
    """By a real process: one whose run folder is gone must neither end the table nor leave a row."""
    cells, jobs = script("training_cells"), script("training_jobs")
    job = jobs.Job("ours", load_recipe(run_folder / "recipe.yaml"), tmp_path / "absent", 60, None, 0, 0, 8, 1)
    cell = cells.Cell("gone", job, "")
    assert list(cells.in_processes([cell], 2)) == [(cell, None)]
    assert "absent" in capfd.readouterr().err


def test_the_built_in_variants_are_settings_of_the_demo_recipe(script) -> None:
    """One that a recipe refuses, or that changes nothing, would be found hours into the table."""
    few = script("few_tokens")
    settings = {name: load_recipe(few.default_recipe_path(), changes).train for name, changes in few.VARIANTS.items()}
    assert len({repr(one) for one in settings.values()}) == len(settings) - 2, "two are other trainers"
    assert set(few.ENGINE) <= set(settings)


def test_the_feature_loss_fades_and_is_gone(script, run_folder, tmp_path, alone) -> None:
    """Its gradient has to be there at the start; at a weight of 0 the head is that of `ours` to the bit."""
    features = script("training_features")
    AcceleratorState._reset_state(reset_partial_state=True)
    recipe = load_recipe(run_folder / "recipe.yaml", ["train.features=online", "rollouts.keep_features=false"])
    files = [run_folder / "rollouts/rollouts.jsonl", run_folder / "token_map/token_map.safetensors"]
    trainer = features.FadingFeaturesTrainer(recipe, *files, tmp_path / "train")
    trainer.steps = 4
    batch = trainer.side.inputs(trainer._collate([0, 1]), 3)
    rows = trainer.side.teacher(batch.teacher_hidden, batch.written, batch.greedy)
    choice, ones = trainer.side.token_map.to_draft(rows.choice), torch.ones(3)
    module, found = trainer.model.module, []
    for weight in (1.0, 0.0):
        module.unrolled.weight = weight
        loss, by_step, _ = module(batch.aux, batch.embeds, batch.supervision, rows, choice, ones)
        found.append((loss.item(), by_step, torch.autograd.grad(loss, module.head.fc.weight)[0]))
    plain = TrainedHead(module.head, recipe.train.step_decay)(
        batch.aux, batch.embeds, batch.supervision, rows, choice, ones
    )
    assert found[1][0] == plain[0].item() < found[0][0] and torch.equal(found[0][1], plain[1])
    assert not torch.allclose(found[0][2], found[1][2])
    weights = []
    for step in range(4):
        trainer.optimise(step, [0, 1])
        weights.append(module.unrolled.weight)
    assert weights == [10.0, 5.0, 0.0, 0.0]
