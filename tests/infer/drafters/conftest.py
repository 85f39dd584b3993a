"""Ragged requests with the answers of plain decoding, and choices of drafts that a test scripts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from heapq import heappop, heappush

import pytest
import torch

from tests.infer.conftest import propose
from toolkit.infer.drafters.adaptive import Plan
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape, DraftTree
from toolkit.infer.request.params import SamplingParams

LENGTHS = (5, 9, 1, 17, 3, 30, 2, 4, 12, 7, 1, 22, 6, 8, 2, 11)
PROBE = "probe"


def ragged_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 24, (n,), generator=generator).tolist() for n in LENGTHS]


def settings() -> list[SamplingParams]:
    """Greedy and sampled rows side by side, of different lengths: rows end and others join in nearly every step."""
    return [
        SamplingParams(max_tokens=12 + 3 * (i % 4), temperature=0.0 if i % 3 else 0.8, seed=i, ignore_eos=True)
        for i in range(len(LENGTHS))
    ]


@pytest.fixture(scope="session")
def plain(small_target) -> list[list[int]]:
    """What plain decoding writes."""
    return [request.output_ids for request in Engine(small_target).generate(ragged_prompts(), settings())]


def engine_after_steps(target, draft, shape: str, steps: int) -> Engine:
    """An engine with three rows of different lengths."""
    generator = torch.Generator().manual_seed(5)
    engine = Engine(target, draft, DraftShape.parse(shape), max_running_requests=4)
    for length in (6, 13, 3):
        prompt = torch.randint(1, target.vocab_size, (length,), generator=generator).tolist()
        engine.add_request(prompt, SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    return engine


def proposed(engine: Engine) -> DraftTree:
    """What is drafted next for the running rows."""
    return propose(engine, engine.drafter, engine._running)


def paths(tree: DraftTree, row: int) -> list[list[int]]:
    """The tokens from the root to every node, in any order."""
    nodes = tree.valid[row].nonzero().flatten().tolist()
    return sorted(tree.tokens[row, tree.mask[row, node].nonzero().flatten()].tolist() for node in nodes)


def best_first(children: Callable[[list[int]], list[tuple[float, int]]], steps: int, nodes: int) -> list[list[int]]:
    """The definition: the drafted tokens from the root to each node, in any order. A heap gives the best node, whose
    children join it; on a tie the node of a lower level, of an earlier parent, of an earlier place among its siblings.
    children: log-probability and token of each, the best first."""
    heap: list[tuple[float, tuple, list[int]]] = [(0.0, (), [])]
    found: list[list[int]] = []
    while heap and len(found) < nodes:
        cost, place, path = heappop(heap)
        found.append(path)
        for rank, (score, token) in enumerate(children(path) if len(path) < steps else ()):
            heappush(heap, (cost - score, (len(path) + 1, (cost, place), rank), [*path, token]))
    return sorted(found)


class ScriptedChoice:
    """Chooses what a test tells it; learns nothing. seen: the ranks of probes, by request."""

    widest = 3

    def __init__(self, arms) -> None:
        self.arms, self.seen = itertools.cycle(arms), {}

    def choose(self, requests, lookup=()):
        arm = next(self.arms)
        self.probe_due = arm == PROBE
        return Plan(arm, arm.num_draft_tokens) if isinstance(arm, DraftShape) else Plan()

    def probed(self, requests, ranks) -> None:
        for request, of_row in zip(requests, ranks, strict=True):
            self.seen.setdefault(request, []).append((request.length, of_row))

    def record(self, *seen) -> None:
        pass


class AnyChoice:
    """In the place of the adaptive drafter's own, which a clock leads: shapes, nothing, lookup of any depth, drafts cut
    anywhere and probes, drawn by lot."""

    widest = 3

    def __init__(self, chance: random.Random, most: DraftShape) -> None:
        self._chance = chance
        own = (DraftShape.chain(2), DraftShape(2, 2, 5), DraftShape(3, 3, 8))
        self._shapes = (None, *(shape.within(most) for shape in own))

    def choose(self, requests, lookup=()):
        self.probe_due = self._chance.random() < 0.2
        if self.probe_due:
            return Plan()
        shape, depths = self._chance.choice(self._shapes), tuple(self._chance.randrange(len(one)) for one in lookup)
        if shape is None:
            return Plan(None, 2 if any(depths) else 1, depths)
        nodes = shape.num_draft_tokens
        possible = range(1, nodes + 1) if shape.is_chain else (1, nodes, nodes, nodes)
        return Plan(shape, 2, depths, tuple(self._chance.choice(possible) for _ in requests))

    def probed(self, requests, ranks) -> None:
        pass

    def record(self, *seen) -> None:
        pass
