"""Verification: the path through a draft tree that the target accepts, and the rules for requests with temperature > 0.

The target chooses a token at every node. The path starts at the root and steps to the child that carries the chosen
token, until no child does. Plain decoding writes the tokens chosen on this path:

    node on the path      root   p1    p2          accepted = 2 drafts
    its token             x      a     b
    target's choice       a      b     c           committed: a b c; a and b were drafted, c is the target's own

At temperature 0 the choice is the argmax. Above 0 a rule chooses. Each rule keeps the target's distribution exactly:

target       The target draws a token at every node; a child that carries this token is accepted. Drafts may come from
             any source. A set of siblings is accepted with the probability that the target gives to the set. The draws
             depend on (seed, position, logits) only, so speculative and plain runs of one seed write the same tokens
             in float32; in bfloat16 they are equal or first part at a near-tie.
rejection    For chains whose drafts are drawn from the head's distribution q. Draft x is accepted with probability
             min(1, p(x) / q(x)); after a rejection a token is drawn from norm(max(p - q, 0)) (Leviathan et al.,
             arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318).
block        For the same chains. It accepts a prefix of the chain as a whole, and keeps at least as many drafts in the
             mean as rejection (Sun et al., arXiv 2403.10444, algorithm 2).

With rejection and block, a speculative run and a plain run of one seed write different tokens of the same distribution.
`auto` uses target for requests that state a seed, so their tokens do not depend on the drafts, and block for the rest.

A rule returns a token for every node. Example: a chain of two drafts a, b; a is kept, and y is drawn after it:

    node      root  a  b
    q of      a     b  -       the distribution that the next node's token was drawn from
    p of      a     b  -       the target's distribution at the same place
    token     a     y  y

Shapes: B rows of the batch, R of them draw, N nodes a row, n nodes in this call, A longest path, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from toolkit.infer.kernels.dispatch import ops_for
from toolkit.infer.kernels.tree_reference import AcceptedPath
from toolkit.infer.request.draft_tree import DraftShape, DraftTree, upload
from toolkit.infer.request.params import DraftShapeError, EngineError, VerifyError
from toolkit.infer.request.request import Request
from toolkit.infer.verify.token_distribution import RowDistributions, Stream, draw_from, round_uniform

LOGIT_ROWS = 512  # rows of logits, and of the distributions of drawn chains, that are computed at once
NO_TOKEN = -1  # equals no choice

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


def target_draws(distributions: RowDistributions, logits: Tensor, positions: Tensor, *_: Any) -> Tensor:
    """Returns the tokens that the target draws."""
    return distributions.draw(logits, positions)


def by(rule: Rule) -> Choose:
    """Returns a Choose function that applies `rule` to drawn chains. It needs all nodes in one call."""

    def settled(
        distributions: RowDistributions, logits: Tensor, positions: Tensor, tree: DraftTree, rows: Tensor
    ) -> Tensor:
        assert tree.proposal is not None, "drafts were drawn"
        drafts = torch.nn.functional.pad(tree.tokens[rows, 1:], (0, 1))
        drafted = torch.nn.functional.pad(tree.valid[rows, 1:], (0, 1))
        drawn = None if tree.proposal.drawn is None else tree.proposal.drawn[rows][:, None]
        if drawn is not None:
            drafted = drafted & drawn
        q = tree.proposal.scattered(rows, drafted, logits.shape[2])
        coins = distributions.round_uniform(positions[:, :1], positions, Stream.COIN)
        chains = DrawnChains(distributions.probs(logits), q, drafts, drafted, coins)
        tokens = settle(rule, chains, distributions.target_uniform(positions))
        return tokens if drawn is None else torch.where(drawn, tokens, distributions.draw(logits, positions))

    def choose(
        distributions: RowDistributions, logits: Tensor, positions: Tensor, tree: DraftTree, rows: Tensor
    ) -> Tensor:
        if tree.proposal is None:  # no draft was drawn
            return distributions.draw(logits, positions)
        assert logits.shape[1] == tree.nodes, "a chain is accepted as a whole"
        size = max(1, LOGIT_ROWS // tree.nodes)  # p and q of all rows together may be large
        parts = [slice(start, start + size) for start in range(0, len(rows), size)]
        return torch.cat([settled(distributions.part(at), logits[at], positions[at], tree, rows[at]) for at in parts])

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
        own = self if request.verify is None else VERIFIERS[request.verify]
        drawn = own.draws_drafts and request.params.temperature > 0
        return drawn and not (own.keeps_seeds and request.states_seed)

    def of_request(self, name: str | None) -> str | None:
        """Returns the rule of a request that asks for `name`; None for this one.

        The drafts of a batch are accepted by one rule, and any row of it can leave the choice to the target. So a
        request may ask for "target", for this rule, and for "auto": this rule unless the request states a seed.
        Raises VerifyError for another name.
        """
        if name is None or name == self.name or (name == AUTO.name and not self.draws_drafts):
            return None
        possible = [one.name for one in VERIFIERS.values() if one is TARGET or one.choose is self.choose]
        if name in possible:
            return name
        raise VerifyError(
            f"a request has verify {name!r}, and this engine verifies by {self.name}: a request may ask for "
            f"{' or '.join(possible)}"
        )

    def check_shape(self, shape: DraftShape) -> None:
        """Raises `DraftShapeError` if `shape` is a tree and the rule needs a chain."""
        if self.draws_drafts and not shape.is_chain:
            raise DraftShapeError(
                f"`verify` is {self.name}, which needs a chain, but the draft shape is {shape.name} "
                f"({shape.as_text()}); use {DraftShape.chain(shape.num_steps).as_text()}, or set `verify` to target, "
                "which verifies trees too"
            )


def nodes_at_once(rows: int, nodes: int, *, drawn: bool) -> int:
    """Returns how many nodes of `rows` trees to score together: all of them if drafts were drawn, as `by` needs."""
    return nodes if drawn else max(1, LOGIT_ROWS // rows)


TARGET = Verifier("target", target_draws, draws_drafts=False)
REJECTION = Verifier("rejection", by(rejection), draws_drafts=True)
BLOCK = Verifier("block", by(block), draws_drafts=True)
AUTO = Verifier("auto", BLOCK.choose, draws_drafts=True, keeps_seeds=True)
VERIFIERS = {verifier.name: verifier for verifier in (AUTO, TARGET, REJECTION, BLOCK)}


def choose_verifier(name: str, shape: DraftShape | None, *, head: bool, recorded: bool = False) -> Verifier:
    """Returns the verifier of this name; "auto" becomes "target" without a head, for trees and with recorded rounds.

    shape: None if it is not known yet. head: whether a draft head drafts. recorded: whether rounds run as CUDA graphs,
    which draw no drafts.
    Raises EngineError if the verifier needs drawn drafts and there is no head. Raises DraftShapeError if the verifier
    needs a chain and `shape` is a tree.
    """
    verifier = VERIFIERS[name]
    if not verifier.draws_drafts:
        return verifier
    if verifier is AUTO and (not head or recorded or (shape is not None and not shape.is_chain)):
        return TARGET
    if not head:
        raise EngineError(
            f"`verify` is {name}, which needs a draft head; plain decoding and n-gram lookup have none: give one, or "
            "set `verify` to target"
        )
    if shape is not None:
        verifier.check_shape(shape)
    return verifier


@dataclass(frozen=True)
class VerifyResult:
    """The accepted path of every row of a batch of B.

    On the device:
    path [B, A]: node numbers, root first, then 0 after the end of a row's path. A = min(depth of the tree + 1, nodes).
    tokens [B, A]: the target's choice at each node of the path. These tokens are committed.

    On the host, by row:
    accepted: number of drafts accepted (path length - 1).
    path_nodes, path_tokens: `path` and `tokens` cut to the row's path.
    ranks: rank of each accepted node among its siblings, from 0, in the drafter's order of preference.
    offered: number of drafted nodes.
    depth_offered: depth of the deepest drafted node.
    extra_numbers: the values of `extra` in `read_result`, for the whole batch.
    nonfinite: numbers of the rows whose logits have NaN or infinity, so whose tokens mean nothing.
    """

    path: Tensor
    tokens: Tensor
    accepted: list[int]
    path_nodes: list[list[int]]
    path_tokens: list[list[int]]
    ranks: list[list[int]]
    offered: list[int]
    depth_offered: list[int]
    extra_numbers: list[int]
    nonfinite: frozenset[int] = frozenset()


def follow(tree: DraftTree, choices: Tensor) -> AcceptedPath:
    """Returns the accepted paths on the device, padded to A nodes. choices [B, N]: the target's token at every node."""
    follow_choices = ops_for(choices.device.type).follow_choices
    parts = (tree.tokens, tree.parents, tree.depths, tree.mask, tree.valid)
    return follow_choices(*parts, choices, min(tree.deepest + 1, tree.nodes), tree.is_chain)


