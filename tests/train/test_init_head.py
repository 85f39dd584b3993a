"""A training that starts from a head that exists (train.init): what is carried over, refused, recorded and resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

from tests.checkpoint.conftest import PROJECTS
from tests.conftest import build_draft, build_target
from tests.train.test_loop import REPOSITORY, _copy_run, _environment, _launch, _line
from toolkit.checkpoint import open_head
from toolkit.checkpoint.draft_dir import load_draft, save_draft
from toolkit.heads.dspark import DSparkConfig, DSparkHead
from toolkit.heads.eagle2 import Eagle2Config, Eagle2Head
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.pipeline.run import Run, recipe_stages
from toolkit.recipe import RecipeError, load_recipe
from toolkit.targets.facts import target_facts
from toolkit.targets.load import read_target
from toolkit.tokenmap.files import save_token_map
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import plan_head
from toolkit.train.training_data import stored_layer_ids
from toolkit.train.warm_start import continued_head
from toolkit.train_settings import HeadSettings, TrainSettings, UnrollSettings
from toolkit.weights import load_tensors, save_tensors, sha256_file


@pytest.fixture(scope="module")
def target(tiny_target_directory):
    return read_target(tiny_target_directory)


def started(settings: TrainSettings, target, token_map: TokenMap):
    plan = plan_head(settings, target, token_map)
    return continued_head(plan.init, plan.config, plan.token_map, settings, target), plan


def eagle3(tiny_draft, **variants) -> Eagle3Head:
    torch.manual_seed(9)
    return Eagle3Head(Eagle3Config.from_dict({**tiny_draft.head.config.to_dict(), **variants})).requires_grad_(False)


def write(directory, head, token_map=None):
    return save_draft(directory, head.state_dict(), head.config, token_map, {})


VARIANTS = {"fc_norm": True, "norm_output": True, "num_hidden_layers": 2, "sliding_window": 32, "fc_bias": True}


@pytest.mark.parametrize("project", ["ours", *PROJECTS])
def test_heads_of_every_writer_are_trained_further(project, tiny_draft, target, tmp_path):
    """Every tensor arrives in float32 and learns; settings of the head that the recipe does not name are kept."""
    if project == "ours":
        head = eagle3(tiny_draft, **VARIANTS)
        directory = write(tmp_path / "head", head, tiny_draft.token_map)
    else:
        own = Eagle2Config.from_target_config(target.config, vocab_size=target.vocab_size)
        head = Eagle2Head(own).requires_grad_(False) if project == "eagle1" else eagle3(tiny_draft)
        (directory := tmp_path / "head").mkdir()
        config, tensors = PROJECTS[project](head, tiny_draft.token_map)
        (directory / "config.json").write_text(json.dumps(config))
        save_tensors(directory / "model.safetensors", tensors)
    settings = TrainSettings(init=str(directory), head=HeadSettings(kind=head.config.kind))
    found, plan = started(settings, target, tiny_draft.token_map)
    assert plan.config == head.config and plan.aux_layer_ids == head.config.features.layer_ids(target.n_layers)
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in found.parameters())
    for name, value in head.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    stored = set(plan.aux_layer_ids or (target.n_layers - 1,))
    assert set(stored_layer_ids(settings, target)) == stored, "no features for a regression"


def test_a_head_of_a_hub_is_recorded_with_its_commit(tiny_draft, target, tmp_path, monkeypatch):
    """A branch moves on: its name alone would not say which head it was."""
    directory = write(tmp_path / "0123abc", tiny_draft.head, tiny_draft.token_map)
    monkeypatch.setattr(open_head, "locate", lambda name: directory)
    record = plan_head(TrainSettings(init="org/head@main"), target, tiny_draft.token_map).init.record
    digest = sha256_file(directory / "model.safetensors")
    assert record == {"name": "org/head", "revision": "0123abc", "weights_sha256": digest}


def test_a_dspark_head_is_trained_further_with_another_map(target, tmp_path):
    """Its bias has rows of ids as its output matrix has: those of new ids are 0."""
    vocabulary = target.vocab_size
    own = TokenMap.from_ids(range(10, 100), vocabulary)
    config = DSparkConfig.from_target_config(
        target.config, vocab_size=vocabulary, target_hidden_size=target.hidden_size, draft_vocab_size=own.size,
        aux_layer_ids=(1, 2, 3), markov_rank=8,
    )  # fmt: skip
    head = DSparkHead(config).requires_grad_(False)
    settings = TrainSettings(init=str(write(tmp_path / "head", head, own)), head=HeadSettings(kind="dspark"))
    token_map = TokenMap.from_ids(range(0, vocabulary, 3), vocabulary)
    found, plan = started(settings, target, token_map)
    assert plan.config.own_output and plan.token_map == token_map and len(found.lm_head.weight) == token_map.size
    new, before = (one.markov_head.markov_w2.weight for one in (found, head))
    for token, row, output in zip(token_map.ids.tolist(), new, found.lm_head.weight, strict=True):
        place = int(own.to_draft(torch.tensor([token])))
        assert torch.equal(row, before[place] if place >= 0 else torch.zeros_like(row))
        assert torch.equal(output, head.lm_head.weight[place] if place >= 0 else target.lm_head.weight[token])
    shorter = replace(settings, unroll=UnrollSettings(ttt_steps=3))
    with pytest.raises(RecipeError, match="drafts blocks of 4 tokens.*set train.unroll.ttt_steps=4"):
        plan_head(shorter, target, token_map)


@pytest.mark.parametrize("lm_head", [None, "frozen"])
def test_rows_of_ids_that_both_maps_have_are_carried_over(tiny_draft, target, tmp_path, caplog, lm_head):
    """Rows are found by target id: the same draft id means another token in another map."""
    directory = write(tmp_path / "head", tiny_draft.head, tiny_draft.token_map)
    token_map = TokenMap.from_ids(range(0, target.vocab_size, 3), target.vocab_size)
    settings = TrainSettings(init=str(directory), head=HeadSettings(lm_head=lm_head))
    caplog.set_level("INFO")
    found, plan = started(settings, target, token_map)
    assert found.config.draft_vocab_size == token_map.size == len(found.lm_head.weight)
    before = dict(zip(tiny_draft.token_map.ids.tolist(), tiny_draft.head.lm_head.weight, strict=True))
    carried = 0
    for token, row in zip(token_map.ids.tolist(), found.lm_head.weight, strict=True):
        own = lm_head is None and token in before
        carried += own
        assert torch.equal(row, before[token] if own else target.lm_head.weight[token])
    assert 0 < carried < token_map.size or lm_head
    assert found.lm_head.weight.requires_grad == (lm_head != "frozen")
    said = f"{carried} of its 160 output rows are carried over" if lm_head is None else f"train.head.lm_head={lm_head}"
    assert said in caplog.text and plan.init.weights_sha256[:12] in caplog.text
    kept = [name for name in found.state_dict() if name != "lm_head.weight"]
    assert all(torch.equal(found.state_dict()[name], tiny_draft.head.state_dict()[name]) for name in kept)


def other_vocabulary(directory, target, tiny_draft):
    config = replace(tiny_draft.head.config, vocab_size=target.vocab_size + 8)
    return write(directory, Eagle3Head(config), TokenMap(tiny_draft.token_map.ids, target.vocab_size + 8))


def own_embedding(directory, target, tiny_draft):
    config, tensors = PROJECTS["specforge"](tiny_draft.head, tiny_draft.token_map)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    embedding = torch.randn(target.embed_tokens.weight.shape)
    save_tensors(directory / "model.safetensors", {**tensors, "embed_tokens.weight": embedding})
    return directory


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (other_vocabulary, r"vocab_size \d+ \(the target's is 393\), to whose ids t2d and lm_head.weight belong"),
        (own_embedding, "an embedding that differs from the target's by"),
    ],
)
def test_a_head_of_another_target_is_refused_with_the_tensor(
    target, tiny_target_directory, tiny_draft, tmp_path, make, says
):
    """Where servers write the rollouts, the weights are not loaded before the training; the sizes are known there."""
    directory = make(tmp_path / "head", target, tiny_draft)
    facts = target_facts(tiny_target_directory)
    for known in (target,) if make is own_embedding else (target, facts):
        with pytest.raises(ValueError, match=says):
            plan_head(TrainSettings(init=str(directory)), known, tiny_draft.token_map)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (HeadSettings(kind="eagle2"), "is a head of kind eagle3, but .* set train.head.kind=eagle3"),
        (HeadSettings(aux_layer_ids=(1, 2, 3)), r"train.head.aux_layer_ids = \(1, 2, 3\) \(it has \(2, 3, 4\)\)"),
    ],
)
def test_settings_that_contradict_the_head_are_refused(target, tiny_draft, tmp_path, head, says):
    """Ignored, they would look as if they had an effect."""
    directory = write(tmp_path / "head", eagle3(tiny_draft, **VARIANTS), tiny_draft.token_map)
    with pytest.raises(RecipeError, match=says):
        plan_head(TrainSettings(init=str(directory), head=head), target, tiny_draft.token_map)


def test_rules_of_the_key(tiny_run, tmp_path):
    path = tiny_run / "recipe.yaml"
    with pytest.raises(RecipeError, match=r"train\.head\.init = .random.*train\.init=null"):
        load_recipe(path, ["train.init=org/head", "train.head.init=random"])
    (tmp_path / "head").mkdir()
    for name in ("config.json", "model.safetensors", "measured.json"):
        (tmp_path / "head" / name).write_text("{}")
    recipe = load_recipe(path, [f"train.init={tmp_path}/head", "prompts.synthesize=9"])
    (train,) = [stage for stage in recipe_stages(Run(recipe, path)) if stage.name == "train"]
    assert {name for name in train.inputs() if name.startswith("init")} == {
        "init config.json",
        "init model.safetensors",
    }


@pytest.mark.process
def test_training_from_a_head_is_measured_recorded_and_resumed(
    tiny_chat_run, tiny_draft, tiny_draft_directory, tmp_path
):
    """From a head with another map: accept_length before the first step and after the last, by
    the engine; an interrupted run goes on to the same head; another head at that path is not taken for it."""
    head = shutil.copytree(tiny_draft_directory, tmp_path / "head")
    run, ids = _copy_run(tiny_chat_run, tmp_path / "run"), range(0, tiny_draft.token_map.vocab_size, 3)
    save_token_map(run / "token_map" / "token_map.safetensors", TokenMap.from_ids(ids, tiny_draft.token_map.vocab_size))
    settings = (
        f"train.init={head}",
        "train.max_steps=12",
        "train.save_every=6",
        "train.evaluation.real_every=6",
        "train.evaluation.real_shapes=['2,1,3']",
    )
    said = _launch(run, *settings)
    rows = [json.loads(line) for line in (run / "train" / "metrics.jsonl").read_text().splitlines()]
    real = {row["step"]: row["real_accept_length"] for row in rows if "real_accept_length" in row}
    draft = load_draft(run / "ckpt")
    init = draft.meta["init"]
    assert list(real) == [0, 6, 12] and init["accept_length_before"] == real[0]
    assert init["accept_length_after"] == max(real.values()) and init["by"].startswith("engine")
    assert "before training: real accept_length" in said and f"{real[0]:.2f} before training" in said
    assert (init["name"], init["revision"]) == (str(head), None)
    carried = len({*ids} & {*tiny_draft.token_map.ids.tolist()})
    told = f"{carried} of its 160 output rows are carried over, and the other {len(ids) - carried} of {len(ids)}"
    assert told in said
    weights = load_tensors(run / "ckpt" / "model.safetensors")
    shutil.rmtree(run / "ckpt")
    shutil.rmtree(run / "train" / "state-000012")
    assert "resumed from" in _launch(run, *settings)
    assert load_draft(run / "ckpt").meta["init"] == init
    again = load_tensors(run / "ckpt" / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in weights.items())

    other = build_draft(build_target(), seed=5)
    save_draft(head, other.head.state_dict(), other.head.config, other.token_map, {})
    done = subprocess.run(_line(run, *settings), cwd=REPOSITORY, env=_environment(), capture_output=True, text=True)
    assert done.returncode != 0 and "was written with other settings or data" in done.stderr
