"""How deep and how wide to draft in the next round, or not at all: whatever commits most tokens a second.

    tokens a second of an arm = tokens it is expected to commit (running acceptance) / seconds it takes (step costs)

The arms are the engine's shape, smaller ones, and nothing (plain decoding). Both numbers are only kept up to date for
arms that run, so others are tried now and then. That is paid from an account: it earns a small share of all time, a
trial costs what it was slower than the best arm would have been, and is made only when the account can pay for it. So
trials that pay off follow each other at once, and those of a useless head stay within the share.

Choices depend on the clock; tokens do not, since every choice is lossless. Knows no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from toolkit.infer.draft_tree import DraftShape, candidates
from toolkit.infer.drafters.running_acceptance import RunningAcceptance
from toolkit.infer.drafters.step_costs import Arm, StepCosts
from toolkit.infer.request import Request

FIRST_ROUNDS = 3  # rounds of plain decoding and of the full shape before anything is concluded
TRIAL_SHARE = 0.01  # of all time may be lost by trying other arms
ACCOUNT_LIMIT = 2.0  # rounds' time that the account may hold or owe
START_MARGIN = 1.02  # drafting starts when it is that much faster than plain decoding, and ends when it is slower
CHANGE_MARGIN = 1.03  # another shape takes over when it is that much faster than the one in use


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
    """Chooses an arm for every round and learns from what came of it. `most`: the largest shape."""

    def __init__(self, most: DraftShape) -> None:
        self.most = most
        self.shapes = smaller_shapes(most)
        self._acceptance = RunningAcceptance(sorted({1, *(one.top_k for one in self.shapes)}), most.num_steps)
        self._costs = StepCosts()
        self._best: Arm = None
        self._chosen: Arm = None
        self._rounds = 0
        self._last_run: dict[Arm, int] = {}
        self._runs: Counter[Arm] = Counter()
        self._account = 0.0  # seconds
        self._trial_pace: float | None = None  # seconds a token by the best arm, while another one is tried
        self._expected: tuple[list[Request], dict[Arm, float]] | None = None  # None: rates changed

    def choose(self, requests: Sequence[Request]) -> Arm:
        """What to draft, at most, for these rows in the next round; None: nothing."""
        self._rounds += 1
        self._trial_pace = None
        arm = self._first_arm() if min(self._runs[None], self._runs[self.most]) < FIRST_ROUNDS else self._pick(requests)
        self._last_run[arm] = self._rounds
        self._chosen = arm
        return arm

    def record(
        self, requests: Sequence[Request], arm: Arm, ranks: Sequence[Sequence[int]], draft_s: float, verify_s: float
    ) -> None:
        """What came of the round. arm: what was drafted, None also where nothing was found to draft.

        ranks: of every row, those of its accepted nodes among their siblings, in order.
        """
        self._runs[arm] += 1
        self._costs.add(len(requests), arm, draft_s, verify_s)
        if arm is not None:
            for request, of_row in zip(requests, ranks, strict=True):
                if request.speculative:
                    own = arm if request.shape is None else request.shape.within(arm)
                    self._acceptance.add(request, own, of_row)
            self._expected = None
        if self._trial_pace is not None and arm == self._chosen:
            self._pay(len(requests), arm, 1 + sum(map(len, ranks)) / len(requests), self._trial_pace)

    def _first_arm(self) -> Arm:
        """Plain rounds and the full shape in turn: what all guesses start from."""
        return None if self._runs[None] <= self._runs[self.most] and self._runs[None] < FIRST_ROUNDS else self.most

    def _pick(self, requests: Sequence[Request]) -> Arm:
        """The best arm, or one whose trial can be paid."""
        tokens = self._tokens(requests)
        seconds = {arm: self._costs.seconds(len(requests), arm) for arm in tokens}
        known = {arm: cost for arm, cost in seconds.items() if cost is not None}
        speed = {arm: tokens[arm] / cost for arm, cost in known.items()}
        best = self._best = self._fastest(speed)
        pace, limit = 1 / speed[best], ACCOUNT_LIMIT * known[best]
        self._account = max(-limit, min(limit, self._account + TRIAL_SHARE * known[best]))
        prices = {arm: min(limit, max(0.0, cost - tokens[arm] * pace)) for arm, cost in known.items() if arm != best}
        # The one that has waited longest for what it costs.
        floor = TRIAL_SHARE * known[best]
        tried = max(prices, key=lambda arm: (self._rounds - self._last_run.get(arm, 0)) / max(prices[arm], floor))
        if self._account < max(prices[tried], floor):
            return best
        self._trial_pace = pace
        return tried

    def _fastest(self, speed: dict[Arm, float]) -> Arm:
        """With some patience, but never with a shape that is slower than plain decoding."""
        shapes = [arm for arm in speed if arm is not None]
        shape = max(shapes, key=lambda arm: speed[arm] * (CHANGE_MARGIN if arm == self._best else 1.0))
        return shape if speed[shape] > speed[None] * (START_MARGIN if self._best is None else 1.0) else None

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
        cost = self._costs.seconds(batch, arm)
        assert cost is not None, "an arm that ran has no cost"
        self._account -= cost - committed * pace
