"""Choose the draft shape of the next round, or plain decoding: the arm that commits the most tokens per second.

    tokens per second of an arm = expected accept_length / seconds of a round (both estimates.py)

The arms are the engine's shape, smaller shapes, and None (plain decoding). With several rows, drafting must be faster
than plain decoding by a tenth (BATCH_MARGIN). Both estimates become outdated for arms that do not run:

- Acceptance is measured by probes while nothing is drafted. In a probe the head reads the tokens committed since its
  last read, as it must to keep its cache up to date. Its first draft level is compared with the tokens that followed.
  A probe runs after 2, 8, 32, 128, 128, .. plain rounds; after 8 to 48, if some rows were never probed. Where drafting
  several rows is far from paying (FAR), it runs after 128, whatever rows are new.
- Costs are measured by trials, which an account pays for. The account starts with START_CREDIT and earns TRIAL_SHARE
  of all time. A trial costs the time it loses against the best arm. A trial of a shape runs only if the account can pay
  for it, if the shape's expected accept_length exceeds START_MARGIN, and soon after a probe. While drafting, a trial
  that gains time pays into the account, so more trials follow. The first round of a batch size is plain.
- The node count of an arm is at most twice the largest one run at this batch size (or the next larger arm): twice the
  nodes take at most twice as long to verify.

On a GPU the first round of an arm at a batch size is neither timed nor charged (AdaptiveDrafter). Apart from it, in T
seconds, with plain rounds of p seconds, a useless head therefore costs at most

    START_CREDIT * p + TRIAL_SHARE * T  (trials)  +  the excess of one trial over its price (a debt)  +  probes

Probes cost (time of the head to read PROBE_GAP positions a row and to score PROBED positions) / (time of PROBE_GAP
plain rounds), about the head's share of the target's parameters. Demo target and its EAGLE-3 head, compiled, two cores
without AMX: 2.6 % at 16 rows, 1.2 % at 1. The probes before the first gap of PROBE_GAP rounds cost a third of that.

Choices depend on the clock. In float32 tokens do not; in bfloat16 they are equal or first part at a near-tie.

`LookupChoice` chooses in every round how deep lookup drafts, and whether the head drafts too (`lookup.py`):

    tokens per second of a row = harmonic mean over the rows of max(lookup's expected accept_length, the head's)
                                 / seconds of the round

The harmonic mean, because it is the time of a token that counts: rows without a match wait for a round with more nodes,
and rows that get ahead leave a batch that is not full. Closed batches of 16 rows took 5 % longer than plain decoding
with the mean, up to 7 % with the median. The head's shape is the one that has just been chosen, or None. Lookup's
expected lengths differ in every round, because the matches do; they are learned from every token, so lookup needs no
probes. Where depth 1 seems not to pay, it runs once in RETRY rounds that search the texts, so that one slow round does
not end lookup; deeper drafts follow when a shallower one has been measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import get_num_threads

from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.drafter import Drafter, WrappedDrafter
from toolkit.infer.drafters.estimates import Arm, ArmTime, LookupArm, RunningAcceptance, Shape, StepCosts, batch_bucket
from toolkit.infer.drafters.lookup import MOST_DEPTH, ComposedDrafter
from toolkit.infer.request.draft_tree import ADAPTIVE, PLAIN, DraftShape, DraftTree, candidate_count
from toolkit.infer.request.request import Request
from toolkit.infer.verify.verifiers import VerifyResult

FIRST_ROUNDS = 2  # plain rounds before any draft: the first round is often slow
START_CREDIT = 0.6  # initial balance of the account, in plain rounds
TRIAL_SHARE, DRAFTING_TRIAL_SHARE = 0.005, 0.015  # share of all time for trials: in plain decoding; while drafting
ACCOUNT_LIMIT = 8.0  # largest balance or debt of the account, in rounds of the best arm
LEAST_PRICE = 0.05  # least price of a trial for one row, in plain rounds: times and accept lengths are estimates
# With several rows drafting must be faster by this factor: rows that get ahead leave batches that are not full, which
# no round's cost shows (closed batches of 16 rows: 7 % longer with a draft in every seventh round).
BATCH_MARGIN = 1.1
START_MARGIN = 1.04  # extra factor to start drafting; drafting ends without it (hysteresis)
FAR = 0.85  # with several rows, below this share of the speed that starts drafting, new rows hasten no probe
CHANGE_MARGIN = 1.03  # another shape replaces the current one if it is faster by this factor
# Plain rounds before a probe: the first; one before a trial or after drafting; one with rows never probed; the longest.
# SOON: also the rounds that the choice of plain decoding stands while only times of plain rounds are new.
FIRST_PROBE, SOON, NEW_ROWS_GAP, PROBE_GAP = 2, 8, 48, 128

# With several rows, after so many rounds in which lookup did not draft, only every so many-th round searches the texts.
IDLE_ROUNDS, SEARCH_EVERY = 16, 8
DEPTHS = (1, 2, 3, 4, 6, 8, 11, MOST_DEPTH)  # of lookup's drafts
RETRY, RETRY_LENGTH = 128, 1.4  # rounds between retries of depth 1, and the expected accept_length that allows one
GREEDY, SAMPLED = "greedy", "sampled"  # kinds of requests: at temperature 0, and above

Lengths = Sequence[Sequence[float]]  # by row, the expected accept_length of lookup's draft by depth from 0
# Requests, and the accept_length of each arm: the mean over them, and by request.
Expected = tuple[list[Request], dict[Shape, float], dict[Shape, list[float]]]


def smaller_shapes(most: DraftShape) -> list[DraftShape]:
    """Returns the shapes to choose from, about ten at most: `most`, trees of half its depth or width, and chains."""
    steps, k, nodes = most.num_steps, most.top_k, most.num_draft_tokens
    found = [most]
    for width in sorted({k, max(2, k // 2)} if k > 1 else (), reverse=True):
        for depth in sorted({steps, (steps + 1) // 2}, reverse=True):
            share = depth * width / (steps * k)  # fewer nodes for a smaller tree
            wanted = max(depth + 1, round((nodes - 1) * share) + 1)
            found.append(DraftShape(depth, width, min(wanted, nodes, candidate_count(depth, width) + 1)))
    deepest = min(steps, nodes - 1)
    found += [DraftShape.chain(depth) for depth in (deepest, *(12, 8, 6, 4, 3, 2, 1)) if depth <= deepest]
    return list(dict.fromkeys(found))


class AdaptiveShape:
    """Chooses an arm for every round and learns from its result.

    most: the largest shape. known: times that were measured before, of shapes to choose from beside the usual ones;
    without any, the first rounds are plain. more: further shapes to choose from.
    probe_due: after `choose` returned None, whether this round must probe the head. `probed` takes the probe's ranks.
    """

    def __init__(self, most: DraftShape, known: Sequence[ArmTime] = (), more: Iterable[DraftShape] = ()) -> None:
        self.most = most
        searched = [one.arm for one in known if one.arm is not None and one.arm.fits_in(most)]
        self.shapes = list(dict.fromkeys([*smaller_shapes(most), *searched, *more]))
        self._widths = sorted({1, *(one.top_k for one in self.shapes)})
        self.widest = self._widths[-1]
        self._costs = StepCosts()
        self._threads = get_num_threads()
        self._rounds = self._plain_rounds = 0
        self._last_run: dict[Arm, int] = {}
        self.forget_acceptance()
        self._picked = 0  # the round of the last `_pick`
        self._account: float | None = None  # seconds; None before the first `_pick`
        self._lookup = LookupChoice()
        self.depths: list[int] = []  # of lookup, by row, in a round whose arm is a LookupArm
        self._trial_pace: float | None = None  # during a trial: seconds a token of the best arm
        plain = {one.batch: one for one in known if one.arm is None}
        for one in known:
            if one.arm in self.shapes and one.batch in plain:  # each beside a plain round of the same moment
                self._costs.add(one.batch, None, 0.0, plain[one.batch].verify_s)
                self._costs.add(one.batch, one.arm, one.draft_s, one.verify_s)
                self._plain_rounds = FIRST_ROUNDS

    def forget_acceptance(self) -> None:
        """Starts again with the rates of acceptance, as after new weights, and keeps the times."""
        self.probe_due = False
        self._acceptance = RunningAcceptance(self._widths, self.most.num_steps)
        self._expected: Expected | None = None  # None after the rates changed
        self._best: Shape = None
        self._chosen: Shape = None
        self._far = False  # whether the fastest shape is below FAR
        self._unread, self._gap = 0, FIRST_PROBE  # plain rounds since the head's last read; before the next probe
        self._probe_after: float = FIRST_PROBE  # as _gap, for the current rows

    def choose(self, requests: Sequence[Request], lookup: Lengths = ()) -> Arm:
        """Returns the largest shape to draft for these rows in the next round; None: draft nothing.

        lookup: by row, the expected accept_length of lookup's draft by depth. A LookupArm is returned if lookup drafts
        in some rows: then `depths` has its depth by row (0: none).
        """
        self._begin()
        arm: Shape = None
        if not self._settled(requests):
            arm = self._pick(requests) if self._plain_is_known(len(requests)) else None
            known = self._acceptance.known_share(requests)
            if self._far and self._gap > FIRST_PROBE:
                self._probe_after = PROBE_GAP
            else:
                self._probe_after = self._gap if known == 1 else min(self._gap, max(SOON, NEW_ROWS_GAP * known))
        # Probe before a head's first trial, and after a pause: drafting would include the read of unread positions.
        self.probe_due = self._unread >= (self._probe_after if arm is None or self._gap == FIRST_PROBE else SOON)
        if self.probe_due:
            arm = self._trial_pace = None
        return self._run(requests, arm, lookup)

    def _begin(self) -> None:
        """Begins a round."""
        self._rounds += 1
        self._trial_pace = None
        if self._threads != get_num_threads():
            self._threads, self._plain_rounds = get_num_threads(), 0
            self._costs.forget_plain()

    def _plain_is_known(self, batch: int) -> bool:
        return self._plain_rounds >= FIRST_ROUNDS and not self._costs.needs_plain(batch)

    def _run(self, requests: Sequence[Request], shape: Shape, lookup: Lengths) -> Arm:
        """Returns the arm of the round: `shape`, or where lookup drafts too and that is faster, a LookupArm."""
        self._chosen = shape
        if lookup and not self.probe_due and self._trial_pace is None and self._plain_is_known(len(requests)):
            head, margin = self._expect(requests)[2][shape], _margin(len(requests))
            if (choice := self._lookup.choose(lookup, shape, head, self._costs, margin)) is not None:
                self.depths, arm = choice
                if arm.shape is not None:
                    self._unread, self._last_run[shape] = 0, self._rounds
                return arm
        self._unread = 0 if shape is not None else self._unread + 1
        self._last_run[shape] = self._rounds
        return shape

    def probed(self, requests: Sequence[Request], ranks: Sequence[Sequence[int]]) -> None:
        """Takes the result of a probe.

        ranks: by row and position, the rank of the right token among the drafts; `widest` if it is absent.
        """
        self._unread, self._gap = 0, min(4 * self._gap, PROBE_GAP)
        for request, of_row in zip(requests, ranks, strict=True):
            if request.speculative and (of_row or len(request.output_ids) > SOON):  # else the request is too new
                self._acceptance.probe(request, of_row)
        self._expected = None

    def record(
        self,
        requests: Sequence[Request],
        arm: Arm,
        ranks: Sequence[Sequence[int]],
        draft_s: float,
        verify_s: float,
        timed: bool = True,
    ) -> None:
        """Takes the result of a round. arm: the shape drafted; None also if the drafter found no draft.

        ranks: by row, the ranks of the accepted nodes among their siblings, by level. draft_s, verify_s: seconds.
        timed: whether later rounds take as long; else a trial of the arm costs nothing, and it is soon tried again.
        """
        shape = arm.shape if isinstance(arm, LookupArm) else arm
        if timed:
            self._costs.add(len(requests), arm, draft_s, verify_s)
        else:
            self._last_run.pop(shape, None)
        if arm is None and timed:
            self._plain_rounds += 1
        if shape is not None:
            depths = self.depths if isinstance(arm, LookupArm) else [0] * len(requests)
            for request, of_row, depth in zip(requests, ranks, depths, strict=True):
                if request.speculative and depth == 0:
                    own = shape if request.shape is None else request.shape.within(shape)
                    self._acceptance.add(request, own, of_row)
            self._expected = None
        if timed and self._trial_pace is not None and arm == self._chosen:
            self._pay(len(requests), arm, 1 + sum(map(len, ranks)) / len(requests), self._trial_pace)

    def _settled(self, requests: Sequence[Request]) -> bool:
        """Returns whether plain decoding stands: for SOON rounds, if only times of rounds are new."""
        news = self._expected is None or self._expected[0] != requests
        return self._best is None and self._chosen is None and not news and self._rounds < self._picked + SOON

    def _pick(self, requests: Sequence[Request]) -> Shape:
        """Returns the best arm, or an arm to try if the account can pay for it."""
        waited, self._picked = self._rounds - self._picked, self._rounds
        tokens, costs = self._expect(requests)[1], self._costs.all(len(requests), (None, *self.shapes))
        speed = {arm: tokens[arm] / cost for arm, cost in costs.items()}
        margin = _margin(len(requests))
        best = self._best = self._fastest(speed, margin)
        fastest = max(speed[arm] for arm in speed if arm is not None)
        self._far = len(requests) > 1 and fastest < FAR * speed[None] * margin * START_MARGIN
        if best is not None:
            self._gap = SOON  # if drafting ends, it may soon pay again
        pace, limit = 1 / speed[best], ACCOUNT_LIMIT * costs[best]
        income = (TRIAL_SHARE if best is None else DRAFTING_TRIAL_SHARE) * costs[best]
        balance = START_CREDIT * costs[None] if self._account is None else self._account + waited * income
        self._account = max(-limit, min(limit, balance))
        least = 0.0 if best is not None else _least_price(len(requests)) * costs[None]
        prices = {
            arm: max(least, cost - tokens[arm] * pace)
            for arm, cost in costs.items()
            if arm != best and (arm is None or tokens[arm] > START_MARGIN)
        }
        if not prices:
            return best
        # Try the arm with the longest wait in proportion to its price.
        tried = max(prices, key=lambda arm: (self._rounds - self._last_run.get(arm, 0)) / max(prices[arm], income))
        if self._account < max(prices[tried], income):
            return best
        self._trial_pace = pace
        return tried

    def _fastest(self, speed: dict[Shape, float], margin: float) -> Shape:
        """Returns the fastest arm, with hysteresis. A shape must be `margin` times as fast as plain decoding."""
        shapes = [arm for arm in speed if arm is not None]
        shape = max(shapes, key=lambda arm: speed[arm] * (CHANGE_MARGIN if arm == self._best else 1.0))
        return shape if speed[shape] > speed[None] * margin * (START_MARGIN if self._best is None else 1.0) else None

    def _expect(self, requests: Sequence[Request]) -> Expected:
        """Returns the expected accept_length of each arm; cached until the rates or the rows change."""
        if self._expected is None or self._expected[0] != requests:
            drafted = zip(self.shapes, self._acceptance.by_request(requests, self.shapes), strict=True)
            by_request: dict[Shape, list[float]] = {None: [1.0] * len(requests), **dict(drafted)}
            tokens = {arm: sum(lengths) / len(requests) for arm, lengths in by_request.items()}
            self._expected = (list(requests), tokens, by_request)
        return self._expected

    def _pay(self, batch: int, arm: Arm, committed: float, pace: float) -> None:
        """Subtracts from the account the time that a trial lost against the best arm, or adds the time it gained.

        If the best arm is plain decoding, a trial costs at least the least price. Uses typical seconds of the arm.
        """
        assert self._account is not None, "a trial before anything was measured"
        cost = self._costs.seconds(batch, arm)
        least = _least_price(batch) * self._costs.seconds(batch, None)
        lost = cost - committed * pace
        self._account -= max(least, lost) if self._best is None else lost


def _margin(batch: int) -> float:
    """Returns the least factor by which drafting must be faster than plain decoding."""
    return 1.0 if batch == 1 else BATCH_MARGIN


def _least_price(batch: int) -> float:
    """Returns the least price of a trial from plain decoding, in plain rounds."""
    return max(LEAST_PRICE, _margin(batch) - 1)


class LookupChoice:
    """Compares lookup's drafts with the choice for the head."""

    def __init__(self) -> None:
        self._rounds, self._last = 0, -RETRY

    def choose(
        self,
        lookup: Lengths,
        shape: Shape,
        head: Sequence[float],
        costs: StepCosts,
        margin: float,
    ) -> tuple[list[int], LookupArm] | None:
        """Returns the depth of lookup by row (0: none) and the round to run; None: draft `shape` in all rows.

        lookup: expected accept_length of lookup's drafts. head: by row, that of `shape`. margin: the least factor by
        which drafting must be faster than plain decoding.
        """
        self._rounds += 1
        if all(len(one) == 1 for one in lookup):
            return None
        batch, deepest = len(lookup), max(map(len, lookup)) - 1
        shapes: list[Shape] = [None, *([] if shape is None else [shape])]
        rounds = {LookupArm(one, depth): depth for one in shapes for depth in DEPTHS if depth <= deepest}
        arms: list[Arm] = [None, shape, *rounds]
        known = costs.all(batch, arms)
        current = _mean(head) / known[shape] if shape in known else 0.0
        floor = max(current, margin / known[None])
        speeds = {
            arm: _mean(_lengths(lookup, rounds[arm], head if arm.shape else None)) / seconds
            for arm, seconds in known.items()
            if isinstance(arm, LookupArm)
        }
        best = max(speeds, key=speeds.__getitem__)
        if speeds[best] <= floor:
            least = LookupArm(None, 1)
            due = self._rounds - self._last >= RETRY and _mean(_lengths(lookup, 1, None)) >= RETRY_LENGTH
            if not due:
                return None
            best = least
        self._last = self._rounds
        depth = rounds[best]
        mine = _lengths(lookup, depth, None)
        theirs = head if best.shape else [1.0] * batch
        depths = [min(depth, len(one) - 1) if a > b else 0 for one, a, b in zip(lookup, mine, theirs, strict=True)]
        if not any(depths):
            return None
        # Without a row for the head, the round is one of lookup alone: its time says nothing of the head.
        left = best.shape is not None and any(b > 1 for own, b in zip(depths, theirs, strict=True) if own == 0)
        return depths, LookupArm(best.shape if left else None, max(depths))


