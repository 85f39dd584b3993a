"""Engines that are open side by side have caches for what is measured, not for all that the target could read."""

from __future__ import annotations

from toolkit.bench.prompts import Prompt
from toolkit.bench.side_by_side import Mode, Sampling, Trial, longest_prompt, run_side_by_side, with_context
from toolkit.bench.step_times import LEAST_ANSWER, measure_step_times
from toolkit.infer.cache.cache_manager import ROOM
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape

TALK = Prompt("1", "count", ("count apples and pears", "numbers and rivers", "spring"), "be short")


def test_a_given_context_stays():
    assert with_context(EngineConfig(), 30, 12).context_length == 42
    assert with_context(EngineConfig(context_length=9), 30, 12).context_length == 9


def test_a_conversation_fits(tiny_target):
    """Its last prompt has all earlier answers, in which a random model writes bytes that are read as other tokens."""
    with_room = longest_prompt(tiny_target, [TALK], 20)
    engine = Engine(tiny_target, context_length=with_room + 20)
    rounds = run_side_by_side([Mode(engine, None)], tiny_target.tokenizer, [TALK], Sampling(20, 1.5, 0))
    engine.close()
    asked = [len(answer.question.prompt_ids) for one in rounds for answer in one.answers]
    assert len(asked) == 3 and max(asked) <= with_room
    alone = Prompt("2", "count", TALK.turns[:1], TALK.system)
    assert longest_prompt(tiny_target, [alone], 20) == asked[0], "of a single turn exactly"


def test_engines_of_step_times_hold_their_prompts(tiny_target, tiny_draft, monkeypatch):
    """Prompts are read whole, and no engine's cache is larger than two rows of them need."""
    seen, add = [], Engine.add_request

    def noted(self, ids, params, **options):
        seen.append((len(ids), self.context_length, self._memory.pool.capacity * self._memory.pool.page_size))
        return add(self, ids, params, **options)

    monkeypatch.setattr(Engine, "add_request", noted)
    prompts = [list(range(5, 105)), list(range(5, 15))]
    trial = Trial(tiny_target, tiny_draft, (), Sampling(8, 0.0, 0), EngineConfig(max_running_requests=2))
    measure_step_times(trial, [DraftShape.chain(2)], prompts, lambda times: [])
    context = 100 + LEAST_ANSWER
    assert {length for length, _, _ in seen} == {100, 10}
    assert {held for _, held, _ in seen} == {context} and max(cache for _, _, cache in seen) <= 2 * (context + ROOM)
