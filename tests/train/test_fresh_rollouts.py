"""Rollouts written in the middle of a training with the head in training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from toolkit.data.chat_template import ChatTemplateError
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.params import SamplingParams
from toolkit.recipe import load_recipe
from toolkit.train import engine_client, evaluation
from toolkit.train.engine_client import FreshRollouts
from toolkit.train.evaluation import Measurement
from toolkit.train.step import TrainedHead
from toolkit.train.training_data import HeldOutPrompt
from toolkit.weights import read_json

STEP = 6
SETTINGS = ("train.on_policy.every=3", "train.on_policy.prompts=7", "train.on_policy.temperatures=[0.0, 0.8]")


@pytest.fixture
def processes(tiny_chat_run, tiny_target, tiny_draft, tmp_path):
    """FreshRollouts of so many processes in one folder; they take turns, so a barrier has nothing to wait for."""

    def make(count: int, name: str) -> list[FreshRollouts]:
        recipe = load_recipe(tiny_chat_run / "recipe.yaml", SETTINGS)
        rollouts = tiny_chat_run / "rollouts" / "rollouts.jsonl"
        return [
            FreshRollouts(
                recipe, tiny_target, tiny_draft.token_map, tiny_draft.head.config, rollouts, tmp_path / name, one
            )
            for one in (
                SimpleNamespace(
                    process_index=rank,
                    num_processes=count,
                    is_main_process=rank == 0,
                    wait_for_everyone=lambda: None,
                    get_state_dict=lambda module, rank=rank: module.state_dict() if rank == 0 else None,
                )
                for rank in range(count)
            )
        ]

    return make


@pytest.fixture
def model(tiny_draft) -> TrainedHead:
    return TrainedHead(tiny_draft.head, 0.8)


def _rows(path: Path) -> list[dict]:
    """Without how far the drafts reached: that may depend on the clock (the engine drafts where that is faster). Every
    verify step commits the drafts it accepts and a token of its own; the first token of an answer is the prefill's."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        drafting, tokens = row.pop("drafting"), sum(end - start for start, end in row["response_spans"])
        assert drafting["verify_steps"] + drafting["accepted"] < tokens
        assert 0 <= drafting["accepted"] <= 3 * drafting["verify_steps"], "drafts are chains of 3"
    return rows


def test_rows_are_the_target_s_own(processes, model, tiny_target):
    """Each row is what the target alone writes at the row's temperature and seed, and says where it came from; training
    and held-out prompts stay apart; written once, it is only read again."""
    (fresh,) = processes(1, "one")
    stats = fresh.write(STEP, model)
    rows = _rows(fresh.path(STEP))
    chosen, temperatures = fresh.prompts(STEP)
    assert list(temperatures.values()) == [0.8, 0.0] * 3 + [0.8], "7 were asked before: the turn goes on"
    assert {row["id"] for row in rows} == {one.id for one in chosen} and len(rows) == 7
    assert sorted(row["provenance"]["temperature"] for row in rows) == [0.0] * 3 + [0.8] * 4
    engine = Engine(tiny_target)
    for row in rows:
        provenance = row["provenance"]
        assert provenance["temperature"] == temperatures[row["id"]] and row["split"] == "train"
        assert provenance["step"] == STEP and provenance["draft"] == "tiny, step 6"
        seed = engine_client.derived_seed(provenance["seed"], "rollout", row["id"], 1)
        params = SamplingParams(temperature=provenance["temperature"], max_tokens=16, seed=seed)
        ((start, end),) = row["response_spans"]
        assert engine.generate([row["input_ids"][:start]], params)[0].output_ids == row["input_ids"][start:end]
    engine.close()
    tokens = sum(end - start for row in rows for start, end in row["response_spans"])
    assert [stats[name] for name in ("rollouts", "skipped", "tokens")] == [7, 0, tokens] and stats["tokens_per_s"] > 0
    assert {path.name for path in fresh.folder.iterdir()} == {"000006.jsonl", "000006_stats.json"}
    before = fresh.path(STEP).stat().st_mtime_ns
    assert fresh.write(STEP, None) == stats and fresh.path(STEP).stat().st_mtime_ns == before
    other = fresh.prompts(STEP - 3)[0]
    assert not {one.id for one in other} & {one.id for one in chosen}, "no prompt twice before all once"