def _mean(lengths: Sequence[float]) -> float:
    """Returns the harmonic mean; statistics.harmonic_mean takes ten times as long."""
    return len(lengths) / sum(1 / one for one in lengths)


def _lengths(lookup: Lengths, depth: int, head: Sequence[float] | None) -> list[float]:
    """Returns the expected accept_length of each row if lookup drafts `depth` tokens and the head the other rows."""
    mine = [one[min(depth, len(one) - 1)] for one in lookup]
    return mine if head is None else [max(pair) for pair in zip(mine, head, strict=True)]


class SearchedShape(AdaptiveShape):
    """Takes the winner of the smallest searched batch size that the running rows do not exceed.

    It chooses as AdaptiveShape does where adaptive drafting won, with more rows than were searched, for a kind of
    requests that was not searched, and for rows of both kinds whose winners differ.

    winners: by kind of requests and batch size a shape as text, PLAIN or ADAPTIVE. lookup: lookup may draft in place of
    a winner too. A search measures shapes and plain decoding without it, so this is for users who ask for lookup.
    """

    def __init__(
        self,
        most: DraftShape,
        known: Sequence[ArmTime],
        winners: Mapping[str, Mapping[int, str]],
        *,
        lookup: bool = False,
    ) -> None:
        settings = {one for of_kind in winners.values() for one in of_kind.values()} - {PLAIN, ADAPTIVE}
        shapes = {one: DraftShape.parse(one).within(most) for one in settings}
        super().__init__(most, known, shapes.values())
        self._winners, self._lookup_too = winners, lookup
        self._arms: Mapping[str, DraftShape | None] = {PLAIN: None, **shapes}

    def choose(self, requests: Sequence[Request], lookup: Lengths = ()) -> Arm:
        kinds = {SAMPLED if one.params.temperature > 0 else GREEDY for one in requests if one.speculative}
        settings = {self._winner(kind, len(requests)) for kind in kinds}
        setting = settings.pop() if len(settings) == 1 else ADAPTIVE
        if setting == ADAPTIVE:
            return super().choose(requests, lookup)
        self._begin()
        self.probe_due = False
        return self._run(requests, self._arms[setting], lookup if self._lookup_too else ())

    def _winner(self, kind: str, rows: int) -> str:
        sizes = self._winners.get(kind, {})
        size = min((one for one in sizes if one >= rows), default=None)
        return ADAPTIVE if size is None else sizes[size]


