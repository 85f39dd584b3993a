"""Rows and queue: who is admitted when, which rows move when requests end, who steps back when pages run out."""

from __future__ import annotations

import itertools

import pytest

from toolkit.infer.cache.cache_manager import KVMemory
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.engine.scheduler import Scheduler
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request

ARRIVALS = itertools.count()


def request(name: str, tokens: int = 3, priority: int = 0) -> Request:
    made = Request([1] * tokens, SamplingParams(), arrival=next(ARRIVALS), token_limit=99, priority=priority)
    made.name = name
    return made


def names(requests) -> str:
    return "".join(one.name for one in requests)


def empty(max_batch: int, chunk: int = 64, capacity: int | None = None, together: bool = True) -> Scheduler:
    pool = PagePool(max_batch, 64, capacity, page_size=4)
    memory = KVMemory(pool, context_length=20, lookahead=0, slack=1, reuse=False)
    return Scheduler(max_batch, chunk, memory, together=together)


def scheduler(waiting: str, running: str, max_batch: int) -> Scheduler:
    made = empty(max_batch)
    made.waiting.extend(request(name) for name in running)
    while made.waiting:
        run_all(made, made.next_group(64))
    made.waiting.extend(request(name) for name in waiting)
    return made


def run_all(made: Scheduler, requests) -> None:
    """As if their prompts were read and their first tokens sampled."""
    for one in requests:
        one.n_read, one.ready = len(one.prompt_ids), True
        one.append_run([5], 0)


def test_first_come_first_served_up_to_the_rows():
    """Order of arrival decides; the rest waits."""
    made = scheduler("cdef", "ab", 4)
    assert names(made.next_group(64)) == "cd" and made.next_group(64) == []
    assert names(made.running) == "abcd" and names(made.waiting) == "ef"


@pytest.mark.parametrize(
    ("waiting", "running", "rows", "group"), [("xyz", 15, 16, ""), ("xyz", 14, 16, "xy"), ("x", 15, 16, "x")]
)
def test_a_queue_deeper_than_the_free_rows_waits_for_an_eighth(waiting, running, rows, group):
    """One prompt a step would read the weights once more per request; a lone request is still admitted at once."""
    assert names(scheduler(waiting, "a" * running, rows).next_group(64)) == group


def test_groups_respect_the_budget_and_a_long_prompt_goes_alone():
    """Prompts of 6 and 2 are 8 tokens, without padding; one above the budget is read in chunks, others wait for it."""
    made = empty(8)
    made.waiting.extend([request("a", 6), request("b", 2), request("c", 2), request("d", 50), request("e", 1)])
    assert [names(made.next_group(9)) for _ in range(3)] == ["ab", "c", ""]
    assert made.reading is not None and made.reading.name == "d" and names(made.waiting) == "e"
    assert made.next_group(9) == []
    assert names([made.reading_is_complete()]) == "d" and names(made.running) == "abcd"
    assert names(made.next_group(9)) == "e"


def test_states_of_linear_attention_are_read_one_prompt_at_a_time():
    """The states of two prompts in one forward would run into each other."""
    made = empty(8, together=False)
    made.waiting.extend(request(name) for name in "abc")
    assert [names(made.next_group(64)) for _ in range(3)] == ["a", "b", "c"]


@pytest.mark.parametrize(("ended", "rows", "moves"), [("b", "adc", [(1, 3)]), ("d", "abc", []), ("abcd", "", [])])
def test_the_last_row_fills_a_hole(ended, rows, moves):
    """A wrong move would hand one request another's cache."""
    made, kept = scheduler("", "abcd", 4), []
    for one in made.running:
        if one.name in ended:
            one.finish_reason = "stop"
    assert made.retire(lambda row, one: kept.append((row, one.name))) == moves and names(made.running) == rows
    assert kept == [(row, name) for row, name in enumerate("abcd") if name in ended]
    made.check_integrity()


def test_the_youngest_steps_back_when_pages_run_out():
    """Pages of 4, 6 in all: three requests of 4 tokens and a step take them, and at 9 tokens two of them do."""
    made = empty(4, capacity=6)
    made.waiting.extend(request(name) for name in "abcd")
    run_all(made, made.next_group(64))
    assert names(made.running) == "abc"  # a page more for everyone who runs is left over
    assert made.make_room() == [] and made.memory.pool.free == 0 and made.next_group(64) == []
    for one in made.running:
        one.append_run([5] * 5, 0)
    assert made.make_room() == []
    assert names(made.running) == "ab" and names(made.waiting) == "cd" and made.waiting[0].preemptions == 1
    assert not made.waiting[0].ready
    assert all(len(table) == 3 for table in made.memory.pool.tables[:2])
    made.memory.check_integrity()


def test_a_prompt_being_read_steps_back_first():
    """It is the youngest, and has written nothing yet."""
    made = empty(3, capacity=14)
    made.waiting.extend([request("a"), request("r", 40)])
    run_all(made, made.next_group(12))
    assert made.next_group(12) == [] and made.reading is not None
    made.running[0].append_run([5] * 12, 0)
    assert made.make_room() == [] and made.reading is None
    assert names(made.waiting) == "r" and names(made.running) == "a"
    made.memory.check_integrity()


def test_a_lower_priority_number_goes_first():
    """Among equals the order of arrival stays; a request that runs is not sent away for one that waits."""
    made = empty(3)
    for name, priority in (("a", 5), ("b", 0), ("c", -1), ("d", 0)):
        made.enqueue(request(name, priority=priority))
    assert names(made.waiting) == "cbda"
    run_all(made, made.next_group(64))
    assert names(made.running) == "cbd"
    made.enqueue(request("e", priority=-9))
    assert made.next_group(64) == [] and names(made.waiting) == "ea"
    made.check_integrity()


def test_an_urgent_prompt_being_read_stays():
    """The less urgent one that runs steps back, and the prompt moves into its row with the pages it has."""
    made = empty(3, capacity=14)
    made.enqueue(request("a"))
    run_all(made, made.next_group(12))
    made.enqueue(request("r", 40, priority=-1))
    assert made.next_group(12) == [] and made.reading is not None
    held = len(made.memory.pool.tables[1])
    made.running[0].append_run([5] * 12, 0)
    assert made.make_room() == [] and names(made.waiting) == "a" and made.running == []
    assert made.reading is not None and len(made.memory.pool.tables[0]) >= held and not made.memory.pool.tables[1]
    made.check_integrity()
