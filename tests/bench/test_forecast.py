"""The forecast of every shape is what the engine accepts with it, step by step."""

from __future__ import annotations

import json
from contextlib import closing

import numpy as np
import pytest

from tests.infer.conftest import build_small_dspark, build_small_target
from tests.train.conftest import answered, fit
from toolkit.bench.forecast import (
    NEVER,
    ForecastAnswer,
    forecast_surface,
    largest_shape,
    recorded,
    replay_answers,
    rollout_answers,
)
from toolkit.bench.prompts import Prompt
from toolkit.bench.side_by_side import Sampling, Trial
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import plan_head, start_head, trained_head
from toolkit.train.target_side import TargetSide
from toolkit.train_settings import HeadSettings, TrainSettings, UnrollSettings

PROMPTS = [
    Prompt("1", "writing", ("write short stories about rivers",)),
    Prompt("2", "math", ("count seven apples", "and numbers")),
    Prompt("3", "math", ("the weather in spring",)),
]
STEPS, TOKENS = 3, 20
SHAPES = {1: largest_shape(1, 5, 99), 2: largest_shape(2, 4, 12), 3: largest_shape(3, 3, 20)}


@pytest.fixture(scope="module")
def trained(tiny_target):
    """An MTP head that has learned the target's answers, so that deep drafts are accepted."""
    config = EngineConfig(max_running_requests=4)
    texts = forecast_surface(Trial(tiny_target, None, PROMPTS, Sampling(TOKENS, 0.0, 3), config), ()).references
    batch = answered([list(one.question.prompt_ids) for one in texts], [list(one.output_ids) for one in texts])
    settings = TrainSettings(head=HeadSettings(kind="mtp", init="target"), unroll=UnrollSettings(ttt_steps=STEPS))
    plan = plan_head(settings, tiny_target, TokenMap.identity(tiny_target.vocab_size))
    side = TargetSide(tiny_target, plan.token_map, plan.aux_layer_ids, "fp32")
    model = trained_head(plan, settings, start_head(plan, settings, tiny_target, 0, ()), side.teacher)
    fit(model, side, batch, STEPS, updates=25)
    side.capture.remove()
    return DraftCheckpoint(head=model.head.eval().requires_grad_(False), token_map=plan.token_map)


def accepted_by_engine(target, draft, surface, shape: DraftShape) -> list[list[int]]:
    engine = Engine(target, draft, shape)
    requests = [engine.generate([list(one.question.prompt_ids)], one.question.params)[0] for one in surface.references]
    engine.close()
    assert [tuple(one.output_ids) for one in requests] == [one.output_ids for one in surface.references]
    return [[event.accepted for event in one.events if not event.truncated] for one in requests]


@pytest.mark.parametrize(
    ("head", "temperature", "batch"), [pytest.param("eagle3", 0.0, 3, marks=pytest.mark.slow), ("mtp", 0.03, 2)]
)
def test_every_shape_is_forecast_as_the_engine_accepts_it(head, temperature, batch, trained, tiny_target, tiny_draft):
    """Chains and trees, several turns, greedy and with seeds. Fails if a level, a rank or a jump is off by one."""
    target, draft = tiny_target, trained if head == "mtp" else tiny_draft
    config = EngineConfig(max_running_requests=batch)
    sampling = Sampling(max_tokens=TOKENS, temperature=temperature, seed=3)
    surface = forecast_surface(Trial(target, draft, PROMPTS, sampling, config), SHAPES.values())
    assert len(surface.references) == 4
    shapes = surface.shapes()
    assert len(shapes) >= 20 or head == "mtp"
    lengths = set()
    for shape in shapes[::6]:
        forecast = [answer.accepted(shape) for answer in surface.answers[shape.top_k]]
        assert forecast == accepted_by_engine(target, draft, surface, shape), shape
        of_shape = surface.forecast(shape)
        assert of_shape.verify_steps == sum(map(len, forecast))
        lengths.add(of_shape.accept_length)
    if head == "mtp":
        assert max(lengths) > 1.2 and len(lengths) > 2, "the head agrees often, so that shapes differ"


