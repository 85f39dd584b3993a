"""Rows and queue: who is admitted when, and which rows move when requests end."""

from __future__ import annotations

import pytest

from toolkit.infer.request import Request
from toolkit.infer.sampling.sampling_params import SamplingParams
from toolkit.infer.scheduler import Scheduler


def request(name: str, tokens: int = 3) -> Request:
    return Request(name, [1] * tokens, SamplingParams())


def names(requests) -> str:
    return "".join(one.id for one in requests)


def scheduler(waiting: str, running: str, max_batch: int) -> Scheduler:
    made = Scheduler(max_batch)
    made.waiting.extend(request(name) for name in waiting)
    made.running.extend(request(name) for name in running)
    return made


def test_first_come_first_served_up_to_the_rows():
    """Order of arrival decides; the rest waits."""
    made = scheduler("cdef", "ab", 4)
    assert [names(group) for group in made.groups()] == ["cd"]
    assert names(made.running) == "abcd" and names(made.waiting) == "ef"


def test_a_queue_deeper_than_the_free_rows_waits_for_an_eighth():
    """One prompt a step would read the weights once more per request; a lone request is still admitted at once."""
    assert list(scheduler("xyz", "a" * 15, 16).groups()) == []
    assert [names(group) for group in scheduler("xyz", "a" * 14, 16).groups()] == ["xy"]
    assert [names(group) for group in scheduler("x", "a" * 15, 16).groups()] == ["x"]
    assert [names(group) for group in scheduler("xyz", "a" * 3, 4).groups()] == ["x"]


def test_groups_respect_the_prompt_budget(monkeypatch):
    """Padded size counts: 2 prompts of 6 are 12 tokens; a prompt above the budget goes alone."""
    monkeypatch.setattr("toolkit.infer.scheduler.PROMPT_TOKENS", 12)
    made = Scheduler(8)
    made.waiting.extend([request("a", 6), request("b", 2), request("c", 2), request("d", 50), request("e", 1)])
    assert [names(group) for group in made.groups()] == ["ab", "c", "d", "e"]


@pytest.mark.parametrize(("ended", "rows", "moves"), [("b", "adc", [(1, 3)]), ("d", "abc", []), ("abcd", "", [])])
def test_the_last_row_fills_a_hole(ended, rows, moves):
    """A wrong move would hand one request another's cache."""
    made = scheduler("", "abcd", 4)
    for one in made.running:
        if one.id in ended:
            one.finish_reason = "stop"
    assert list(made.retire()) == moves and names(made.running) == rows


def test_several_holes_are_filled_by_rows_that_go_on():
    """A row that ended itself must never move into a hole."""
    made = scheduler("", "abcdef", 6)
    for one in made.running:
        if one.id in "acf":
            one.finish_reason = "stop"
    assert list(made.retire()) == [(2, 4), (0, 3)] and names(made.running) == "dbe"
