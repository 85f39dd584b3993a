"""What other projects would print, counted by hand from one event log."""

import pytest

from toolkit.bench.answers import LoggedAnswer, Question
from toolkit.bench.definitions import OTHERS, RATE, other_definitions
from toolkit.bench.prompts import Prompt
from toolkit.infer.request.acceptance import summarise
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import VerifyEvent


def step(offered, accepted, committed):
    return VerifyEvent(offered, offered, accepted, committed, committed < accepted + 1, 0.1, 0.4, 0.02, 1)


def answer(*events):
    question = Question(Prompt("1", "math", ("x",)), 0, (5,), SamplingParams())
    return LoggedAnswer(question, (7,) * (1 + sum(event.committed for event in events)), events)


def test_each_definition_of_one_log():
    """Two answers: steps of 3 and 1 tokens, a plain one, and one of 4 tokens that max_tokens cut to 2; then one step of
    2 tokens. A definition that forgot the prefill's token, the cut, or the plain step gives another number."""
    log = [answer(step(3, 2, 3), step(3, 0, 1), step(0, 0, 1), step(3, 3, 2)), answer(step(3, 1, 2))]
    steps = 5
    assert other_definitions(log) == {
        "sglang_server": (3 + 1 + 1 + 4 + 2) / steps,
        "sglang_requests": (1 + 3 + 1 + 1 + 2 + 1 + 2) / steps,
        "vllm": 1 + (2 + 0 + 3 + 1) / 4,
        RATE: 6 / 12,
        "eagle": (3 + 1 + 1 + 4 + 2) / ((4 - 1) + (1 - 1)),
    }
    assert summarise(event for one in log for event in one.events).accept_length == pytest.approx(1 + 3 / 3)
    assert list(other_definitions(log)) == list(OTHERS)


def test_no_steps_give_no_number():
    """JSON has no nan, and vLLM's 1 + 0 / 0 must not read as a measured 1."""
    assert set(other_definitions([answer()]).values()) == {None}
    assert other_definitions([answer(step(0, 0, 1))])["vllm"] is None
