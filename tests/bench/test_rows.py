import types
from dataclasses import replace

import pytest
import torch

from toolkit.bench import rows as rows_module
from toolkit.bench.prompts import Prompt
from toolkit.bench.rows import by_context, tabulate
from toolkit.bench.side_by_side import LoggedAnswer, Question, Round, Sampling, Trial
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import VerifyEvent

CHAIN = DraftShape.chain(2)


def trial_of(temperature=0.0, deterministic=False):
    target, draft = types.SimpleNamespace(dtype=torch.bfloat16), types.SimpleNamespace(kind="eagle3")
    config = EngineConfig(verify="target", deterministic=deterministic)
    return Trial(target, draft, (), Sampling(8, temperature, 0), config)


def step(accepted, truncated=False, batch=1):
    return VerifyEvent(2, 2, accepted, accepted + 1 - truncated, truncated, 0.1, 0.4, 0.02, batch)


def answer(question_id, task, tokens, events=()):
    question = Question(Prompt(question_id, task, ("x",)), 0, (5,), SamplingParams())
    return LoggedAnswer(question, tuple(tokens), tuple(events))


def rounds_of(plain, speculative, plain_s=2.0, speculative_s=1.0):
    """One round of one answer each, with made-up clocks."""
    out = []
    for before, after in zip(plain, speculative, strict=True):
        out.append(Round("plain", (before,), plain_s, len(before.output_ids) - 1))
        out.append(Round(CHAIN.name, (after,), speculative_s, len(after.output_ids) - 1))
    return out


@pytest.fixture
def two_tasks():
    tokens = list(range(10, 19))
    plain = [answer("1", "math", tokens), answer("2", "coding", tokens)]
    speculative = [
        answer("1", "math", tokens, [step(2), step(0), step(2), step(1, truncated=True)]),
        answer("2", "coding", tokens, [step(1), step(1), step(1), step(1)]),
    ]
    return plain, speculative


def test_a_row_per_shape_and_task_with_the_records_keys(two_tasks):
    """The keys are those that reports and outside checks read. 7 counted steps: 2 0 2 | 1 1 1 1, so 8 accepted."""
    whole, math, coding = tabulate(rounds_of(*two_tasks), trial_of(), [CHAIN])["rows"]
    assert [row["task"] for row in (whole, math, coding)] == ["all", "math", "coding"]
    assert (whole["shape"], whole["num_steps"], whole["top_k"], whole["num_draft_tokens"]) == ("chain", 2, 1, 3)
    assert whole["verify_steps"] == 7 and whole["truncated_steps"] == 1
    assert whole["accept_length"] == pytest.approx(1 + 8 / 7)
    assert whole["accept_rate"] == pytest.approx([6 / 7, 2 / 6])
    assert whole["accept_rate_unconditional"] == pytest.approx([6 / 7, 2 / 7])
    assert 2.0 <= whole["interval"][0] <= whole["accept_length"] <= whole["interval"][1] <= 7 / 3
    assert math["interval"] == [None, None]
    assert whole["tokens_equal"] is True and whole["near_ties"] == whole["unequal"] == 0


def test_answers_that_part_are_counted_apart(two_tasks, monkeypatch):
    """Greedy: a near-tie. Sampled in 16 bits: not judged. Under `deterministic` rounding is no excuse either time."""
    monkeypatch.setattr(rows_module, "plain_logits", lambda target, ids: torch.zeros(30))
    plain, speculative = two_tasks
    others = [replace(speculative[0], output_ids=(10, 29, *range(12, 19))), speculative[1]]
    seeded = [replace(one.question, params=SamplingParams(seed=1)) for one in plain]
    runs = [[replace(one, question=asked) for one, asked in zip(some, seeded, strict=True)] for some in (plain, others)]
    counts = ("tokens_equal", "near_ties", "unequal", "not_judged")
    for temperature, deterministic, wanted in (
        (0.0, False, (True, 1, 0, 0)),
        (0.8, False, (None, 0, 0, 1)),
        (0.0, True, (False, 0, 1, 0)),
        (0.8, True, (False, 0, 1, 0)),
    ):
        found = tabulate(rounds_of(*runs), trial_of(temperature, deterministic), [CHAIN])
        assert tuple(found["rows"][0][name] for name in counts) == wanted


def test_acceptance_by_context():
    """The context of a step is the prompt and what is written before the step, plain steps and the cut one included:
    510, 513, 514 tokens. A head that is trained on short texts shows here where it decays."""
    plain_step = replace(step(0), offered=0, depth_offered=0)
    longer = answer("1", "math", range(10, 18), [step(2), plain_step, step(1), step(1, truncated=True)])
    longer = replace(longer, question=replace(longer.question, prompt_ids=(5,) * 509))
    short = answer("2", "math", range(10, 13), [step(1)])
    assert by_context([longer, short]) == [
        {"from": 0, "below": 512, "verify_steps": 2, "accept_length": 2.5, "interval": [2.0, 3.0]},
        {"from": 512, "below": 1024, "verify_steps": 1, "accept_length": 2.0, "interval": [None, None]},
    ]
