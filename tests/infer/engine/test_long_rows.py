"""Rows of thousands of tokens on pages of the real size: the tokens of Hugging Face's generate, and pages that keep
what was written. Short rows pass by whatever depends on a length or a number of pages."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from tests.infer.conftest import build_small_draft, build_small_target
from toolkit.infer.cache.page_pool import PAGE_SIZE
from toolkit.infer.drafters.lookup import NgramLookup
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams

MOST = 100  # tokens of an answer
LONG = 1024  # tokens of a row
SHAPES = {"chain": "4,1,5", "oracle": "4,3,13"}


@pytest.fixture(scope="module")
def long_target():
    """It hardly ever ends an answer: the logit of its stop id is always 0."""
    target = build_small_target(max_context=8192)
    with torch.no_grad():
        target.lm_head.weight[0] = 0
    return target


class PageSums:
    """A sum for each whole page of the rows, in the target's caches and the head's. Pages of one text have
    one sum, in whatever row they are, and it stays: `check` raises AssertionError otherwise."""

    def __init__(self, engine: Engine) -> None:
        self._engine, head = engine, engine._rounds._context.head
        caches = [engine._cache, *(() if head is None else head.reader.caches)]
        self._stores = [store for cache in caches for store in (*cache.keys, *cache.values)]
        generator = torch.Generator().manual_seed(1)
        self._weights = torch.randn(PAGE_SIZE * self._stores[0][0].numel(), generator=generator)
        self._numbers: dict[tuple[int, ...], int] = {}  # a page's number, by the number before it and its tokens
        self._sums: list[Tensor] = []  # by number: of every store

    def check(self) -> None:
        reading = self._engine.scheduler.reading
        for row, request in enumerate([*self._engine._running, *([] if reading is None else [reading])]):
            text = request.prompt_ids + request.output_ids
            read = self._engine.drafter.positions_read(row, request) if request.ready else request.n_read
            whole = min(len(text) - 1, read) // PAGE_SIZE
            found, numbers = self._of_pages(self._engine._cache.pool.tables[row][:whole]), [-1]
            for page, sums in enumerate(found):  # the head's entries depend on the next token too
                key = (numbers[-1], *text[page * PAGE_SIZE : (page + 1) * PAGE_SIZE + 1])
                numbers.append(self._numbers.setdefault(key, len(self._sums)))
                self._sums += [sums] if numbers[-1] == len(self._sums) else []
            if whole:
                wanted = torch.stack([self._sums[number] for number in numbers[1:]])
                wrong = (~torch.isclose(found, wanted, rtol=1e-3, atol=1e-2)).any(dim=1).nonzero().flatten().tolist()
                assert not wrong, f"row {row}, {len(text)} tokens: pages {wrong} are not what was written"

    def _of_pages(self, pages: list[int]) -> Tensor:
        """[pages, stores]"""
        held = (store.view(-1, PAGE_SIZE, *store.shape[1:])[pages] for store in self._stores)
        return torch.stack([one.flatten(1) @ self._weights for one in held], dim=1)


def build_engine(target, kind: str) -> Engine:
    draft = NgramLookup() if kind == "oracle" else build_small_draft(target)  # the test replaces the lookup
    options = {"max_running_requests": 6, "context_length": 6144, "max_total_tokens": 14000}
    return Engine(target, draft, DraftShape.parse(SHAPES[kind]), chunked_prefill_size=512, **options)


def prompts_of(count: int, chance: random.Random) -> list[list[int]]:
    """Most are of 1,500 to 5,900 tokens and continue a common text from some place on; every third is short."""

    def text(least: int, most: int) -> list[int]:
        return [chance.randrange(1, 24) for _ in range(chance.randint(least, most))]

    stem, short, long = text(4500, 4500), (1, 400), (1, 1400)
    return [text(*short) if i % 3 == 2 else stem[: chance.randint(1500, 4500)] + text(*long) for i in range(count)]


def params_of(most: int) -> SamplingParams:
    return SamplingParams(max_tokens=most)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), [("chain", 2), ("oracle", 4)])
def test_random_traffic_of_long_rows(long_target, reference, oracle, kind, seed):
    """Arrivals, ends, aborts, preemptions, prefix hits and moves: answers are the target's own, or their beginnings."""
    chance, prompts = random.Random(seed), prompts_of(24, random.Random(7))
    answers = {tuple(prompt): reference(long_target, prompt, MOST) for prompt in prompts}
    engine = build_engine(long_target, kind)
    sums = PageSums(engine)
    if kind == "oracle":  # the head drafts little that is right
        engine.drafter = oracle(answers, 24, right=0.7, tree=True)
    seen: Counter[str] = Counter()
    requests, rows = [], {}
    left = prompts * 2
    while left or engine.has_work():
        if left and chance.random() < 0.3:
            requests.append(engine.add_request(left.pop(), params_of(chance.choice((3, 24, MOST)))))
        if chance.random() < 0.02 and engine._running:
            engine.abort(chance.choice(engine._running))
        if chance.random() < 0.02 and len(engine._running) > 1:
            with torch.inference_mode():  # pages that run out come to the same, but seldom
                engine._change_rows(engine.scheduler._preempt)
        engine.step()
        engine.check_integrity()
        sums.check()
        now = {request: row for row, request in enumerate(engine._running)}
        seen["moved"] += sum(rows.get(one, row) != row and one.length > LONG for one, row in now.items())
        rows = now
    engine.close()
    for request in requests:
        end = len(request.output_ids) if request.finish_reason == "abort" else request.params.max_tokens
        wanted = answers[tuple(request.prompt_ids)][:end]
        assert request.output_ids == wanted, f"seed {seed}, request {request.arrival}"
        seen["aborted"] += request.finish_reason == "abort"
        seen["preempted"] += request.preemptions
        seen["cached"] += request.cached_tokens > 0
        seen["accepted"] += sum(event.accepted for event in request.events)
    wanted = {"moved", "aborted", "preempted", "cached", "accepted"}
    assert wanted <= set(+seen), f"seed {seed}: {dict(seen)}"
