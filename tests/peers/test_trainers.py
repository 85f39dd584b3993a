"""SpecForge's and speculators' own training code: the published recipe is SpecForge's, and both train on a CPU.

Opt-in: pip install --no-deps specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0 yunchang loguru
pydantic-settings python-dotenv, then pytest -m peers.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from toolkit.data.batches import Example, collate
from toolkit.recipe import load_recipe
from toolkit.tokenmap.files import save_token_map
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import plan_head, start_head

pytestmark = pytest.mark.peers


@pytest.fixture(autouse=True)
def eager():
    """Both have parts that they compile, for minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def rivals(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("training_rivals")


@pytest.fixture
def run_folder(tiny_target, tiny_target_directory, tmp_path) -> Path:
    """Rollouts of random ids with two held-out ones in each half, a token map, and a recipe."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(12):
        ids = torch.randint(3, tiny_target.vocab_size, (14 + index,), generator=generator).tolist()
        split = "held_out" if index < 4 else "train"
        rows.append({"id": f"r{index:02}", "input_ids": ids, "response_spans": [[6, len(ids)]], "split": split})
    (tmp_path / "rollouts").mkdir()
    for name, kept in (("rollouts/rollouts", rows), ("validation", rows[:2]), ("test", rows[2:4])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    half = TokenMap.from_ids(range(0, tiny_target.vocab_size, 2), tiny_target.vocab_size)
    save_token_map(tmp_path / "token_map" / "token_map.safetensors", half)
    (tmp_path / "features").mkdir()
    train = {"precision": "fp32", "data": {"global_batch": 1, "micro_batch": 1}, "unroll": {"ttt_steps": 3}}
    target = {"model": str(tiny_target_directory), "dtype": "float32"}
    recipe = {"name": "tiny", "target": target, "train": train}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return tmp_path


def test_the_published_recipe_is_specforge_s_code(rivals, tiny_target, run_folder) -> None:
    """Loss and gradients of our dense rewrite are those of SpecForge's own modules on the same weights: a gain over it
    is a gain over them."""
    pytest.importorskip("specforge")
    published = importlib.import_module("training_published")
    settings = published.published_settings(load_recipe(run_folder / "recipe.yaml").train)
    token_map = TokenMap.from_ids(range(0, tiny_target.vocab_size, 2), tiny_target.vocab_size)
    plan = plan_head(settings, tiny_target, token_map)
    head = start_head(plan, settings, tiny_target, seed=0)
    theirs = rivals.specforge_model(SimpleNamespace(target=tiny_target, plan=plan, settings=settings), torch.float32)
    missing, unexpected = theirs.draft_model.load_state_dict(head.state_dict(), strict=False)
    assert not unexpected and all(name in ("embed_tokens.weight", "t2d", "d2t") for name in missing)
    ids = torch.randint(3, tiny_target.vocab_size, (2, 13), generator=torch.Generator().manual_seed(1)).tolist()
    batch = collate([Example(str(at), one, [place > 3 for place in range(13)]) for at, one in enumerate(ids)], 2)
    with torch.no_grad():
        told = tiny_target.model(batch.input_ids, output_hidden_states=True)
    aux, last = torch.cat([told.hidden_states[layer] for layer in plan.aux_layer_ids], dim=-1), told.hidden_states[-1]
    embeds = tiny_target.embed_tokens(batch.input_ids).detach()
    mine = published.PublishedHead(head, 3, settings.unroll.step_decay, token_map.t2d)(
        aux, embeds, told.logits.float(), published.lagging_mask(batch)
    )
    other = rivals.specforge_loss(theirs, tiny_target, batch.input_ids, batch.response, aux, last)
    assert mine.item() == pytest.approx(other.item(), rel=1e-5)
    parts = dict(theirs.draft_model.named_parameters())
    gradients = torch.autograd.grad(mine, list(head.parameters()))
    same = torch.autograd.grad(other, [parts[name] for name, _ in head.named_parameters()])
    for one, another in zip(gradients, same, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("rival", ["speculators", "specforge"])
def test_they_train_on_our_rollouts_and_our_importer_reads_them(
    rivals, run_folder, tmp_path, monkeypatch, rival
) -> None:
    """What is replaced in them for a CPU has to be enough, and what they save has to be a head that serves."""
    pytest.importorskip(rival)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    recipe = load_recipe(run_folder / "recipe.yaml", ["train.data.features=offline"])
    job = rivals.Job(rival, recipe, run_folder, 40, "validation", 2, 8, 1, tmp_path / "head")
    row = rivals.in_process_of_its_own(rivals.work, rival, job, 1e-3)
    assert row["steps"] > 2 and row["tokens"] >= 40 and 1 <= row["forecast"] <= 5 and row["seconds_per_step"] > 0
    test = rivals.in_process_of_its_own(rivals.work, rival, rivals.replace(job, split="test"), 1e-3)
    assert 1 <= test["accept_length"] <= 5 and test["seconds"] == row["seconds"], "read back, not trained again"
