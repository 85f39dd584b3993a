"""Seconds of a decoding round by draft shape and batch size, measured on a live batch.

The rounds of all shapes alternate with plain rounds, so that a change in the machine's load reaches all alike. A round
has two parts, and not every shape is run:

    round = drafting, by (num_steps, top_k)  +  the rest, by the number of verified nodes (chains and trees apart)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from statistics import median
from typing import Any

from toolkit.bench.answers import Sampling
from toolkit.bench.engine_context import with_context
from toolkit.bench.side_by_side import rotated
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.load.load_engine import build_engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request
from toolkit.targets.target import Target

ROUNDS = 7  # timed rounds of a shape; one more round before them is not timed
DRAFT_ROUNDS = 15  # the same of a draft, where small differences decide
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
    chosen = covering_shapes(shapes)
    with _batches(target, [None, draft], DraftShape.covering(chosen), prompts, config, sampling) as (plain, drafting):
        modes = [(plain, None), *((drafting, shape) for shape in chosen)]
        plain_rounds, *found_rounds = _in_turns(modes, ROUNDS, on_progress)
    rounds = dict(zip(chosen, found_rounds, strict=True))
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


def measure_draft_times(
    target: Target,
    drafts: Sequence[Draft],
    shape: DraftShape,
    prompts: Sequence[Sequence[int]],
    config: EngineConfig,
    sampling: Sampling,
) -> tuple[Parts, list[Parts]]:
    """Times rounds of one shape with each of the drafts, all in turns with plain rounds.

    Returns a plain round and one of each draft. They verify the same number of nodes, so their verification is the
    median over all of them. Other arguments as those of `measure_step_times`."""
    with _batches(target, [None, *drafts], shape, prompts, config, sampling) as (plain, *drafting):
        plain_rounds, *rounds = _in_turns([(plain, None), *((one, shape) for one in drafting)], DRAFT_ROUNDS)
    verify_s = _median([one for own in rounds for one in own]).verify_s
    return replace(_median(plain_rounds), draft_s=0.0), [replace(_median(own), verify_s=verify_s) for own in rounds]


@contextmanager
def _batches(
    target: Target,
    drafts: Sequence[Draft | None],
    shape: DraftShape,
    prompts: Sequence[Sequence[int]],
    config: EngineConfig,
    sampling: Sampling,
) -> Iterator[list[_Batch]]:
    """Yields a full batch in an engine for each draft; None: a plain engine. shape: the largest one."""
    params = SamplingParams(
        sampling.temperature, seed=sampling.seed, max_tokens=max(sampling.max_tokens, LEAST_ANSWER), ignore_eos=True
    )
    config = replace(config, prefix_cache=False, verify="target", adaptive=False, shape=None)
    config = with_context(config, max(map(len, prompts)), params.max_tokens)
    with ExitStack() as engines:
        found = []
        for draft in drafts:
            own = config if draft is None else replace(config, shape=shape.as_text())
            engine = engines.enter_context(closing(build_engine(own, target, draft).engine))
            found.append(_Batch(engine, prompts, params))
        yield found


def _in_turns(
    modes: Sequence[tuple[_Batch, DraftShape | None]], count: int, on_progress: Callable[[int, int], None] | None = None
) -> list[list[Parts]]:
    """Runs `count` rounds of each mode, and one more that is not timed. Every turn starts with the next mode."""
    found: list[list[Parts]] = [[] for _ in modes]
    for turn in range(count + 1):
        for place, at in enumerate(rotated(range(len(modes)), turn), start=1):
            batch, shape = modes[at]
            one = batch.round(shape)
            if turn:
                found[at].append(one)
            if on_progress is not None:
                on_progress(turn * len(modes) + place, (count + 1) * len(modes))
    return found


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
        context = self.engine.context_length  # at least half of it is for the prompt
        most = max(context // 2, context - self.params.max_tokens)
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