class AdaptiveDrafter(WrappedDrafter):
    """Drafts with `inner`, nothing deeper, wider or larger than `shape`. clock: seconds, as time.perf_counter.

    A round lasts from propose to observe, when the target's choices have reached the host. The engine's work between
    observe and the next propose (host work, other prompts) is the same for all shapes.

    first_is_slow: the first round of an arm at a batch size is not timed. On a GPU it compiles or loads kernels and
    allocates memory; as the only time of an arm it would keep the arm from being tried again for hundreds of rounds. On
    a CPU nothing is compiled in a round (torch.compile does it at the engine's start), and the second round of every
    arm would be one more that a useless head costs.
    """

    def __init__(
        self,
        inner: Drafter,
        shape: DraftShape,
        clock: Callable[[], float] = time.perf_counter,
        *,
        first_is_slow: bool = False,
    ) -> None:
        super().__init__(inner)
        self._clock = clock
        self._first_is_slow = first_is_slow
        self._idle = 0  # rounds since lookup drafted
        self._ran: set[tuple[int, Arm]] = set()  # batch size and arm of earlier rounds
        self._make_chooser: Callable[[DraftShape], AdaptiveShape] = AdaptiveShape
        self.set_shape(shape)

    def start_from(self, known: Sequence[ArmTime]) -> None:
        """Begins with these times of rounds, measured on this machine, in place of plain rounds and trials."""
        self.choose_by(lambda most: AdaptiveShape(most, known))

    def choose_by(self, make_chooser: Callable[[DraftShape], AdaptiveShape]) -> None:
        """Replaces the chooser. make_chooser: returns a chooser for the largest shape."""
        self._make_chooser = make_chooser
        self.set_shape(self._shape)

    def set_shape(self, shape: DraftShape) -> None:
        self.inner.set_shape(shape)
        self._shape, self.chooser = shape, self._make_chooser(shape)
        self._round: tuple[Arm, DraftTree, float, float] | None = None

    def weights_changed(self) -> None:
        self.inner.weights_changed()
        self.chooser.forget_acceptance()

    def reach(self, shape: DraftShape, *, skips: bool = False) -> int:
        return self.inner.reach(shape, skips=True)

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        self._round = None
        if not any(request.speculative for request in requests):
            return self.inner.propose(requests, rows)
        started = self._clock()
        composed = self.inner if isinstance(self.inner, ComposedDrafter) else None
        drafts = [] if composed is None or self._lookup_rests(len(requests)) else composed.lookups(requests)
        arm = self.chooser.choose(requests, [lengths for _, lengths in drafts])
        self._idle = 0 if isinstance(arm, LookupArm) else self._idle + 1
        shape = arm.shape if isinstance(arm, LookupArm) else arm
        if shape is not None:
            self.inner.set_shape(shape)
        if composed is not None and isinstance(arm, LookupArm):
            cut = [tokens[:depth] for (tokens, _), depth in zip(drafts, self.chooser.depths, strict=True)]
            tree = composed.compose(requests, rows, cut, head=shape is not None)
        elif shape is None and self.chooser.probe_due:
            tree, ranks = self.inner.probe(requests, rows, self.chooser.widest)
            self.chooser.probed(requests, ranks)
            started = self._clock()  # the time of a plain round excludes the probe
        elif shape is None:
            tree = self.inner.skip(requests, rows)
        else:
            tree = (self.inner if composed is None else composed.inner).propose(requests, rows)
        self._round = (arm, tree, started, self._clock())
        return tree

    def _lookup_rests(self, rows: int) -> bool:
        return rows > 1 and self._idle >= IDLE_ROUNDS and self._idle % SEARCH_EVERY > 0

    def observe(self, requests: Sequence[Request], result: VerifyResult) -> None:
        self.inner.observe(requests, result)
        if self._round is None:
            return
        arm, tree, started, proposed = self._round
        self._round = None
        headed = self.inner.ends_chains and not isinstance(arm, LookupArm)
        ran = arm if tree.nodes > 1 or headed else None  # n-gram lookup may have found nothing for any row
        kind = batch_bucket(len(requests)), ran
        timed = not self._first_is_slow or kind in self._ran
        self._ran.add(kind)
        self.chooser.record(requests, ran, result.ranks, proposed - started, self._clock() - proposed, timed)
