"""Adaptive drafting in the engine: the same tokens whatever is chosen, and a head that can draft again at any time."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from toolkit.infer.drafters import head_drafter
from toolkit.infer.drafters.adaptive import AdaptiveDrafter
from toolkit.infer.drafters.drafter import NoDrafter
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape, DraftTree
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request

MOST = DraftShape(4, 3, 12)
LENGTHS = (5, 9, 1, 17, 3, 30, 2, 4, 12, 7, 1, 22)


def ragged_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 24, (n,), generator=generator).tolist() for n in LENGTHS]


def settings() -> list[SamplingParams]:
    """Greedy and sampled rows side by side, of different lengths: rows end and others join in nearly every step."""
    return [
        SamplingParams(max_tokens=14 + 5 * (i % 4), temperature=0.0 if i % 3 else 0.8, seed=i, ignore_eos=True)
        for i in range(len(LENGTHS))
    ]


@pytest.fixture(scope="module")
def plain(small_target) -> list[list[int]]:
    return [request.output_ids for request in Engine(small_target).generate(ragged_prompts(), settings())]


PROBE = "probe"


class ScriptedChoice:
    """Chooses what a test tells it; learns nothing. seen: the ranks of probes, by request."""

    widest = 3

    def __init__(self, arms) -> None:
        self.arms, self.seen = itertools.cycle(arms), {}

    def choose(self, requests, lookup=()):
        arm = next(self.arms)
        self.probe_due = arm == PROBE
        return None if self.probe_due else arm

    def probed(self, requests, ranks) -> None:
        for request, of_row in zip(requests, ranks, strict=True):
            self.seen.setdefault(request, []).append((request.length, of_row))

    def record(self, *seen) -> None:
        pass


PATTERNS = {
    "never": [None],
    "every other": [None, DraftShape.chain(2)],
    "long pauses": [None] * 7 + [MOST] + [None] * 5 + [DraftShape.chain(4), DraftShape(2, 3, 6)],
    "probes": [PROBE, None, None, PROBE, MOST, PROBE, PROBE, None, None, None, None, None, DraftShape.chain(2)],
    "all shapes": [DraftShape.chain(1), MOST, None, DraftShape.chain(3), DraftShape(4, 2, 5), None, None],
}


@pytest.mark.parametrize(
    ("name", "pattern", "batch"),
    [
        *(("eagle3", pattern, 5) for pattern in PATTERNS),
        ("mtp-three-layers", "all shapes", 5),
        ("mtp-three-layers", "probes", 1),
        ("eagle2-two-layers", "probes", 5),
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
    while engine.has_work():
        engine.step()
        engine.check_integrity()
    engine.close()
    assert [request.output_ids for request in requests] == plain[some]
    offered = [event.offered for request in requests for event in request.events]
    assert 0 in offered and (any(offered) == (pattern != "never"))


@pytest.mark.parametrize(
    ("name", "shape", "catch_up", "drafted", "probes"),
    [
        ("eagle3", MOST, 3, (), ()),
        ("eagle3", DraftShape.chain(4), 64, (2, 9), (1, 3, 12)),
        ("eagle2-two-layers", MOST, 64, (0, 2, 3, 9), ()),
        ("mtp-three-layers", MOST, 3, (2, 9), (1, 3, 12)),
        ("mtp-three-layers", DraftShape.chain(4), 64, (), ()),
        ("mtp-hidden-first", DraftShape.chain(4), 3, (0, 2, 3, 9), ()),
    ],
)
def test_the_head_drafts_after_a_pause_as_if_there_had_been_none(
    small_target, build, monkeypatch, name, shape, catch_up, drafted, probes
):
    """Its cache is kept warm: after plain steps (and some drafted ones between) it proposes what a head proposes that
    has just read the whole text as a prompt. Equal tokens alone would not show a head that reads the wrong features."""
    monkeypatch.setattr(head_drafter, "CATCH_UP", catch_up)
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
    with torch.inference_mode():
        engine.drafter.inner.set_shape(shape)
        together = engine.drafter.inner.propose(requests, engine._rounds.set_rows(requests)[0])
    engine.close()
    for row, request in enumerate(requests):
        fresh = Engine(small_target, build(name), shape, max_running_requests=1)
        twin = fresh.add_request(request.prompt_ids + request.output_ids[:-1], params)
        with torch.inference_mode():
            fresh._schedule()
            alone = fresh.drafter.propose([twin], fresh._rounds.set_rows([twin])[0])
        assert twin.output_ids == request.output_ids[-1:]
        fresh.close()
        assert paths(together, row) == paths(alone, 0)


@pytest.mark.parametrize("name", ["eagle3", "mtp-three-layers", "ngram"])
def test_a_probe_sees_what_drafts_would_have_got(small_target, build, name):
    """In a second engine the same text is drafted for at every position: the accepted ranks must be those seen.

    (An n-gram that is not found says nothing of one row alone: no rank is seen, and nothing is drafted.)"""
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
            tree = every.drafter.propose([twin], every._rounds.set_rows([twin])[0])
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
        assert len(ranks) >= 25 and ranks == {place: wanted[place] for place in ranks}
        assert len(set(ranks.values())) > 1


def paths(tree: DraftTree, row: int) -> list[list[int]]:
    """The tokens from the root to every node, in any order."""
    nodes = tree.valid[row].nonzero().flatten().tolist()
    return sorted(tree.tokens[row, tree.mask[row, node].nonzero().flatten()].tolist() for node in nodes)


def test_pending_positions_stay_bounded(small_target, small_draft):
    """A head that is not asked for thousands of tokens must not keep the features of all of them."""
    engine = Engine(small_target, small_draft, MOST, max_running_requests=2, adaptive=True)
    engine.drafter.chooser = ScriptedChoice([None])
    engine.generate(ragged_prompts()[:2], SamplingParams(max_tokens=200, ignore_eos=True))
    pending = engine.drafter.inner.inputs
    engine.close()
    assert pending.tokens.shape[1] <= 2 * (head_drafter.CATCH_UP + 1)


@pytest.mark.parametrize(
    ("name", "shape"), [("eagle3", MOST), ("mtp-three-layers", DraftShape.chain(4)), ("ngram", DraftShape.chain(4))]
)
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
    """A drafter and a target that compile for a second in the first round of an arm; other rounds take about 15 ms."""

    def __init__(self) -> None:
        self.now, self.ran, self.arm = 0.0, set(), None

    def clock(self) -> float:
        return self.now

    def set_shape(self, shape) -> None:
        self.shape = shape

    def propose(self, requests, rows):
        self.arm = self.shape
        self.now += 0.001 * self.arm.num_steps
        return SimpleNamespace(nodes=self.arm.num_draft_tokens)

    def skip(self, requests, rows):
        self.arm = None
        return SimpleNamespace(nodes=1)

    def probe(self, requests, rows, width):
        return self.skip(requests, rows), [[0, 0, 1, 0] for _ in requests]

    def observe(self, requests, result) -> None:
        self.now += 0.015 + 0.0001 * (0 if self.arm is None else self.arm.num_draft_tokens)
        self.now += 0.0 if self.arm in self.ran else 1.0
        self.ran.add(self.arm)


@pytest.mark.parametrize(("batch", "most"), [(1, DraftShape.chain(4)), (8, MOST)])
def test_a_round_that_compiles_keeps_no_shape_from_being_drafted(most, batch):
    """The first round of a shape takes as long as sixty plain rounds. Timed, it is all that is known of the shape, and
    a good head does not draft for hundreds of rounds of one request."""

    def plain_rounds(**options) -> int:
        """Rounds until nine of ten draft."""
        world, dice = Compiling(), random.Random(0)
        drafter = AdaptiveDrafter(world, most, world.clock, **options)
        requests = [Request([1], SamplingParams()) for _ in range(batch)]
        for request in requests:
            request.output_ids = [1] * 50
        drafted = []
        while sum(drafted[-50:]) < 45 and len(drafted) < 1000:
            tree = drafter.propose(requests, None)
            steps = 0 if tree.nodes == 1 else world.arm.num_steps
            lengths = [next((n for n in range(steps) if dice.random() > 0.75), steps) for _ in requests]
            drafter.observe(requests, SimpleNamespace(ranks=[[0] * length for length in lengths]))
            drafted.append(steps > 0)
        return len(drafted) - 50

    assert plain_rounds(first_is_slow=True) <= 30
    assert batch > 1 or plain_rounds(first_is_slow=False) > 100