def test_the_setting_for_the_same_bits(processes, model, tiny_target, monkeypatch):
    """`rollouts.deterministic` must hold for the rollouts that training writes, and for what it measures."""
    found: list[bool] = []
    (fresh,) = processes(1, "one")
    for module in (engine_client, evaluation):
        monkeypatch.setattr(module, "with_engine", lambda use, config, *_: found.append(config.deterministic))
    for wanted in (True, False):
        fresh.recipe = replace(fresh.recipe, rollouts=replace(fresh.recipe.rollouts, deterministic=wanted))
        fresh._write_shares(STEP, fresh._share_head(STEP, model))
        prompts = [HeldOutPrompt(str(one), [1, 2]) for one in range(2)]
        Measurement(tiny_target, prompts, fresh.recipe.train, 0, deterministic=wanted).by_engine(None)
    assert found == [True, True, False, False]


@pytest.mark.parametrize("count", [2, 3])
def test_shares_make_the_same_file(processes, model, count):
    """Several processes: each answers its share with the main one's head, and together they write what one would."""
    (alone,) = processes(1, "one")
    alone.write(STEP, model)
    group = processes(count, "many")
    drafts = [one._share_head(STEP, model) for one in group]
    for draft in drafts:
        assert all(torch.equal(mine, theirs) for mine, theirs in _pairs(draft.head, model.head))
    for one, draft in zip(group, drafts, strict=True):
        one._write_shares(STEP, draft)
    group[0]._gather_shares(STEP)
    assert _rows(group[0].path(STEP)) == _rows(alone.path(STEP))
    stats = read_json(group[0].folder / "000006_stats.json")
    assert stats["rollouts"] == 7 and stats["tokens_per_s"] > 0
    assert len(list(group[0].folder.iterdir())) == 2


def _pairs(first: torch.nn.Module, second: torch.nn.Module):
    return zip(first.state_dict().values(), second.state_dict().values(), strict=True)


@pytest.mark.parametrize("written", [0, 1, 4])
def test_killed_while_it_writes(processes, model, monkeypatch, written):
    """What was written stays as it is and is not written again; the file in the end is that of a run never killed."""
    (whole,) = processes(1, "whole")
    whole.write(STEP, model)
    (fresh,) = processes(1, "killed")
    real, asked = engine_client.engine_generate, []

    def dying(engine, draft_used):
        generate = real(engine, draft_used)

        def some(requests):
            for done, result in enumerate(generate(requests)):
                if done == written:
                    raise KeyboardInterrupt
                yield result

        return some

    def counting(engine, draft_used):
        generate = real(engine, draft_used)
        return lambda requests: (asked.extend(requests), generate(requests))[1]

    monkeypatch.setattr(engine_client, "engine_generate", dying)
    with pytest.raises(KeyboardInterrupt):
        fresh.write(STEP, model)
    kept = _rows(fresh.folder / "000006.0.jsonl")
    assert len(kept) == written and not fresh.path(STEP).exists()
    monkeypatch.setattr(engine_client, "engine_generate", counting)
    stats = fresh.write(STEP, model)
    assert len(asked) == 7 - written
    assert _rows(fresh.path(STEP)) == _rows(whole.path(STEP)) and stats["rollouts"] == 7


def test_a_target_without_a_chat_template(processes, tiny_target, monkeypatch):
    """Before training begins, not after its first hours."""
    monkeypatch.setattr(tiny_target.tokenizer, "chat_template", None)
    with pytest.raises(ChatTemplateError, match="no usable chat template; choose one by chat_template"):
        processes(1, "none")
