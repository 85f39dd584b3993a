"""Seconds of a decoding round by draft shape and batch size, measured on a live batch.

Shapes and plain decoding take turns of some rounds, so that a change in the machine's load reaches all alike. The first
round of a turn is not timed: rounds depend on the one before (demo target on a CPU: a plain round takes 11.0 ms
after a plain one, 12.3 ms after a deep draft). A round has two parts, and not every shape is run:

    round = drafting, by (num_steps, top_k)  +  the rest, by the number of verified nodes

Chains and trees are apart, and shapes of one step: after a longer draft the target's forward is slower on a CPU
(6 nodes: 12.3 ms after one step, 13.6 ms after two). A deeper draft and more nodes take no less time, so what rounds
say otherwise is noise, and is levelled. The shapes that matter run again.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, groupby
from statistics import median
from typing import Any

from toolkit.bench.side_by_side import Progress, SideBySide, Trial, rotated, with_context, with_eager_rounds
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.search_file import verified
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request

TURNS = 3  # of a shape; one more is not timed
TURN_ROUNDS = 3  # timed rounds of a turn, after one that is not timed
AGAIN_TURNS = 6  # further turns of the shapes that matter
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
    """Times at one batch size.

    plain: its draft_s is 0. drafts: by (num_steps, top_k). verifies: by `verified`: verification and all else.
    """

    batch: int
    plain: Parts
    drafts: Mapping[tuple[int, int], float]
    verifies: Mapping[str, tuple[float, float]]

    def to_json(self) -> dict[str, Any]:
        """What search.json keeps: see `search_file.step_costs`."""
        return {
            "batch": self.batch,
            "plain_s": self.plain.verify_s,
            "drafts": {f"{steps},{top_k}": seconds for (steps, top_k), seconds in self.drafts.items()},
            "verifies": {key: verify for key, (verify, _) in self.verifies.items()},
        }

    def parts(self, shape: DraftShape) -> Parts:
        """The parts of a round with this shape. Raises KeyError for parts that did not run."""
        verify, other = self.verifies[verified(shape)]
        return Parts(self.drafts[shape.num_steps, shape.top_k], verify, other)


def covering_shapes(shapes: Sequence[DraftShape]) -> list[DraftShape]:
    """Returns a small part of the shapes that contains every (num_steps, top_k) and every kind of verification.

    shapes: those of the same (num_steps, top_k) follow each other.
    """
    chosen: list[DraftShape] = []
    taken: Counter[str] = Counter()
    for _, alike in groupby(shapes, key=lambda one: (one.num_steps, one.top_k)):
        chosen.append(min(alike, key=lambda one: taken[verified(one)]))  # the node count that was taken least
        taken[verified(chosen[-1])] += 1
    for shape in shapes:
        if not taken[verified(shape)]:
            taken[verified(shape)] += 1
            chosen.append(shape)
    return chosen


def measure_step_times(
    trial: Trial,
    shapes: Sequence[DraftShape],
    texts: Sequence[Sequence[int]],
    matter: Callable[[StepTimes], Sequence[DraftShape]],
    on_progress: Progress | None = None,
) -> StepTimes:
    """Times rounds of full batches, with plain rounds between them. Those of `matter`, which gets the first times, run
    three times as often.

    texts: ids of prompts, in place of the trial's; they are used in turn. After `max_tokens` of an answer the next one
    takes its row, so that contexts are as long as those of the answers. on_progress(done, total): counts turns.
    """
    chosen, rounds = covering_shapes(shapes), defaultdict[DraftShape | None, list[Parts]](list)
    most = max(trial.sampling.max_tokens, LEAST_ANSWER)
    params = SamplingParams(trial.sampling.temperature, seed=trial.sampling.seed, max_tokens=most, ignore_eos=True)
    config = with_eager_rounds(replace(trial.config, verify="target"))  # a graph has no times of its parts
    with SideBySide(with_context(config, max(map(len, texts)), most), trial.target, 2) as engines:
        plain = _Batch(engines.open(), texts, params)
        drafting = _Batch(engines.open(trial.draft, DraftShape.covering(chosen)), texts, params)

        def take_turns(modes: Sequence[DraftShape | None], turns: int, show: Progress | None = None) -> None:
            for turn in range(turns + 1):
                for place, shape in enumerate(rotated(modes, turn), start=1):
                    batch = plain if shape is None else drafting
                    rounds[shape] += [batch.round(shape) for _ in range(1 + (TURN_ROUNDS if turn else 0))][1:]
                    if show is not None:
                        show(turn * len(modes) + place, (turns + 1) * len(modes))

        take_turns([None, *chosen], TURNS, on_progress)
        take_turns([None, *matter(_step_times(trial.batch, rounds))], AGAIN_TURNS)
    return _step_times(trial.batch, rounds)


def _step_times(batch: int, rounds: Mapping[DraftShape | None, Sequence[Parts]]) -> StepTimes:
    plain = Parts(0.0, *(median(getattr(one, name) for one in rounds[None]) for name in ("verify_s", "other_s")))
    drafts: dict[int, dict[int, list[Parts]]] = {}  # by top_k and num_steps
    verifies: dict[str, dict[int, list[Parts]]] = {}  # by kind and nodes
    names: dict[tuple[str, int], str] = {}
    for shape, parts in rounds.items():
        if shape is not None:
            drafts.setdefault(shape.top_k, {}).setdefault(shape.num_steps, []).extend(parts)
            kind = "chain" if shape.is_chain else f"tree {shape.num_steps == 1}"
            verifies.setdefault(kind, {}).setdefault(shape.num_draft_tokens, []).extend(parts)
            names[kind, shape.num_draft_tokens] = verified(shape)
    return StepTimes(
        batch,
        plain,
        {(depth, k): one for k, found in drafts.items() for depth, one in _rising(found, "draft_s").items()},
        {
            names[kind, nodes]: (max(verify, plain.verify_s), median(one.other_s for one in found[nodes]))
            for kind, found in verifies.items()
            for nodes, verify in _rising(found, "verify_s").items()
        },
    )


def _rising(rounds: Mapping[int, Sequence[Parts]], part: str) -> dict[int, float]:
    """Returns the median of a part by size, levelled so that it nowhere falls: neighbours that fall share their mean,
    weighted by their rounds (isotonic regression by pooling adjacent violators; Ayer et al., 1955)."""
    pools: list[tuple[float, int, list[int]]] = []
    for size in sorted(rounds):
        value, weight, sizes = median(getattr(one, part) for one in rounds[size]), len(rounds[size]), [size]
        while pools and pools[-1][0] > value:
            before, heavy, others = pools.pop()
            value = (before * heavy + value * weight) / (heavy + weight)
            weight, sizes = heavy + weight, others + sizes
        pools.append((value, weight, sizes))
    return {size: value for value, _, sizes in pools for size in sizes}


@dataclass
class _Batch:
    """An engine with a full batch, whose requests are replaced when they end."""

    engine: Engine
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    running: list[Request] = field(default_factory=list)
    ids: Iterator[Sequence[int]] = field(init=False)

    def __post_init__(self) -> None:
        context = self.engine.context_length  # at least half of it is for the prompt
        most = max(context // 2, context - self.params.max_tokens)
        self.ids = cycle([one[:most] for one in self.prompts])

    def round(self, shape: DraftShape | None) -> Parts:
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
            # All at once: the first ones would end before the last ones of a large batch are read one by one.
            added = [self.engine.add_request(next(self.ids), self.params) for _ in range(absent)]
            while any(one.first_token_at is None for one in added):
                self.engine.step()
            self.running += added