def test_trees_of_a_block_are_forecast_as_the_engine_accepts_them():
    """Smaller budgets and fewer levels by the best-first tree of the largest."""
    target = build_small_target()
    draft, prompt, params = build_small_dspark(target), [5, 9, 3], SamplingParams(max_tokens=60, ignore_eos=True)

    def written(shape: DraftShape):
        with closing(Engine(target, draft, shape)) as engine:
            return engine.generate([prompt], params)[0]

    largest = DraftShape(5, 4, 40)
    answer = written(largest).output_ids
    with closing(Engine(target, draft, largest)) as engine:
        forecast = ForecastAnswer("1", tuple(answer), recorded(engine, [prompt], [answer])[0])
    for shape in (largest, DraftShape(5, 4, 12), DraftShape(3, 4, 30), DraftShape(2, 4, 6)):
        events = [event.accepted for event in written(shape).events if not event.truncated]
        assert forecast.accepted(shape) == events and max(events) > 0


def test_the_answers_are_forced(trained, tiny_target):
    """Answers that the target would not write: what is drafted depends on the text before a token, and on nothing else.

    Rows of three lengths end one after the other, so rows move. Fails if a token that the target chose gets in."""
    trial = Trial(tiny_target, None, PROMPTS, Sampling(TOKENS, 0.0, 3), EngineConfig())
    texts = forecast_surface(trial, ()).references
    prompts = [list(one.question.prompt_ids) for one in texts]
    answers = [list(one.output_ids[:end]) for one, end in zip(texts, (12, 20, 7, 16), strict=True)]
    for answer in answers:
        answer[3::5] = [20 + 7 * token % 300 for token in answer[3::5]]

    def needed(prompts, answers):
        engine = Engine(tiny_target, trained, SHAPES[2], max_running_requests=3)
        found = recorded(engine, prompts, answers)
        engine.close()
        return found

    found = needed(prompts, answers)
    together = np.concatenate(found)
    assert len(together) == 11 + 19 + 6 + 15 and 10 < (together[:, 0] < NEVER).any(axis=1).sum() < len(together)
    cut = [
        (prompt + answer[:at], answer[at:])
        for prompt, answer in zip(prompts, answers, strict=True)
        for at in range(0, len(answer) - 1, 2)
    ]
    fresh = needed([prompt for prompt, _ in cut], [answer for _, answer in cut])
    assert np.array_equal(np.concatenate([one[::2] for one in found]), np.stack([one[0] for one in fresh]))


def test_rollouts_give_the_surface_of_their_answers(trained, tiny_target, tmp_path):
    """Rows with an earlier answer too: only the last one is replayed, after all that comes before it."""
    sampling, largest = Sampling(TOKENS, 0.0, 3), [SHAPES[2]]
    trial = Trial(tiny_target, trained, PROMPTS, sampling, EngineConfig(max_running_requests=2))
    surface = forecast_surface(trial, largest)
    with (tmp_path / "rollouts.jsonl").open("w") as file:
        for at, one in enumerate(surface.references):
            prompt, answer = one.question.prompt_ids, one.output_ids
            row = {
                "id": one.question.prompt.question_id if at < 3 else "again",
                "messages": [{"role": "user", "content": "words"}],
                "input_ids": [*prompt, *answer],
                "response_spans": [[1, 3], [len(prompt), len(prompt) + len(answer)]],
                "provenance": {"target": tiny_target.name, "temperature": 0.0},
            }
            file.write(json.dumps(row) + "\n")
    references, temperature = rollout_answers(tmp_path / "rollouts.jsonl", tiny_target)
    replayed = replay_answers(trial, references, largest)
    assert temperature == 0 and [one.output_ids for one in references] == [one.output_ids for one in surface.references]
    found, wanted = (
        [[answer.accepted(shape) for answer in one.answers[2]] for shape in one.shapes()] for one in (replayed, surface)
    )
    assert found == wanted and max(map(max, wanted[-1])) > 0
