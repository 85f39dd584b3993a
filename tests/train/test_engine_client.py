"""The engine in a training: `generate`, the memory it frees, and fresh rollouts with the head in training."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from toolkit.data.chat_template import ChatTemplateError
from toolkit.data.conversations import Conversation
from toolkit.data.generation import GenerationRequest
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.load_engine import LoadedEngine, build_engine
from toolkit.infer.request.params import SamplingParams
from toolkit.jsonl import DataError
from toolkit.recipe import load_recipe
from toolkit.targets.target import Target
from toolkit.train import engine_client
from toolkit.train.engine_client import FreshRollouts, engine_generate, read_pool, take_prompts
from toolkit.train.step import TrainedHead
from toolkit.weights import read_json


def requests_for(target: Target, lengths: list[int]) -> list[GenerationRequest]:
    ids = target.tokenizer("the quick brown fox jumps over the lazy dog")["input_ids"]
    return [GenerationRequest(ids[: 3 + i % 4], 1.0, 0.9, length, seed=i) for i, length in enumerate(lengths)]


@pytest.fixture
def engine(tiny_target: Target):
    engine = Engine(tiny_target, max_running_requests=3)
    yield engine
    engine.close()


def test_answers_equal_the_engines_own(engine: Engine, tiny_target: Target) -> None:
    """A request mixed up with its neighbour, or a seed that is lost, would corrupt every rollout in silence."""
    requests = requests_for(tiny_target, [5, 1, 9, 2, 7, 4, 3])
    results = dict(engine_generate(engine, draft_used="d")(requests))
    assert sorted(results) == list(range(7)) and not engine.has_work()
    for index, wanted in enumerate(requests):
        params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=wanted.max_tokens, seed=wanted.seed)
        alone = engine.generate([wanted.prompt_ids], params)[0]
        assert results[index].output_ids == alone.output_ids
        assert (results[index].finish_reason, results[index].draft_used) == (alone.finish_reason, "d")


def test_short_answers_come_before_long_ones_end(engine: Engine, tiny_target: Target) -> None:
    """Were results held back to the end of the batch, a kill would lose all of them."""
    order = [index for index, _ in engine_generate(engine)(requests_for(tiny_target, [40, 1, 1, 1, 1]))]
    assert order[0] != 0 and sorted(order) == list(range(5))


def test_leaving_early_frees_the_engine(engine: Engine, tiny_target: Target) -> None:
    """After Ctrl-C or an error in the caller, the engine must not go on with abandoned requests."""
    answers = iter(engine_generate(engine)(requests_for(tiny_target, [1, 60, 60, 60, 60])))
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert not engine.has_work()


def test_memory_goes_back_to_the_device(tiny_target, tiny_draft, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, memory that torch caches, or an engine that is still referenced, leaves too little for the next step.
    So the cache is emptied before the engine is built and again after it is freed."""
    alive: list[weakref.ref] = []
    emptied: list[list[bool]] = []

    def build(*arguments, **options) -> LoadedEngine:
        loaded = build_engine(*arguments, **options)
        alive.append(weakref.ref(loaded.engine))
        return loaded

    monkeypatch.setattr(engine_client, "build_engine", build)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append([one() is not None for one in alive]))

    def use(engine: Engine) -> list[int]:
        (request,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4))
        return list(request.output_ids)

    gc.disable()
    try:
        config = EngineConfig(max_running_requests=1, context_length=64)
        written = engine_client.with_engine(use, config, tiny_target, tiny_draft)
        assert len(written) == 4 and emptied == [[], [False]]
    finally:
        gc.enable()


POOL = [Conversation(name, ({"role": "user", "content": name},)) for name in "abcdefg"]


@pytest.mark.parametrize("count", [3, 10])
def test_none_twice_before_all_once(count):
    """Taken in portions of any size, also ones that reach over a pass or hold several: each pass has each prompt once,
    in an order of its own, and no id repeats (rows of one file are told apart by it, and draws seeded)."""
    taken = [one for start in range(0, 28, count) for one in take_prompts(POOL, 5, start, count)][:28]
    assert taken == take_prompts(POOL, 5, 0, 28)
    passes = [[one.messages[0]["content"] for one in taken[at : at + 7]] for at in range(0, 28, 7)]
    assert all(sorted(names) == list("abcdefg") for names in passes) and len(set(map(tuple, passes))) > 1
    assert len({one.id for one in taken}) == 28
    assert take_prompts(POOL, 6, 0, 7) != taken[:7]


def test_the_pool_is_the_training_split(tmp_path):
    """A held-out prompt in it would be trained on, and every measurement too good. Answers are not asked again."""
    path = tmp_path / "rollouts.jsonl"

    def row(name, split):
        said = [{"role": "user", "content": f"ask {name}"}, {"role": "assistant", "content": "yes"}]
        return {"id": name, "split": split, "messages": said}

    rows = [row("b", "train"), row("a", "held_out"), row("c", "train"), row("aa", "train")]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    pool = read_pool(path)
    assert [(one.id, [message["content"] for message in one.messages]) for one in pool] == [
        ("aa", ["ask aa"]),
        ("b", ["ask b"]),
        ("c", ["ask c"]),
    ]
    path.write_text(json.dumps({"id": "x", "split": "train", "messages": []}) + "\n")
    with pytest.raises(DataError, match="rollouts.jsonl:1: the rollout has no messages"):
        read_pool(path)


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


def test_shares_make_the_same_file(processes, model):
    """Several processes: each answers its share with the main one's head, and together they write what one would."""
    (alone,) = processes(1, "one")
    alone.write(STEP, model)
    group = processes(3, "many")
    drafts = [one._share_head(STEP, model) for one in group]
    for draft in drafts:
        assert all(torch.equal(mine, theirs) for mine, theirs in _pairs(draft.head, model.head))
    killed = processes(2, "many")[1]
    killed._write_shares(STEP, drafts[0])  # of a run with two processes, whose shares are other ones
    for one, draft in zip(group, drafts, strict=True):
        one._write_shares(STEP, draft)
    group[0]._gather_shares(STEP)
    assert _rows(group[0].path(STEP)) == _rows(alone.path(STEP))
    stats = read_json(group[0].folder / "000006_stats.json")
    assert stats["rollouts"] == 7 and stats["tokens_per_s"] > 0
    assert len(list(group[0].folder.iterdir())) == 2


def _pairs(first: torch.nn.Module, second: torch.nn.Module):
    return zip(first.state_dict().values(), second.state_dict().values(), strict=True)


def test_a_target_without_a_chat_template(processes, tiny_target, monkeypatch):
    """Before training begins, not after its first hours."""
    monkeypatch.setattr(tiny_target.tokenizer, "chat_template", None)
    with pytest.raises(ChatTemplateError, match="no usable chat template; choose one by chat_template"):
        processes(1, "none")
