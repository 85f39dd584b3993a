"""Seconds of a decoding round by draft shape and batch size, measured on a live batch.

The rounds of all shapes alternate with plain rounds, so that a change in the machine's load reaches all alike. A round
has two parts, and not every shape is run:

    round = drafting, by (num_steps, top_k)  +  the rest, by the number of verified nodes (chains and trees apart)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import cycle
from statistics import median
from typing import Any

from toolkit.bench.answers import Sampling
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.load.load_engine import build_engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request
from toolkit.targets.target import Target

ROUNDS = 7  # timed rounds of a shape; one more round before them is not timed
LEAST_ANSWER = 64  # tokens of an answer at least, so that a batch stays full for some rounds


@dataclass(frozen=True)
class Parts:
    """Median seconds of a round: drafting, verification until the target's choices are known, and all else."""

    draft_s: float
    verify_s: float
    other_s: float

    @property
    def round_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s


@dataclass(frozen=True)
class StepTimes:
    """Times at one batch size. prefill_s: seconds to read a prompt, by plain and by drafting engine, mean a prompt.

    plain: its draft_s is 0. drafts: by (num_steps, top_k). verifies: by (is_chain, num_draft_tokens): verification and
    all else.
    """

    batch: int
    plain: Parts
    drafts: Mapping[tuple[int, int], float]
    verifies: Mapping[tuple[bool, int], tuple[float, float]]
    prefill_s: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        """What search.json keeps: see `search_file.arm_times`."""
        return {
            "batch": self.batch,
            "plain_s": self.plain.verify_s,
            "drafts": {f"{steps},{top_k}": seconds for (steps, top_k), seconds in self.drafts.items()},
            "verifies": {
                f"{'chain' if chain else 'tree'},{nodes}": verify
                for (chain, nodes), (verify, _) in self.verifies.items()
            },
        }

    def parts(self, shape: DraftShape | None) -> Parts:
        """The parts of a round with this shape; None: a plain round. Raises KeyError for parts that did not run."""
        if shape is None:
            return self.plain
        verify, other = self.verifies[shape.is_chain, shape.num_draft_tokens]
        return Parts(self.drafts[shape.num_steps, shape.top_k], max(verify, self.plain.verify_s), other)


def covering_shapes(shapes: Sequence[DraftShape]) -> list[DraftShape]:
    """Returns a small part of the shapes that contains every (num_steps, top_k) and every number of nodes."""
    chosen: list[DraftShape] = []
    nodes: dict[tuple[bool, int], int] = {}
    by_drafting: dict[tuple[int, int], list[DraftShape]] = {}
    for shape in shapes:
        by_drafting.setdefault((shape.num_steps, shape.top_k), []).append(shape)
        nodes.setdefault((shape.is_chain, shape.num_draft_tokens), 0)
    for alike in by_drafting.values():  # the node count that was taken least
        shape = min(alike, key=lambda one: nodes[one.is_chain, one.num_draft_tokens])
        nodes[shape.is_chain, shape.num_draft_tokens] += 1
        chosen.append(shape)
    for shape in shapes:
        if not nodes[shape.is_chain, shape.num_draft_tokens]:
            nodes[shape.is_chain, shape.num_draft_tokens] = 1
            chosen.append(shape)
    return chosen


def measure_step_times(
    target: Target,
    draft: Draft,
    shapes: Sequence[DraftShape],
    prompts: Sequence[Sequence[int]],
    config: EngineConfig,
    sampling: Sampling,
    on_progress: Callable[[int, int], None] | None = None,
) -> StepTimes:
    """Times rounds of `config.max_running_requests` requests, with plain rounds between them.

    prompts: ids; they are used in turn. sampling: of the answers; after max_tokens the next prompt takes a row, so that
    contexts are as long as those of the answers. on_progress(done, total): counts rounds.
    """
    config = replace(config, prefix_cache=False, verify="target", adaptive=False, shape=None)
    chosen = covering_shapes(shapes)
    widest = DraftShape.covering(chosen).as_text()
    with (
        closing(build_engine(config, target).engine) as plain_engine,
        closing(build_engine(replace(config, shape=widest), target, draft).engine) as engine,
    ):
        params = SamplingParams(
            sampling.temperature, seed=sampling.seed, max_tokens=max(sampling.max_tokens, LEAST_ANSWER), ignore_eos=True
        )
        plain, drafting = _Batch(plain_engine, prompts, params), _Batch(engine, prompts, params)
        plain_rounds: list[Parts] = []
        rounds: dict[DraftShape, list[Parts]] = {shape: [] for shape in chosen}
        order = [None, *chosen]
        for turn in range(ROUNDS + 1):
            for place, shape in enumerate(order, start=1):
                one = plain.round() if shape is None else drafting.round(shape)
                if turn:
                    (plain_rounds if shape is None else rounds[shape]).append(one)
                if on_progress is not None:
                    on_progress(turn * len(order) + place, (ROUNDS + 1) * len(order))
    drafts: dict[tuple[int, int], list[Parts]] = {}
    verifies: dict[tuple[bool, int], list[Parts]] = {}
    for shape, parts in rounds.items():
        drafts.setdefault((shape.num_steps, shape.top_k), []).extend(parts)
        verifies.setdefault((shape.is_chain, shape.num_draft_tokens), []).extend(parts)
    return StepTimes(
        config.max_running_requests,
        replace(_median(plain_rounds), draft_s=0.0),
        {key: _median(found).draft_s for key, found in drafts.items()},
        {key: (_median(found).verify_s, _median(found).other_s) for key, found in verifies.items()},
        (plain.prefill_s, drafting.prefill_s),
    )


def _median(parts: Sequence[Parts]) -> Parts:
    return Parts(*(median(getattr(one, name) for one in parts) for name in ("draft_s", "verify_s", "other_s")))


@dataclass
class _Batch:
    """An engine with a full batch, whose requests are replaced when they end.

    prefill_s: seconds to read a prompt.
    """

    engine: Engine
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    running: list[Request] = field(default_factory=list)
    prefills: list[float] = field(default_factory=list)
    ids: Iterator[Sequence[int]] = field(init=False)

    def __post_init__(self) -> None:
        most = self.engine.context_length // 2  # the rest is for the answer
        self.ids = cycle([one[:most] for one in self.prompts])

    @property
    def prefill_s(self) -> float:
        return median(self.prefills)

    def round(self, shape: DraftShape | None = None) -> Parts:
        """Runs one round of the full batch and returns its parts."""
        if shape is not None:
            self.engine.set_shape(shape)
        self._fill()
        started = time.perf_counter()
        self.engine.step()
        whole = time.perf_counter() - started
        event = self.running[0].events[-1]
        return Parts(event.draft_s, event.verify_s, whole - event.draft_s - event.verify_s)

    def _fill(self) -> None:
        """Replaces ended requests, and runs until every prompt is read."""
        while True:
            self.running = [one for one in self.running if not one.finished]
            absent = self.engine.max_running_requests - len(self.running)
            if not absent:
                return
            started = time.perf_counter()
            # All at once: the first ones would end before the last ones of a large batch are read one by one.
            added = [self.engine.add_request(next(self.ids), self.params) for _ in range(absent)]
            while any(one.first_token_at is None for one in added):
                self.engine.step()
            read = max(one.first_token_at for one in added if one.first_token_at is not None)
            self.prefills.append((read - started) / absent)
            self.running += added
