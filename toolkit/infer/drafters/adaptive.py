"""Spend one budget of nodes over all running requests, or decode plainly: the round that takes least time a token.

    seconds a token of a request = seconds of the round (estimates.py) * mean over the rows of 1 / accept_length

For every shape of the head, and for a round in which it rests, `spend` gives each budget of nodes to the rows that gain
most by them. A row's nodes are the head's draft or lookup's, whichever is expected to get further:

    row 0   root  .90  .81  .73  .66       nodes by their chance to be accepted: a chain of 4 where the head is right,
    row 1   root  .30                      one node where it is not; the next node, at .25, would cost more time than
    row 2   root                           it gains. Row 2 drafts nothing.

Where forwards compute padding (CUDA graphs), each row may have as many nodes as the longest one, and a budget is that
width. The mean is harmonic, because rows that get ahead leave a batch that is not full: closed batches of 16 rows took
5 % longer than plain decoding with the arithmetic mean. What does not run is measured all the same:

- Acceptance by probes while nothing is drafted. The head reads the tokens committed since its last read, as it must to
  keep its cache up to date, and its first draft level is compared with the tokens that followed. A probe runs after 2,
  8, 32, 128, 128, .. plain rounds; after 8, if the one running request is new. Lookup needs no probes: every token
  shows whether it would have been right.
- Costs by trials, which an account pays for. It starts with START_CREDIT and earns TRIAL_SHARE of all time; a trial
  costs the time that it is expected to lose against the best round. Before a head's trial there is a probe.

In R rounds a useless head costs at most START_CREDIT + TRIAL_SHARE * R plain rounds, the excess of trials over their
price, and the probes. Choices depend on the clock. In float32 tokens do not; in bfloat16 they are equal or first part
at a near-tie.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import get_num_threads

from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.drafter import Drafter, WrappedDrafter
from toolkit.infer.drafters.estimates import RunningAcceptance, StepCosts, Steps, batch_bucket
from toolkit.infer.drafters.lookup import ComposedDrafter, with_chains
from toolkit.infer.request.draft_tree import PLAIN, DraftShape, DraftTree, smaller_shapes
from toolkit.infer.request.request import Request
from toolkit.infer.verify.verifiers import VerifyResult

FIRST_ROUNDS = 2  # plain rounds before any draft: the first round is often slow
BATCH_MARGIN = 1.1  # with several rows drafting must be faster than plain decoding by this factor
HOLD = 1.03  # drafting begins, and another draft replaces the current one, if it is faster by this factor
START_CREDIT, MOST_CREDIT = 0.9, 2.0  # the account at the start and at most, in plain rounds
TRIAL_SHARE = 0.006  # of all time, for trials
LEAST_PRICE = 0.1  # of a trial, in plain rounds: times and accept lengths are estimates
PROBE_PRICE = 0.3  # of the probe before a trial from plain decoding, in plain rounds
LEAST_LENGTH = 1.04  # expected accept_length from which a draft is tried
# Plain rounds before a probe: the first; one of a new request, before a trial or after drafting; the longest.
FIRST_PROBE, SOON, PROBE_GAP = 2, 8, 128
# Most rounds between two comparisons of all shapes, while a draft is the best, and while plain decoding is: at 16 rows
# a comparison takes a tenth of a round.
DRAFT_STANDS, PLAIN_STANDS = 8, 64
# With several rows, after so many rounds in which lookup did not draft, only every so many-th round searches the texts.
IDLE_ROUNDS, SEARCH_EVERY = 16, 8
LOOKUP = "lookup"  # the kind of a round in which lookup drafts and the head rests

Lengths = Sequence[Sequence[float]]  # by row, the expected accept_length of lookup's draft by depth from 0
Kind = DraftShape | str  # of a round: what the head drafts, else LOOKUP or PLAIN


@dataclass(frozen=True)
class Plan:
    """A round. shape: what the head drafts; None: it rests. width: verified nodes a row in the mean; 1: a plain round.

    By row: depths: tokens that lookup drafts in the head's place; 0: none. kept: nodes of the head's draft that are
    verified, root included. Empty: no row has lookup's draft; all rows keep all of the head's.
    length, seconds: the expected accept_length, the harmonic mean over the rows, and the expected time.
    """

    shape: DraftShape | None = None
    width: float = 1
    depths: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    length: float = 1.0
    seconds: float = 1.0

    @property
    def kind(self) -> Kind:
        return self.shape or (LOOKUP if self.width > 1 else PLAIN)


def spend(rows: Sequence[Steps], widths: Iterable[float], *, packed: bool) -> Iterator[tuple[list[int], float]]:
    """Yields for each of the ascending widths the best numbers of nodes by row, and the expected accept_length. Ends
    when all steps are taken.

    packed: the rows share width * len(rows) nodes; else each row may have `width` of them."""
    steps = []  # those to take first are the last
    for row, own in enumerate(rows):
        before, short = 1, 1.0
        for nodes, long in own:  # gains fall along a row
            gain = 1 / short - 1 / long
            steps.append((gain / (nodes - before) if packed else -nodes, -nodes, row, nodes - before, gain))
            before, short = nodes, long
    steps.sort()
    counts, inverse, spent = [1] * len(rows), float(len(rows)), len(rows)
    for width in widths:
        while steps and (spent + steps[-1][3] <= width * len(rows) if packed else -steps[-1][1] <= width):
            _, nodes, row, more, gain = steps.pop()
            counts[row], inverse, spent = -nodes, inverse - gain, spent + more
        yield list(counts), len(rows) / inverse
        if not steps:
            return


class AdaptiveShape:
    """Chooses the plan of every round and learns from its result.

    most: the largest shape. known: what was measured before; without it, the first rounds are plain.
    fixed: returns the plan of some rows that is not to be chosen, as a search found; None: the choice is free.
    packed: forwards compute no padding. probe_due: after `choose` returned a plain round, whether it must probe the
    head. `probed` takes the probe's ranks.
    """

    packed = False

    def __init__(
        self,
        most: DraftShape,
        known: StepCosts | None = None,
        fixed: Callable[[Sequence[Request]], Plan | None] = lambda _: None,
    ) -> None:
        more = [one for one in (known.shapes if known else ()) if one.fits_in(most)]
        self.fixed, self.shapes = fixed, list(dict.fromkeys([*smaller_shapes(most), *more]))
        self._top_ks = sorted({1, *(one.top_k for one in self.shapes)})
        self.most, self.widest = most, self._top_ks[-1]
        self._costs, self._threads = known or StepCosts(), get_num_threads()
        self._rounds = FIRST_ROUNDS if known else 0
        self._picked = 0  # the round of the last `_pick`
        self._last_run: dict[Kind, int] = {}
        self._credit, self._price = START_CREDIT, 0.0  # the account, and the price of the current round's trial
        self.forget_acceptance()

    def forget_acceptance(self) -> None:
        """Starts again with the rates of acceptance, as after new weights, and keeps the times."""
        self.probe_due = False
        self._acceptance = RunningAcceptance(self._top_ks, self.most.num_steps)
        self._best: Kind = PLAIN
        # Rounds from the last comparison of all shapes to the next; the last one's rows; whether a probe came after it.
        self._wait, self._compared, self._news = 1, 0, False
        self._unread, self._gap = 0, FIRST_PROBE  # plain rounds since the head's last read; before the next probe

    def choose(self, requests: Sequence[Request], lookup: Lengths = ()) -> Plan:
        """Returns the next round of these rows. lookup: the expected accept_length of lookup's drafts; empty: they
        were not searched for."""
        self._rounds += 1
        if self._threads != get_num_threads():
            self._threads = get_num_threads()
            self._costs.forget_plain()
        self._credit, self._price = min(self._credit + TRIAL_SHARE, MOST_CREDIT), 0.0
        self.probe_due, plan = False, self.fixed(requests)
        if plan is None:
            known = self._rounds > FIRST_ROUNDS and self._costs.plain(len(requests)) is not None
            plan = self._pick(requests, lookup) if known else Plan()
            # Probe before a head's first trial, and after a pause: drafting would include the read of unread positions.
            new = len(requests) == 1 and not self._acceptance.knows(requests[0])
            self.probe_due = self._unread >= (min(self._gap, SOON) if new or plan.shape is not None else self._gap)
        if self.probe_due:
            plan, self._price = Plan(), 0.0
        self._credit -= self._price
        self._unread = 0 if plan.shape is not None else self._unread + 1
        self._last_run[plan.kind] = self._rounds
        return plan

    def probed(self, requests: Sequence[Request], ranks: Sequence[Sequence[int]]) -> None:
        """Takes the result of a probe.

        ranks: by row and position, the rank of the right token among the drafts; `widest` if it is absent.
        """
        self._unread, self._gap, self._news = 0, min(4 * self._gap, PROBE_GAP), True
        for request, of_row in zip(requests, ranks, strict=True):
            if request.speculative and len(request.output_ids) > SOON:
                self._acceptance.add(request, [], 0, 1)  # it is known, even if no rank is
            for rank in of_row if request.speculative else ():
                self._acceptance.add(request, [rank] if rank < self.widest else [], 1, self.widest)

    def record(
        self, requests: Sequence[Request], plan: Plan, ranks: Sequence[Sequence[int]], draft_s: float, verify_s: float
    ) -> None:
        """Takes the result of a round. plan: the one chosen; a plain one if the drafter found no draft.

        ranks: by row, the ranks of the accepted nodes among their siblings, by level. draft_s, verify_s: seconds.
        """
        self._costs.add(len(requests), plan.shape, plan.width, draft_s, verify_s)
        if plan.shape is None:
            return
        rows = len(requests)
        kept, depths = plan.kept or [plan.shape.num_draft_tokens] * rows, plan.depths or [0] * rows
        for request, of_row, nodes, depth in zip(requests, ranks, kept, depths, strict=True):
            if request.speculative and depth == 0 and nodes > 1:
                own = plan.shape if request.shape is None else request.shape.within(plan.shape)
                tree = None if own.is_chain else own
                self._acceptance.add(request, of_row, min(own.num_steps, nodes - 1), own.top_k, tree)

    def refund(self, plan: Plan) -> None:
        """Takes a round that tells nothing: a trial costs nothing, and is soon repeated."""
        self._credit += self._price
        self._last_run.pop(plan.kind, None)

    def _pick(self, requests: Sequence[Request], lookup: Lengths) -> Plan:
        """Returns the best plan, or one to try if the account can pay for it.

        While the best kind stays the same, all shapes are compared ever more rarely; in other rounds it alone, plain
        decoding and lookup are."""
        margin = 1.0 if len(requests) == 1 else BATCH_MARGIN
        # Whether lookup's drafts would pay if they took no time.
        looks = bool(lookup) and len(lookup) > sum(1 / one[-1] for one in lookup) * margin * HOLD
        wait = min(self._wait, SOON) if looks else self._wait
        # Where lookup was the best kind and finds nothing, another one may be.
        ended = self._best == LOOKUP and not looks
        whole = self._news or ended or len(requests) != self._compared or self._rounds >= self._picked + wait
        if self._best == PLAIN and not whole and not looks:
            return Plan()
        plans = self._plans(requests, lookup, None if whole else self._best)
        speeds = {kind: one.length / one.seconds for kind, one in plans.items()}
        held = {kind: speed * (HOLD if kind == self._best else 1) for kind, speed in speeds.items() if kind != PLAIN}
        best = max(held, key=held.__getitem__, default=PLAIN)
        if speeds[best] <= speeds[PLAIN] * margin * (HOLD if self._best == PLAIN else 1):
            best = PLAIN
        if best != self._best:
            self._best, self._wait = best, 1
        elif whole:
            self._wait = min(2 * self._wait, PLAIN_STANDS if best == PLAIN else DRAFT_STANDS)
        if isinstance(best, DraftShape):
            self._gap = SOON  # if drafting ends, it may soon pay again
        if not whole:
            return plans[best]
        self._picked, self._compared, self._news = self._rounds, len(requests), False
        return self._trial(plans, best) or plans[best]

    def _trial(self, plans: dict[Kind, Plan], best: Kind) -> Plan | None:
        """Returns the plan to try in place of the best one; None: nothing, or the account cannot pay for it."""
        probe = PROBE_PRICE if best == PLAIN else 0.0
        pace = plans[best].seconds / plans[best].length
        prices = {
            kind: probe + max(LEAST_PRICE, (one.seconds - one.length * pace) / plans[PLAIN].seconds)
            for kind, one in plans.items()
            if kind != best and (kind == PLAIN or one.length > LEAST_LENGTH)
        }
        # Try the kind with the longest wait in proportion to its price.
        tried = max(prices, key=lambda kind: (self._rounds - self._last_run.get(kind, 0)) / prices[kind], default=best)
        if tried == best or prices[tried] > self._credit:
            return None
        self._price, self._wait = prices[tried], 1
        return plans[tried]

    def _plans(self, requests: Sequence[Request], lookup: Lengths, only: Kind | None = None) -> dict[Kind, Plan]:
        """Returns the best plan of each kind of round. only: the one kind to look at beside plain decoding and lookup;
        None: all."""
        batch, packed = len(requests), self.packed and len(requests) > 1
        shapes = [one for one in self.shapes if only in (None, one)]
        steps = self._acceptance.steps(requests, shapes)
        verify = self._costs.verify(batch, [one.num_draft_tokens for one in self.shapes])
        plans: dict[Kind, Plan] = {PLAIN: Plan(seconds=verify[1])}
        nothing: list[Steps] = [[] for _ in requests]
        texts = [list(enumerate(one[1:], start=2)) for one in lookup] or nothing
        drafts = [0.0, *self._costs.draft(batch, shapes)]
        for shape, head, draft_s in zip((None, *shapes), (nothing, *steps), drafts, strict=True):
            pairs = list(zip(texts, head, strict=True))
            by_text = [bool(text) and (not own or text[-1][1] > own[-1][1]) for text, own in pairs]
            if shape and not any(own and not looked for own, looked in zip(head, by_text, strict=True)):
                continue  # no row is left to the head
            rows = [text if looked else own for (text, own), looked in zip(pairs, by_text, strict=True)]
            least = shape.num_draft_tokens if shape and not packed else 1.01
            widths = [width for width in verify if width >= least and (packed or width == int(width))]
            for width, (counts, length) in zip(widths, spend(rows, widths, packed=packed), strict=False):
                seconds, best = draft_s + verify[width], plans.get(shape or LOOKUP)
                if length > 1 and (best is None or length / seconds > best.length / best.seconds):
                    depths = tuple(n - 1 if looked else 0 for n, looked in zip(counts, by_text, strict=True))
                    kept = tuple(1 if looked else n for n, looked in zip(counts, by_text, strict=True))
                    plan = Plan(shape, width, depths, kept if packed and shape else (), length, seconds)
                    plans[shape or LOOKUP] = plan
        return plans


class AdaptiveDrafter(WrappedDrafter):
    """Drafts with `inner`, nothing deeper, wider or larger than `shape`. clock: seconds, as time.perf_counter.

    A round lasts from propose to observe, when the target's choices have reached the host. The engine's work between
    observe and the next propose (host work, other prompts) is the same for all plans.

    packed: forwards compute no padding. first_is_slow: nothing is learned from the first round of a kind at a batch
    size. On a GPU it loads kernels and allocates memory; as the only one of its kind it would keep it from being tried
    again for hundreds of rounds. On a CPU nothing is compiled in a round.
    """

    def __init__(
        self,
        inner: Drafter,
        shape: DraftShape,
        clock: Callable[[], float] = time.perf_counter,
        *,
        packed: bool = False,
        first_is_slow: bool = False,
    ) -> None:
        super().__init__(inner)
        self._clock, self._packed, self._first_is_slow = clock, packed, first_is_slow
        self._idle = 0  # rounds since lookup drafted
        self._ran: set[tuple[int, Kind, float]] = set()  # batch size, kind and width of earlier rounds
        self._make_chooser: Callable[[DraftShape], AdaptiveShape] = AdaptiveShape
        self.set_shape(shape)

    def choose_by(self, make_chooser: Callable[[DraftShape], AdaptiveShape]) -> None:
        """Replaces the chooser. make_chooser: returns a chooser for the largest shape."""
        self._make_chooser = make_chooser
        self.set_shape(self._shape)

    def set_shape(self, shape: DraftShape) -> None:
        self.inner.set_shape(shape)
        self._shape, self.chooser = shape, self._make_chooser(shape)
        self.chooser.packed = self._packed
        self._round: tuple[Plan, DraftTree, float, float] | None = None

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
        lookup_rests = len(requests) > 1 and self._idle >= IDLE_ROUNDS and self._idle % SEARCH_EVERY > 0
        texts = [] if composed is None or lookup_rests else composed.lookups(requests)
        plan = self.chooser.choose(requests, [lengths for _, lengths in texts])
        self._idle = 0 if any(plan.depths) else self._idle + 1
        if self.chooser.probe_due:
            tree, ranks = self.inner.probe(requests, rows, self.chooser.widest)
            self.chooser.probed(requests, ranks)
            started = self._clock()  # the time of a plain round excludes the probe
        elif plan.shape is None:
            tree = self.inner.skip(requests, rows)
        else:
            self.inner.set_shape(plan.shape)
            tree = (self.inner if composed is None else composed.inner).propose(requests, rows)
        if plan.kept:
            tree = tree.first_nodes(plan.kept)
        if any(plan.depths):
            drafts = [tokens[:depth] for (tokens, _), depth in zip(texts, plan.depths, strict=True)]
            tree = with_chains(tree, rows.roots, drafts)
        self._round = (plan, tree, started, self._clock())
        return tree

    def observe(self, requests: Sequence[Request], result: VerifyResult) -> None:
        self.inner.observe(requests, result)
        if self._round is None:
            return
        plan, tree, started, proposed = self._round
        self._round = None
        if tree.nodes == 1 and not self.inner.ends_chains:
            plan = Plan()  # n-gram lookup has found nothing for any row
        kind = batch_bucket(len(requests)), plan.kind, plan.width
        if self._first_is_slow and kind not in self._ran:
            self._ran.add(kind)
            self.chooser.refund(plan)
        else:
            self.chooser.record(requests, plan, result.ranks, proposed - started, self._clock() - proposed)
