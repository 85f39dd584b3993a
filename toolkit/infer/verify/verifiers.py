"""How drafts of requests that draw (temperature above 0) are accepted: three rules, each exact in law.

target       the target draws a token at every node; a child that carries it is accepted. Drafts may come from anywhere,
             and a set of siblings is accepted with the probability that the target gives to the set. The draws depend
             on (seed, position, logits) alone, so that speculative and plain runs of one seed write the same tokens.
rejection    chains whose drafts the head drew from its own law q: x is accepted with probability min(1, p(x) / q(x)),
             else a token is drawn from what q lacks, norm(max(p - q, 0)) (Leviathan et al., arXiv 2211.17192,
             algorithm 1; Chen et al., arXiv 2302.01318).
block        the same chains, accepted together from their end, so that never fewer are kept in the mean
             (Sun et al., arXiv 2403.10444, algorithm 2).

With the last two a speculative run writes other tokens than a plain run of the same seed: only the law is the same.
`auto` is block, and target for requests that state a seed, whose tokens then depend on nothing else.

A rule gives a token for every node; `verify.walk` steps to the child that carries it. In a chain of two drafts a, b of
which a is kept, and y is drawn behind it:

    node      root  a  b
    q of      a     b  -       the law that the next node's token was drawn from
    p of      a     b  -       the target's law at the same place
    token     a     y  y

Shapes: B rows of the batch, R of them draw, N nodes a row, n of them looked at here, V vocabulary.
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

LOGIT_ROWS = 512  # rows of logits held at once, where nodes are looked at one by one

# (distributions of R rows, logits [R, n, V], positions [R, n], trees of the batch, rows [R]) -> tokens [R, n]
Choose = Callable[[RowDistributions, Tensor, Tensor, DraftTree, Tensor], Tensor]


@dataclass(frozen=True)
class DrawnChains:
    """Chains of drafts that were drawn, with both distributions.

    p [R, N, V]: the target's law of the token behind each node. q [R, N, V]: the law that this token's draft was drawn
    from, all 0 where there is no draft. drafts [R, N]: its id (any where there is none). drafted [R, N] bool.
    coins [R, N] in [0, 1): what decides about that draft.
    """

    p: Tensor
    q: Tensor
    drafts: Tensor
    drafted: Tensor
    coins: Tensor

    def at_drafts(self) -> tuple[Tensor, Tensor]:
        """p and q of the drafts themselves, [R, N]."""
        ids = self.drafts[:, :, None]
        return self.p.gather(2, ids).squeeze(2), self.q.gather(2, ids).squeeze(2)


# -> how many drafts are kept [R], and weights [R, V] of the law of the token behind them.
Rule = Callable[[DrawnChains], tuple[Tensor, Tensor]]


def rejection(chains: DrawnChains) -> tuple[Tensor, Tensor]:
    """Draft by draft. Where all are kept q is 0, and the token behind them is drawn from p."""
    p, q = chains.at_drafts()
    accepted = chains.drafted & (chains.coins * q < p)
    kept = accepted.long().cumprod(dim=1).sum(dim=1)
    row = torch.arange(len(kept), device=kept.device)
    return kept, (chains.p[row, kept] - chains.q[row, kept]).clamp(min=0)


def block(chains: DrawnChains) -> tuple[Tensor, Tensor]:
    """Algorithm 2: the longest prefix X^i whose coin lies below h_i.

    w_i = min(1, w_{i-1} p(x_i) / q(x_i)), and with p and q behind X^i
    m_i = sum(max(w_i p - q, 0)), h_i = m_i / (m_i + 1 - w_i).
    Behind the last draft q is 0, so that h = m = w there, as the paper has it. The token behind X^i comes from
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
    # 0 / 0 means that p and q are equal from here on: whatever is drafted behind is kept.
    whole = mass + (1 - w)
    h = torch.where(whole > 0, mass / whole, 1.0)
    passes = chains.drafted[:, :-1] & (chains.coins[:, :-1] < h[:, 1:])
    number = torch.arange(1, w.shape[1], device=w.device)
    kept = (passes * number).amax(dim=1)
    return kept, left[torch.arange(len(kept), device=kept.device), kept]


def settle(rule: Rule, chains: DrawnChains, u: Tensor) -> Tensor:
    """The tokens of all nodes, [R, N]: the drafts kept, then the one drawn behind them with its number u [R, N]."""
    kept, left = rule(chains)
    row = torch.arange(len(kept), device=kept.device)
    # Nothing left: p and q differ by rounding only.
    left = torch.where(left.sum(dim=-1, keepdim=True) > 0, left, chains.p[row, kept])
    drawn = draw_from(left, u[row, kept])
    number = torch.arange(chains.drafts.shape[1], device=kept.device)
    return torch.where(number < kept[:, None], chains.drafts, drawn[:, None])


def target_draws(
    distributions: RowDistributions, logits: Tensor, positions: Tensor, tree: DraftTree, rows: Tensor
) -> Tensor:
    """The target's own draws."""
    return distributions.draw(logits, positions)


def by(rule: Rule) -> Choose:
    """Choose by a rule for drawn chains, whose nodes have to be given all at once."""

    def choose(
        distributions: RowDistributions, logits: Tensor, positions: Tensor, tree: DraftTree, rows: Tensor
    ) -> Tensor:
        if tree.proposal is None:  # roots only: nothing was drafted
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
    """A rule with what it needs.

    draws_drafts: the head has to draw its drafts, and to keep q with them. keeps_seeds: not those of requests that
    state a seed, which are followed.
    """

    name: str
    choose: Choose
    draws_drafts: bool
    keeps_seeds: bool = False

    def draws_for(self, request: Request) -> bool:
        """Whether the drafts of a request are drawn."""
        drawn = self.draws_drafts and request.params.temperature > 0
        return drawn and not (self.keeps_seeds and request.states_seed)

    def check_shape(self, shape: DraftShape) -> None:
        """Raises `DraftShapeError` for a tree where only a chain will do."""
        if self.draws_drafts and not shape.is_chain:
            raise DraftShapeError(
                f'verify="{self.name}" came with draft shape {shape.name} ({shape.as_text()}); it needs a chain: draft '
                f'with {DraftShape.chain(shape.num_steps).as_text()}, or take verify="target", which verifies trees too'
            )


def nodes_at_once(rows: int, nodes: int, *, drawn: bool) -> int:
    """How many nodes of `rows` trees to look at together: all where drafts were drawn (q is held for all of them)."""
    return nodes if drawn else max(1, LOGIT_ROWS // rows)


TARGET = Verifier("target", target_draws, draws_drafts=False)
REJECTION = Verifier("rejection", by(rejection), draws_drafts=True)
BLOCK = Verifier("block", by(block), draws_drafts=True)
AUTO = Verifier("auto", by(block), draws_drafts=True, keeps_seeds=True)
VERIFIERS = {verifier.name: verifier for verifier in (AUTO, TARGET, REJECTION, BLOCK)}
