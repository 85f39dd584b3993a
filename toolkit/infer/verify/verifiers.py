"""Rules that accept drafts of requests with temperature > 0. Each rule keeps the target's distribution exactly.

target       The target draws a token at every node; a child that carries this token is accepted. Drafts may come from
             any source. A set of siblings is accepted with the probability that the target gives to the set. The draws
             depend on (seed, position, logits) only, so speculative and plain runs of one seed write the same tokens.
rejection    For chains whose drafts are drawn from the head's distribution q. Draft x is accepted with probability
             min(1, p(x) / q(x)); after a rejection a token is drawn from norm(max(p - q, 0)) (Leviathan et al.,
             arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318).
block        For the same chains. It accepts a prefix of the chain as a whole, and keeps at least as many drafts in the
             mean as rejection (Sun et al., arXiv 2403.10444, algorithm 2).

With rejection and block, a speculative run and a plain run of one seed write different tokens of the same distribution.
`auto` uses target for requests that state a seed, so their tokens do not depend on the drafts, and block for the rest.

A rule returns a token for every node; `verify.walk` steps to the child that carries it. Example: a chain of two drafts
a, b; a is kept, and y is drawn after it:

    node      root  a  b
    q of      a     b  -       the distribution that the next node's token was drawn from
    p of      a     b  -       the target's distribution at the same place
    token     a     y  y

Shapes: B rows of the batch, R of them draw, N nodes a row, n nodes in this call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.infer.request.draft_tree import DraftShape, DraftTree
from toolkit.infer.request.errors import DraftShapeError
from toolkit.infer.request.request import Request
from toolkit.infer.verify.seeded_uniform import Stream
from toolkit.infer.verify.token_distribution import RowDistributions, draw_from

LOGIT_ROWS = 512  # rows of logits computed at once, where a rule does not need all nodes together

# (distributions of R rows, logits [R, n, V], positions [R, n], trees of the batch, rows [R]) -> tokens [R, n]
Choose = Callable[[RowDistributions, Tensor, Tensor, DraftTree, Tensor], Tensor]


@dataclass(frozen=True)
class DrawnChains:
    """Chains of drawn drafts with the distributions p and q. Entry i describes the draft after node i.

    p [R, N, V]: the target's distribution of the token after each node.
    q [R, N, V]: the distribution that the draft was drawn from; all 0 where there is no draft.
    drafts [R, N]: token id of the draft; any id where there is no draft.
    drafted [R, N] bool: whether there is a draft.
    coins [R, N]: the uniform number in [0, 1) that decides whether the draft is accepted.
    """

    p: Tensor
    q: Tensor
    drafts: Tensor
    drafted: Tensor
    coins: Tensor

    def at_drafts(self) -> tuple[Tensor, Tensor]:
        """Returns p(x) and q(x) of the drafts x, [R, N] each."""
        ids = self.drafts[:, :, None]
        return self.p.gather(2, ids).squeeze(2), self.q.gather(2, ids).squeeze(2)


# -> number of drafts kept [R], and weights [R, V] of the distribution of the token after them.
Rule = Callable[[DrawnChains], tuple[Tensor, Tensor]]


def rejection(chains: DrawnChains) -> tuple[Tensor, Tensor]:
    """Accepts draft by draft. After the last draft q is 0, so the token after a chain kept whole is drawn from p."""
    p, q = chains.at_drafts()
    accepted = chains.drafted & (chains.coins * q < p)
    kept = accepted.long().cumprod(dim=1).sum(dim=1)
    row = torch.arange(len(kept), device=kept.device)
    return kept, (chains.p[row, kept] - chains.q[row, kept]).clamp(min=0)


def block(chains: DrawnChains) -> tuple[Tensor, Tensor]:
    """Accepts the longest prefix X^i whose coin is below h_i (arXiv 2403.10444, algorithm 2).

    w_i = min(1, w_{i-1} p(x_i) / q(x_i)), w_0 = 1. With p and q of the token after X^i:
    m_i = sum(max(w_i p - q, 0)), h_i = m_i / (m_i + 1 - w_i).
    After the last draft q is 0, so h = m = w there, as in the paper. The token after X^i is drawn from
    norm(max(w_i p - q, 0)).
    """
    p, q = chains.at_drafts()
    ratios = torch.where(chains.drafted, p / q, 0.0)
    weights = [torch.ones_like(ratios[:, 0])]
    for ratio in ratios[:, :-1].unbind(dim=1):
        weights.append((weights[-1] * ratio).clamp(max=1.0))
    w = torch.stack(weights, dim=1)
    left = (w[:, :, None] * chains.p - chains.q).clamp(min=0)
    mass = left.sum(dim=-1)
    # 0 / 0 means that w is 1 and p equals q: the prefix is kept with certainty.
    whole = mass + (1 - w)
    h = torch.where(whole > 0, mass / whole, 1.0)
    passes = chains.drafted[:, :-1] & (chains.coins[:, :-1] < h[:, 1:])
    number = torch.arange(1, w.shape[1], device=w.device)
    kept = (passes * number).amax(dim=1)
    return kept, left[torch.arange(len(kept), device=kept.device), kept]


def settle(rule: Rule, chains: DrawnChains, u: Tensor) -> Tensor:
    """Returns the tokens of all nodes, [R, N]: the drafts kept, then the token drawn after them.

    u [R, N]: uniform numbers in [0, 1); the entry of the last kept node draws that token.
    """
    kept, left = rule(chains)
    row = torch.arange(len(kept), device=kept.device)
    # Where no weight is left, p and q differ by rounding only.
    left = torch.where(left.sum(dim=-1, keepdim=True) > 0, left, chains.p[row, kept])
    drawn = draw_from(left, u[row, kept])
    number = torch.arange(chains.drafts.shape[1], device=kept.device)
    return torch.where(number < kept[:, None], chains.drafts, drawn[:, None])


def target_draws(
    distributions: RowDistributions, logits: Tensor, positions: Tensor, tree: DraftTree, rows: Tensor
) -> Tensor:
    """Returns the tokens that the target draws."""
    return distributions.draw(logits, positions)


def by(rule: Rule) -> Choose:
    """Returns a Choose function that applies `rule` to drawn chains. It needs all nodes in one call."""

    def choose(
        distributions: RowDistributions, logits: Tensor, positions: Tensor, tree: DraftTree, rows: Tensor
    ) -> Tensor:
        if tree.proposal is None:  # no draft was drawn
            return target_draws(distributions, logits, positions, tree, rows)
        assert logits.shape[1] == tree.nodes, "a chain is accepted as a whole"
        drafts = torch.nn.functional.pad(tree.tokens[rows, 1:], (0, 1))
        drafted = torch.nn.functional.pad(tree.valid[rows, 1:], (0, 1))
        drawn = None if tree.proposal.drawn is None else tree.proposal.drawn[rows][:, None]
        if drawn is not None:
            drafted = drafted & drawn
        q = tree.proposal.scattered(rows, drafted, logits.shape[2])
        coins = distributions.round_uniform(positions[:, :1], positions, Stream.COIN)
        chains = DrawnChains(distributions.probs(logits), q, drafts, drafted, coins)
        settled = settle(rule, chains, distributions.target_uniform(positions))
        return settled if drawn is None else torch.where(drawn, settled, distributions.draw(logits, positions))

    return choose


@dataclass(frozen=True)
class Verifier:
    """A rule and its needs.

    draws_drafts: the head must draw its drafts and keep q with them.
    keeps_seeds: requests that state a seed are exempt; they use the rule `target`.
    """

    name: str
    choose: Choose
    draws_drafts: bool
    keeps_seeds: bool = False

    def draws_for(self, request: Request) -> bool:
        """Returns whether the head draws the drafts of this request."""
        drawn = self.draws_drafts and request.params.temperature > 0
        return drawn and not (self.keeps_seeds and request.states_seed)

    def check_shape(self, shape: DraftShape) -> None:
        """Raises `DraftShapeError` if `shape` is a tree and the rule needs a chain."""
        if self.draws_drafts and not shape.is_chain:
            raise DraftShapeError(
                f'verify="{self.name}" came with draft shape {shape.name} ({shape.as_text()}); it needs a chain: draft '
                f'with {DraftShape.chain(shape.num_steps).as_text()}, or take verify="target", which verifies trees too'
            )


def nodes_at_once(rows: int, nodes: int, *, drawn: bool) -> int:
    """Returns how many nodes of `rows` trees to score together: all of them if drafts were drawn, as `by` needs."""
    return nodes if drawn else max(1, LOGIT_ROWS // rows)


TARGET = Verifier("target", target_draws, draws_drafts=False)
REJECTION = Verifier("rejection", by(rejection), draws_drafts=True)
BLOCK = Verifier("block", by(block), draws_drafts=True)
AUTO = Verifier("auto", by(block), draws_drafts=True, keeps_seeds=True)
VERIFIERS = {verifier.name: verifier for verifier in (AUTO, TARGET, REJECTION, BLOCK)}
