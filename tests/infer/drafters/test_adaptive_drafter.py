"""Adaptive drafting in the engine: the same tokens whatever is chosen, and a head that can draft again at any time."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from tests.infer.conftest import finished, propose
from tests.infer.drafters.conftest import PROBE, AnyChoice, ScriptedChoice, paths, proposed, ragged_prompts, settings
from toolkit.infer.attention.metadata import PackedMetadata
from toolkit.infer.drafters import draft_rollout, head_drafter
from toolkit.infer.drafters.adaptive import AdaptiveDrafter
from toolkit.infer.drafters.drafter import NoDrafter
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request

MOST = DraftShape(4, 3, 12)
PATTERNS = {
    "long pauses": [None] * 7 + [MOST] + [None] * 5 + [DraftShape.chain(4), DraftShape(2, 3, 6)],
    "probes": [PROBE, None, None, PROBE, MOST, PROBE, PROBE, None, None, None, None, None, DraftShape.chain(2)],
    "all shapes": [DraftShape.chain(1), MOST, None, DraftShape.chain(3), DraftShape(4, 2, 5), None, None],
}


@pytest.mark.parametrize(
    ("name", "pattern", "batch"),
    [
        ("eagle3", "all shapes", 5),
        ("mtp-three-layers", "probes", 5),
        ("mtp-hidden-first", "long pauses", 1),
        ("ngram", "probes", 5),
    ],
)
def test_choices_change_no_token(small_target, build, plain, monkeypatch, name, pattern, batch):
    """fp32, exact, greedy and sampled, rows that join and leave while nothing is drafted, plain rows between them."""
    monkeypatch.setattr(head_drafter, "CATCH_UP", 4)
    engine = Engine(small_target, build(name), MOST, max_running_requests=batch, adaptive=True)
    engine.drafter.chooser = ScriptedChoice(PATTERNS[pattern])
    some = slice(None) if batch > 1 else slice(0, 5)
    cases = list(zip(ragged_prompts(), settings(), strict=True))[some]
    requests = [engine.add_request(p, s, speculative=i % 5 != 4) for i, (p, s) in enumerate(cases)]
    assert finished(engine, requests) == plain[some]
    offered = [event.offered for request in requests for event in request.events]
    assert 0 in offered and any(offered)


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_no_spending_changes_a_token(small_target, build, plain, batch):
    """fp32, exact: chains of the head cut anywhere, its trees, chains of lookup and plain rows in one round; requests
    arrive and end meanwhile. Layers compute no padding."""
    engine = Engine(small_target, build("eagle3"), MOST, max_running_requests=batch, adaptive=True, lookup=True)
    engine.drafter.chooser = AnyChoice(random.Random(batch), MOST)
    seen, body = [], engine._forward.run_body
    engine._forward.run_body = lambda *given: seen.append(given[2]) or body(*given)
    cases, requests = list(zip(ragged_prompts(), settings(), strict=True))[: 6 if batch == 1 else None], []
    while len(requests) < len(cases) or engine.has_work():
        if len(requests) < len(cases):
            requests.append(engine.add_request(*cases[len(requests)], speculative=len(requests) % 5 != 4))
        engine.step()
        engine.check_integrity()
    engine.close()
    assert [one.output_ids for one in requests] == plain[: len(cases)]
    offers = {event.offered for one in requests for event in one.events if event.batch > 1}
    assert batch == 1 or len(offers) > 4
    assert batch == 1 or sum(isinstance(metadata, PackedMetadata) for metadata in seen) > 5


@pytest.mark.parametrize(
    ("name", "shape", "catch_up", "drafted", "probes"),
    [
        ("eagle3", MOST, 3, (), ()),
        ("eagle3", MOST, 64, (3,), (6,)),
        ("mtp", DraftShape.chain(3), 7, (), (4, 13)),
        ("eagle2-two-layers", DraftShape.chain(4), 64, (0, 2, 3, 9), ()),
        ("mtp-three-layers", MOST, 3, (2, 9), (1, 3, 12)),
    ],
)
def test_the_head_drafts_after_a_pause_as_if_there_had_been_none(
    small_target, build, monkeypatch, name, shape, catch_up, drafted, probes
):
    """Its cache is kept warm: after plain steps (and some drafted ones between) it proposes what a head proposes that
    has just read the whole text as a prompt. Equal tokens alone would not show a head that reads the wrong features."""
    monkeypatch.setattr(head_drafter, "CATCH_UP", catch_up)
    monkeypatch.setattr(head_drafter, "FEW", 1)
    monkeypatch.setattr(draft_rollout, "PROBED", 6)
    engine = Engine(small_target, build(name), MOST, max_running_requests=4, adaptive=True)
    engine.drafter.chooser = ScriptedChoice(
        MOST if step in drafted else PROBE if step in probes else None for step in range(14)
    )
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    requests = []
    for step in range(14):
        if step in (0, 4, 5):  # so rows have waited for different numbers of tokens
            requests.append(engine.add_request(ragged_prompts()[step], params))
        engine.step()
    engine.drafter.inner.set_shape(shape)
    together = propose(engine, engine.drafter.inner, requests)
    engine.close()
    for row, request in enumerate(requests):
        fresh = Engine(small_target, build(name), shape, max_running_requests=1)
        twin = fresh.add_request(request.prompt_ids + request.output_ids[:-1], params)
        with torch.inference_mode():
            fresh._schedule()
        alone = proposed(fresh)
        assert twin.output_ids == request.output_ids[-1:]
        fresh.close()
        assert paths(together, row) == paths(alone, 0)


def test_few_positions_get_states_after_a_pause(small_target, build):
    """Of a head whose keys and values need no attention: a probe of eight rows after 40 rounds runs it for five
    positions a row, and a prompt for none. The rest would take longer than the rounds between two probes may lose."""
    engine = Engine(small_target, build("eagle3"), MOST, max_running_requests=8, adaptive=True)
    engine.drafter.chooser = ScriptedChoice([None] * 40 + [PROBE])
    reader, seen = engine.drafter.inner.reader, {"read": 0, "write": 0}

    def counted(name, method):
        def run(*given):
            seen[name] += next(one for one in given if isinstance(one, torch.Tensor)).numel()
            return method(*given)

        return run

    for name in seen:
        setattr(reader, name, counted(name, getattr(reader, name)))
    engine.generate([[5, 6, 7, 8]] * 8, SamplingParams(max_tokens=42, ignore_eos=True))
    engine.close()
    assert seen == {"read": 8 * 5, "write": 8 * (4 + 41)}


@pytest.mark.parametrize("name", ["eagle3", "mtp-three-layers", "ngram"])
def test_a_probe_sees_what_drafts_would_have_got(small_target, build, monkeypatch, name):
    """In a second engine the same text is drafted for at every position: the accepted ranks must be those seen.

    (An n-gram that is not found says nothing of one row alone: no rank is seen, and nothing is drafted.)"""
    monkeypatch.setattr(head_drafter, "FEW", 1)
    monkeypatch.setattr(draft_rollout, "PROBED", 8)
    wide, params = DraftShape(1, 3, 4), SamplingParams(max_tokens=40, ignore_eos=True)
    engine = Engine(small_target, build(name), wide, max_running_requests=1, adaptive=True)
    engine.drafter.chooser = chooser = ScriptedChoice([None] * 9 + [PROBE])
    request = engine.generate([[5, 6, 7, 8, 5, 6]], params)[0]
    engine.close()
    ranks = {}  # by the place of the token in the text
    for length, of_row in chooser.seen[request]:
        if name == "ngram":
            ranks.setdefault(None, []).extend(of_row)
        else:
            ranks |= {length - len(of_row) + i: rank for i, rank in enumerate(of_row)}
    every = Engine(small_target, build(name), wide, max_running_requests=1)
    wanted = {}
    for length in range(request.length - len(request.output_ids) + 1, request.length):
        text = (request.prompt_ids + request.output_ids)[:length]
        twin = every.add_request(text[:-1], SamplingParams(max_tokens=2, ignore_eos=True))
        with torch.inference_mode():
            every._schedule()
        tree = proposed(every)
        drafts, right = tree.tokens[0, 1:].tolist(), (request.prompt_ids + request.output_ids)[length]
        assert twin.output_ids == text[-1:]
        every.abort(twin)
        if drafts:
            wanted[length] = drafts.index(right) if right in drafts else 3
    every.close()
    if name == "ngram":
        seen = ranks[None]
        assert seen == list(wanted.values())[: len(seen)] and len(seen) >= 5
    else:
        assert len(ranks) >= 24 and ranks == {place: wanted[place] for place in ranks}
        assert len(set(ranks.values())) > 1


def test_pending_positions_stay_bounded(small_target, small_draft):
    """A head that is not asked for thousands of tokens must not keep the features of all of them."""
    engine = Engine(small_target, small_draft, MOST, max_running_requests=2, adaptive=True)
    engine.drafter.chooser = ScriptedChoice([None])
    engine.generate(ragged_prompts()[:2], SamplingParams(max_tokens=200, ignore_eos=True))
    pending = engine.drafter.inner.inputs
    engine.close()
    assert pending.tokens.shape[1] <= 2 * (head_drafter.CATCH_UP + 1)


@pytest.mark.parametrize(("name", "shape"), [("eagle3", MOST), ("ngram", DraftShape.chain(4))])
def test_any_clock_writes_the_same_tokens(small_target, build, plain, name, shape):
    """Seconds drawn at random lead the real chooser anywhere; the answers do not depend on it."""
    dice = random.Random(1)
    ticks = itertools.accumulate(dice.expovariate(1.0) for _ in itertools.count())
    engine = Engine(small_target, build(name), shape, max_running_requests=4)
    engine.drafter = AdaptiveDrafter(engine.drafter, shape, clock=lambda: next(ticks))
    engine.set_shape(shape)  # rounds in which nothing is drafted need more room
    depths = set()
    for _ in range(2):
        requests = [engine.add_request(p, s) for p, s in zip(ragged_prompts(), settings(), strict=True)]
        while engine.has_work():
            engine.step()
            engine.check_integrity()
        assert [request.output_ids for request in requests] == plain
        depths |= {event.depth_offered for request in requests for event in request.events}
    engine.close()
    assert 0 in depths and len(depths) > 1, "the clock led it nowhere"


class Compiling(NoDrafter):
    """A drafter and a target that compile for a second in the first round of a shape; other rounds take about 15 ms."""

    def __init__(self) -> None:
        self.now, self.ran, self.drafted = 0.0, set(), None

    def clock(self) -> float:
        return self.now

    def set_shape(self, shape) -> None:
        self.shape = shape

    def propose(self, requests, rows):
        self.drafted = self.shape
        self.now += 0.001 * self.shape.num_steps
        return SimpleNamespace(nodes=self.shape.num_draft_tokens)

    def skip(self, requests, rows):
        self.drafted = None
        return SimpleNamespace(nodes=1)

    def probe(self, requests, rows, width):
        return self.skip(requests, rows), [[0, 0, 1, 0] for _ in requests]

    def observe(self, requests, result) -> None:
        self.now += 0.015 + 0.0001 * (0 if self.drafted is None else self.drafted.num_draft_tokens)
        self.now += 0.0 if self.drafted in self.ran else 1.0
        self.ran.add(self.drafted)


@pytest.mark.parametrize(("batch", "most"), [(1, DraftShape.chain(4)), (8, MOST)])
def test_a_round_that_compiles_keeps_no_shape_from_being_drafted(most, batch):
    """The first round of a shape takes as long as sixty plain rounds. Timed, it would be all that is known of the
    shape, and a good head would not draft for hundreds of rounds of one request."""
    world, dice = Compiling(), random.Random(0)
    drafter = AdaptiveDrafter(world, most, world.clock, first_is_slow=True)
    requests = [Request([1], SamplingParams()) for _ in range(batch)]
    drafted = []
    while sum(drafted[-50:]) < 45 and len(drafted) < 1000:
        tree = drafter.propose(requests, None)
        steps = 0 if tree.nodes == 1 else world.drafted.num_steps
        lengths = [next((n for n in range(steps) if dice.random() > 0.75), steps) for _ in requests]
        drafter.observe(requests, SimpleNamespace(ranks=[[0] * length for length in lengths]))
        drafted.append(steps > 0)
    assert len(drafted) <= 80
