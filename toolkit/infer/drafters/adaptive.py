"""How deep and how wide to draft in the next round, or not at all: whatever commits most tokens a second.

    tokens a second of an arm = tokens it is expected to commit (running acceptance) / seconds it takes (step costs)

With several rows drafting has to be faster than plain decoding by a tenth (BATCH_MARGIN).
The arms are the engine's shape, smaller ones, and nothing (plain decoding). Both numbers age for arms that do not run:

- Acceptance, while nothing is drafted, comes from looks: the head reads what was committed meanwhile, as it must to
  keep its cache, and its first level is compared with the tokens that followed. Nothing is verified for that. A look
  comes after 2, 8, 32, 128, 128, .. plain rounds, and sooner (8 to 48) the more rows were never looked at.
- Costs come from trials. They are paid from an account: it starts with START_CREDIT and earns TRIAL_SHARE of all
  time; a trial costs what it was slower than the best arm would have been, and is made only when the account can pay
  for it, when the arm would pay if it were free, and right behind a look. Trials that pay off follow each other.
- Arms of more nodes than were ever run with so many rows come one doubling at a time, since twice the nodes take at
  most twice as long to verify: the one bad surprise that an estimate can hold is a small one.

So of T seconds, with plain rounds of p seconds, a useless head costs at most

    START_CREDIT * p + TRIAL_SHARE * T  (trials)  +  one trial's surprise, owed to the account  +  looks

and a look every PROBE_GAP rounds costs r = (the head's reading of PROBE_GAP positions a row, and PROBED rows of its
output matrix) / (PROBE_GAP plain rounds) of all time: about the head's share of the target's parameters where both are
bound by arithmetic, and more where plain rounds are bound by memory but this reading is not. Demo target and its
EAGLE-3 head, compiled, on two cores without AMX: r = 2.6 % at 16 rows, 1.2 % at 1. The looks before the first gap of
that length read 42 positions a row: in the 128 rounds of an answer that is a third of r.

Choices depend on the clock; tokens do not, since every choice is lossless. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.infer.drafters.running_acceptance import RunningAcceptance
from toolkit.infer.drafters.step_costs import Arm, StepCosts
from toolkit.infer.request.draft_tree import DraftShape, candidates
from toolkit.infer.request.request import Request

FIRST_ROUNDS = 2  # plain rounds before anything else: the first is often slow
START_CREDIT = 0.6  # plain rounds' time that may be lost by trials at once
TRIAL_SHARE, DRAFTING_TRIAL_SHARE = 0.005, 0.015  # of all time may be lost by trials; while drafting pays
ACCOUNT_LIMIT = 8.0  # rounds' time that the account may hold or owe
LEAST_PRICE = 0.05  # plain rounds' time of a trial for one row, at least: clocks err, and tokens are guessed
# With several rows drafting has to be that much faster: some get ahead, and the last ones run in batches that are not
# full, which no round's cost shows (closed batches of 16 rows: 7 % longer with a draft in every seventh round).
BATCH_MARGIN = 1.1
START_MARGIN = 1.04  # drafting starts when it is faster by so much more, and ends when it is not any more
CHANGE_MARGIN = 1.03  # another shape takes over when it is that much faster than the one in use
# Plain rounds before a look: the first, one with news to expect, one while some rows were never looked at, and at most.
# SOON is also how long the choice to draft nothing stands while nothing is learnt but plain rounds' seconds.
FIRST_PROBE, SOON, NEW_ROWS_GAP, PROBE_GAP = 2, 8, 48, 128


def smaller_shapes(most: DraftShape) -> list[DraftShape]:
    """What is chosen from: `most` itself, trees of half its depth and width, and chains; at most about ten."""
    steps, k, nodes = most.num_steps, most.top_k, most.num_draft_tokens
    found = [most]
    for width in sorted({k, max(2, k // 2)} if k > 1 else (), reverse=True):
        for depth in sorted({steps, (steps + 1) // 2}, reverse=True):
            share = depth * width / (steps * k)  # fewer nodes for fewer places to hang them
            wanted = max(depth + 1, round((nodes - 1) * share) + 1)
            found.append(DraftShape(depth, width, min(wanted, nodes, candidates(depth, width) + 1)))
    deepest = min(steps, nodes - 1)
    found += [DraftShape.chain(depth) for depth in (deepest, *(12, 8, 6, 4, 3, 2, 1)) if depth <= deepest]
    return list(dict.fromkeys(found))


class AdaptiveShape:
    """Chooses an arm for every round and learns from what came of it. `most`: the largest shape.

    probe_due: after `choose` gave None: whether the head is to be looked at in this round; `looked` takes what it saw.
    """

    def __init__(self, most: DraftShape) -> None:
        self.most = most
        self.shapes = smaller_shapes(most)
        self.widest = max(one.top_k for one in self.shapes)
        self.probe_due = False
        self._acceptance = RunningAcceptance(sorted({1, *(one.top_k for one in self.shapes)}), most.num_steps)
        self._costs = StepCosts()
        self._best: Arm = None
        self._chosen: Arm = None
        self._rounds = self._plain_rounds = 0
        self._last_run: dict[Arm, int] = {}
        self._unread, self._gap = 0, FIRST_PROBE  # plain rounds since the head read; after how many it is looked at
        self._probe_after: float = FIRST_PROBE  # the same, for the rows there are
        self._picked = 0  # the round of the last choice
        self._account: float | None = None  # seconds; None: no round was measured
        self._trial_pace: float | None = None  # seconds a token by the best arm, while another one is tried
        self._expected: tuple[list[Request], dict[Arm, float]] | None = None  # None: rates changed

    def choose(self, requests: Sequence[Request]) -> Arm:
        """What to draft, at most, for these rows in the next round; None: nothing."""
        self._rounds += 1
        self._trial_pace = None
        arm = None
        if not self._settled(requests):
            arm = None if self._plain_rounds < FIRST_ROUNDS else self._pick(requests)
            known = self._acceptance.known_share(requests)
            self._probe_after = self._gap if known == 1 else min(self._gap, max(SOON, NEW_ROWS_GAP * known))
        # Behind a pause drafting would be measured with the reading of all that waited. Nor is a head tried unseen.
        self.probe_due = self._unread >= (self._probe_after if arm is None or self._gap == FIRST_PROBE else SOON)
        if self.probe_due:
            arm = self._trial_pace = None
        self._unread = 0 if arm is not None else self._unread + 1
        self._last_run[arm] = self._rounds
        self._chosen = arm
        return arm

    def probed(self, requests: Sequence[Request], ranks: Sequence[Sequence[int]]) -> None:
        """A look: of every row, and every position it could be compared at, the rank of the right token; `widest`
        where it was not among the drafts."""
        self._unread, self._gap = 0, min(4 * self._gap, PROBE_GAP)
        for request, of_row in zip(requests, ranks, strict=True):
            if request.speculative and (of_row or len(request.output_ids) > SOON):  # else it is too new to tell
                self._acceptance.probe(request, of_row)
        self._expected = None

    def record(
        self, requests: Sequence[Request], arm: Arm, ranks: Sequence[Sequence[int]], draft_s: float, verify_s: float
    ) -> None:
        """What came of the round. arm: what was drafted, None also where nothing was found to draft.

        ranks: of every row, those of its accepted nodes among their siblings, in order.
        """
        self._costs.add(len(requests), arm, draft_s, verify_s)
        if arm is None:
            self._plain_rounds += 1
        else:
            for request, of_row in zip(requests, ranks, strict=True):
                if request.speculative:
                    own = arm if request.shape is None else request.shape.within(arm)
                    self._acceptance.add(request, own, of_row)
            self._expected = None
        if self._trial_pace is not None and arm == self._chosen:
            self._pay(len(requests), arm, 1 + sum(map(len, ranks)) / len(requests), self._trial_pace)

    def _settled(self, requests: Sequence[Request]) -> bool:
        """Whether the last choice, nothing, stands as it is: only the clock has told more since, a few rounds."""
        news = self._expected is None or self._expected[0] != requests
        return self._best is None and self._chosen is None and not news and self._rounds < self._picked + SOON

    def _pick(self, requests: Sequence[Request]) -> Arm:
        """The best arm, or one whose trial can be paid."""
        waited, self._picked = self._rounds - self._picked, self._rounds
        tokens, costs = self._tokens(requests), self._costs.all(len(requests), (None, *self.shapes))
        speed = {arm: tokens[arm] / cost for arm, cost in costs.items()}
        best = self._best = self._fastest(speed, _margin(len(requests)))
        if best is not None:
            self._gap = SOON  # should it end, there may soon be reason to start again
        pace, limit = 1 / speed[best], ACCOUNT_LIMIT * costs[best]
        income = (TRIAL_SHARE if best is None else DRAFTING_TRIAL_SHARE) * costs[best]
        earned = START_CREDIT * costs[None] if self._account is None else self._account + waited * income
        self._account = max(-limit, min(limit, earned))
        least = 0.0 if best is not None else _least_price(len(requests)) * costs[None]
        prices = {
            arm: max(least, cost - tokens[arm] * pace)
            for arm, cost in costs.items()
            if arm != best and (arm is None or tokens[arm] > START_MARGIN)
        }
        if not prices:
            return best
        # The one that has waited longest for what it costs.
        tried = max(prices, key=lambda arm: (self._rounds - self._last_run.get(arm, 0)) / max(prices[arm], income))
        if self._account < max(prices[tried], income):
            return best
        self._trial_pace = pace
        return tried

    def _fastest(self, speed: dict[Arm, float], margin: float) -> Arm:
        """With some patience, but never with a shape that is not `margin` times as fast as plain decoding."""
        shapes = [arm for arm in speed if arm is not None]
        shape = max(shapes, key=lambda arm: speed[arm] * (CHANGE_MARGIN if arm == self._best else 1.0))
        return shape if speed[shape] > speed[None] * margin * (START_MARGIN if self._best is None else 1.0) else None

    def _tokens(self, requests: Sequence[Request]) -> dict[Arm, float]:
        """What each arm is expected to commit a row; kept while neither the rates nor the rows change."""
        if self._expected is None or self._expected[0] != requests:
            expected = self._acceptance.expected(requests, self.shapes)
            tokens: dict[Arm, float] = {None: 1.0, **dict(zip(self.shapes, expected, strict=True))}
            self._expected = (list(requests), tokens)
        return self._expected[1]

    def _pay(self, batch: int, arm: Arm, committed: float, pace: float) -> None:
        """Take from the account what a trial lost against the best arm; what it gained is put in.

        By typical seconds: those of a single round say more about the machine's other work than about the arm.
        """
        assert self._account is not None, "a trial before anything was measured"
        cost = self._costs.seconds(batch, arm)
        least = _least_price(batch) * self._costs.seconds(batch, None)
        lost = cost - committed * pace
        self._account -= max(least, lost) if self._best is None else lost


def _margin(batch: int) -> float:
    """How much faster than plain decoding drafting has to be, at least."""
    return 1.0 if batch == 1 else BATCH_MARGIN


def _least_price(batch: int) -> float:
    """Plain rounds' time of a trial while nothing is drafted, at least."""
    return max(LEAST_PRICE, _margin(batch) - 1)