def read_result(followed: AcceptedPath, extra: Callable[[Tensor], Tensor] | None = None) -> VerifyResult:
    """Copies the accepted paths to the host in one transfer.

    extra: maps `path` [B, A] to more numbers for the host, int64 of one dimension. The same transfer copies them.
    """
    numbers, more = followed.numbers, [] if extra is None else [extra(followed.path)]
    flat, (count, width) = torch.cat((numbers.flatten(), *more)).tolist(), numbers.shape
    rows = [flat[start : start + width] for start in range(0, count * width, width)]
    longest = (followed.numbers.shape[1] - 3) // 3
    of_path, of_tokens, of_ranks = (
        [row[start : start + 1 + row[0]] for row in rows] for start in (3, 3 + longest, 3 + 2 * longest)
    )
    return VerifyResult(
        followed.path, followed.tokens, [row[0] for row in rows], of_path, of_tokens, [row[1:] for row in of_ranks],
        [max(0, row[1]) for row in rows], [row[2] for row in rows], flat[count * width :],
        frozenset(at for at, row in enumerate(rows) if row[1] < 0),
    )  # fmt: skip


# -- acceptance by chance, for benchmarks of hardware ------------------------------------------------------------------


@dataclass(frozen=True)
class ForcedAcceptance:
    """Acceptance by chance: a step accepts drafts on the tree's deepest path, from the root on. How many is drawn from
    the rates; the target chooses the token after them. All else is computed as usual, so the times are those of a head
    with this accept_length. The text that is written has no meaning.

    An accept_length becomes the rates of least variance, as in vLLM's `synthetic_acceptance_length`:

        accept_length 3.6  ->  rates 1 1 0.6       every step accepts 2 drafts, 60 % of the steps a third one

    The chance is a pure function of the last committed token and its position, so a run can be repeated, and a recorded
    round needs no generator.
    rates: by depth from 1, the share of the steps that accept it, of those that accepted the depth before.
    """

    rates: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> ForcedAcceptance:
        """Parse an accept_length ("2.6", at least 1) or rates by depth ("0.8,0.6"). Raises EngineError."""
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) == 1 and 1 <= numbers[0] < float("inf"):
            whole, part = divmod(numbers[0] - 1, 1)
            return cls((1.0,) * int(whole) + ((round(part, 9),) if part > 0 else ()))
        if len(numbers) > 1 and all(0 <= number <= 1 for number in numbers):
            return cls(tuple(numbers))
        raise EngineError(
            f'forced accept_length "{text}": one number of at least 1 is needed (2.6: tokens per verify step, the '
            "bonus token included), or several rates from 0 to 1, one for each depth (0.8,0.6)"
        )

    @property
    def accept_length(self) -> float:
        """The mean number of tokens committed per verify step, bonus token included."""
        return round(1 + sum(accumulate(self.rates, mul)), 9)

    def check_shapes(self, shapes: Sequence[DraftShape]) -> None:
        """Raise DraftShapeError if one of the shapes is not as deep as the rates."""
        for shape in shapes:
            depth = min(shape.num_steps, shape.num_draft_tokens - 1)
            if depth < len(self.rates):
                raise DraftShapeError(
                    f"forced accept_length {self.accept_length:g} needs drafts of depth {len(self.rates)}, and a "
                    f"{shape.name} ({shape.as_text()}) has depth {depth}, so at most accept_length {depth + 1}: force "
                    "less, or draft deeper"
                )

    def __call__(self, tree: DraftTree, choices: Tensor, roots: Tensor, lengths: Tensor) -> tuple[DraftTree, Tensor]:
        """Return the tree and the choices [B, N] whose accepted path is the forced one.

        The tree keeps its tokens on that path only, so that the path ends where the rates say. choices [B, N]: the
        target's. roots, lengths [B]: the last committed token of each row and its position.
        """
        if tree.nodes == 1:  # a plain step
            return tree, choices
        depths = tree.depths.masked_fill(~tree.valid, NO_TOKEN)
        deepest = depths.argmax(dim=1)[:, None, None].expand(-1, 1, tree.nodes)
        forced = (
            tree.mask.gather(1, deepest)[:, 0] & (depths >= 1) & (depths <= self._accepted(roots, lengths)[:, None])
        )
        tokens = torch.where(forced, tree.tokens, NO_TOKEN)
        # The choice at the parent of a node on the path is that node's token. Other nodes write to one more column.
        widened = torch.nn.functional.pad(choices, (0, 1))
        parents = torch.where(forced, tree.parents, tree.nodes)
        return replace(tree, tokens=tokens), widened.scatter(1, parents, tokens)[:, :-1].contiguous()

    def _accepted(self, roots: Tensor, lengths: Tensor) -> Tensor:
        """Return how many drafts each row accepts, [B]."""
        if all(rate == 1 for rate in self.rates):  # coins would take time, which the engine's ceiling must not have
            return torch.full_like(roots, len(self.rates))
        rates = _on_device(self.rates, roots.device)
        depth = torch.arange(len(rates), device=rates.device)
        coins = round_uniform(roots[:, None], lengths[:, None], depth, Stream.COIN)
        return (coins < rates).long().cumprod(dim=1).sum(dim=1)


@cache  # never freed: recorded rounds read it
def _on_device(rates: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the rates, [D] fp64. A copy to the device cannot be recorded."""
    return upload(rates, device, torch.float64)
