"""One round of drafting: the head reads the unread positions, then the drafted nodes, level by level.

Shapes: B rows, P unread positions a row, M nodes a row (unread positions first, then drafted nodes as they are added),
n nodes added at a time, H head hidden size, S stages of the head, D size of the draft vocabulary, k beams,
C candidates a row.

A node is a token; the head reads it with the hidden state of the position before. With L tokens committed, x_{L-1} the
root, and k the stage (MTP layer) from 0:

    node (token)     ..  x_{L-2}   x_{L-1}   level 1   level 2
    position         ..  L-3-k     L-2-k     L-1-k     L-k       in stage k
    hidden           stage 0: the target's feature, for nodes up to x_{L-1}
                     stage k > 0: the output of stage k-1 at the parent
                     levels beyond the number of stages: the output of the last stage at the parent
    predicts         ..  level 1+k of the chain after it

Stage 0 drafts level 1 at x_{L-1}; stage 1 drafts level 2 at the nodes of level 1. Stage 1 must first read all nodes
that stage 0 has read. A head of one stage reads each node once.

A probe measures acceptance without a verification. It compares the drafts at unread positions with the tokens that
followed:

    unread token     x5   x6   x7        the head at x5 predicts x6, at x6 x7; the token after x7 is not known yet
    right token      x6   x7   -

Its drafts are the most probable tokens, also for requests that draw their drafts (rejection sampling). This is an
approximation. It only decides when drafting is tried.

A chain's next draft is the most probable token, or one drawn from the head's distribution q (`DraftSampling`). A tree
is EAGLE-2's (arXiv 2406.16858): `draft_beams` expands the k best nodes level by level, `rerank` keeps the best
candidates. A block drafter, whose nodes cost no pass of the head, expands all that can be in the tree. Its tree is the
best-first one: that of a heap over cumulative log-probabilities, if a node has k children.

Where a row has a grammar, the host reads the tokens of each level, and sets the head's logits of tokens outside of the
grammar to -inf (`DraftMasks`), so that few drafts are cut afterwards:

    committed {"a":      level 1 at the root   1 .6   x .3   "b" .1        x is masked: 1 and "b" are drafted
                         level 2 at 1          , .7   } .2   x .1          by the state after {"a":1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from toolkit.infer.attention.metadata import tree_metadata
from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.drafter import DraftRanks
from toolkit.infer.drafters.drafting_head import HeadReader
from toolkit.infer.kernels.dispatch import ops_for
from toolkit.infer.kernels.tree_reference import Beams, Candidates, root_beams
from toolkit.infer.request.draft_tree import DraftShape, DraftTree, Proposal, upload
from toolkit.infer.request.request import Request
from toolkit.infer.verify.logits_processors import packed, unpacked
from toolkit.infer.verify.token_distribution import RowDistributions, Stream, draw_from

PROBED = 32  # most positions probed in all rows (at least one a row): the output matrix may be large
Draws = Callable[[Request], bool]  # whether a request's drafts are drawn


class DraftMasks:
    """The grammars of one round of drafting. ids [D]: the target ids of the draft vocabulary."""

    def __init__(self, requests: Sequence[Request], ids: Tensor) -> None:
        self._requests, self._ids = requests, ids
        self._mask_bytes = next(one.grammar.mask_bytes for one in requests if one.grammar is not None)
        self._paths: list[list[list[int]]] = [[[]] for _ in requests]  # by row and node of the level: its drafts

    @classmethod
    def of(cls, requests: Sequence[Request], ids: Tensor) -> DraftMasks | None:
        """None if no request has a grammar."""
        return cls(requests, ids) if any(one.grammar is not None for one in requests) else None

    def __call__(self, logits: Tensor) -> Tensor:
        """Returns the logits [B, n, D] of the level, masked. They stay as they are at a node that nothing of the draft
        vocabulary may follow: what is drafted there is cut later."""
        masks: list[list[bytes | None]] = [
            [None] * len(paths) if one.grammar is None else one.grammar.after(one.output_ids, paths)
            for one, paths in zip(self._requests, self._paths, strict=True)
        ]
        allowed = unpacked(packed(masks, self._mask_bytes, self._ids.device))[..., self._ids]
        return logits.masked_fill(~allowed & allowed.any(dim=-1, keepdim=True), -torch.inf)

    def grow(self, tokens: Tensor, parents: Tensor | None) -> None:
        """Takes the next level: tokens and parents [B, n], the place of each node's parent in the level above. None:
        every level has one node."""
        above = torch.zeros_like(tokens) if parents is None else parents
        levels = torch.stack((tokens, above), dim=1).tolist()
        self._paths = [
            [[*paths[parent], token] for token, parent in zip(*level, strict=True)]
            for paths, level in zip(self._paths, levels, strict=True)
        ]


class DraftRollout:
    """The nodes of one round.

    tokens [B, P]: the unread ones. nodes: number of nodes so far. stage: the number of the current stage.
    states [B, M, H]: its output at each node that a further stage reads.
    sees [B, 1, ..]: which nodes the root (of a chain: the newest node) attends to, besides all positions read before
    the round. within: the rows' grammars, to which the logits of a level keep; None: there are none. best_first: of all
    rounds, whether the head does not read drafted nodes, so that trees are best-first.
    """

    best_first = False

    def __init__(
        self,
        reader: HeadReader,
        rows: RoundRows,
        tokens: Tensor,
        hidden: Tensor,
        carry: Tensor,
        *,
        levels: int = 0,
        width: int = 1,
    ) -> None:
        """tokens [B, P] and hidden [B, P, H]: the unread positions; the first rows.unread[b] of row b are valid.

        carry [B, S-1, H]: see `DraftInputs`. levels: the most levels that will be added, of `width` nodes each.
        """
        (batch, unread), device = tokens.shape, tokens.device
        most = unread + levels * width
        self._reader, self._table, self._old_carry = reader, rows.table, carry
        self._reach = rows.span(most)
        self.tokens, self.nodes, self.stage = tokens, unread, 0
        self.within: DraftMasks | None = None
        at, causal, self._own = _tables(1 << (most - 1).bit_length(), device)
        self._begin = rows.lengths - rows.unread  # [B]: positions that stage 0 has read before
        # Of each level, [B, n]: positions in stage 0. All nodes of a drafted level have the same.
        self._positions = [self._begin[:, None] + at[:unread]]
        if levels:
            self._positions += (rows.lengths[:, None] + at[:levels, None, None].expand(-1, 1, width)).unbind()
        self._depths: Tensor | None = None  # [B, most]
        if reader.window is not None:
            below = rows.unread[:, None] + at[: levels * width] // width
            self._depths = torch.cat((at[:unread].expand(batch, -1), below), dim=1)
        self._roots = rows.unread[:, None] - 1  # [B, 1]: the node of each row's last token
        # A row with fewer unread positions has padding after them. No drafted node descends from padding.
        self.sees = (at[:most] < rows.unread[:, None])[:, None]
        every = causal[:unread, :most].expand(batch, -1, -1)
        # Of each level, for further stages: tokens [B, n], parents [B, n] (-1: the position before the first node) and
        # which nodes each attends to, [B, n, most].
        self._levels = [(tokens, (at[:unread] - 1).expand(batch, -1), every)]
        self._carries: list[Tensor] = []
        self.states = self._read(tokens, hidden, self._positions[0], every)

    def grow(self, states: Tensor, tokens: Tensor, parents: Tensor | None = None, sees: Tensor | None = None) -> Tensor:
        """Adds a level: tokens [B, n]. Returns the head's states there, [B, n, H].

        states: those of the level above, from `at_roots` or the last call. parents [B, n]: the place of each node's
        parent in that level; None: every level has one node. sees [B, n, ..]: which nodes the new ones attend to; None:
        all of the chain.
        """
        start, level = self.nodes, len(self._levels)
        if self.within is not None:
            self.within.grow(tokens, parents)
        self.nodes += tokens.shape[1]
        if sees is None:
            sees = self.sees = self.sees | self._own[start, : self.sees.shape[2]]
        if self.stage + 1 < self._reader.head.stages:
            first = self._roots if level == 1 else torch.full_like(self._roots, start - states.shape[1])
            self._levels.append((tokens, first if parents is None else first + parents, sees))
            self._next_stage()
            return self.states[:, start:]
        self._levels.append((tokens, tokens, sees))  # no further stage reads it
        hidden = states if parents is None else _rows_of(states, parents)
        return self._read(tokens, hidden, self._positions[level], sees)

    def at_roots(self) -> Tensor:
        """Returns the current stage's states at each row's last committed token, [B, 1, H]."""
        return _rows_of(self.states, self._roots)

    def logits(self, states: Tensor) -> Tensor:
        """Returns the logits [..., D] of the next token for `states` [..., H] of the current stage."""
        logits = self._reader.head.logits(self.stage, states)
        return logits if self.within is None else self.within(logits)

    def best(self, states: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Returns the log-probabilities and draft vocabulary ids of the k most probable next tokens of a level's
        `states`, [B, n, k] each; of one node for all where the level has one distribution."""
        return ops_for(states.device.type).top_log_probs(self.logits(states), k)

    def finish(self) -> Tensor:
        """Lets the remaining stages read the nodes too. Returns the carry of the next round, [B, S-1, H]."""
        while self.stage + 1 < self._reader.head.stages:
            self._next_stage()
        return torch.cat(self._carries, dim=1) if self._carries else self._old_carry

    def shadow_ranks(self, counts: Sequence[int], to_target: Tensor, width: int) -> DraftRanks:
        """Returns the rank of each right token among the `width` most probable drafts; `width` if it is absent.

        To be called after stage 0 has read the unread positions, counts[b] of row b. to_target [D]: target ids of the
        draft vocabulary.
        """
        each = probed_positions(len(counts))
        places = [(row, at) for row, held in enumerate(counts) for at in range(max(0, held - 1 - each), held - 1)]
        ranks: DraftRanks = [[] for _ in counts]
        if not places:
            return ranks
        rows, at = upload(places, to_target.device).T
        scores = self.logits(self.states[rows, at])  # [L, D]
        drafts = to_target[scores.topk(min(width, len(to_target)), dim=-1).indices]
        right = drafts == self.tokens[rows, at + 1][:, None]
        found = torch.where(right.any(dim=1), right.int().argmax(dim=1), width)
        for (row, _), rank in zip(places, found.tolist(), strict=True):
            ranks[row].append(rank)
        return ranks

    def _next_stage(self) -> None:
        """Lets the next stage read all nodes so far."""
        self._carries.append(self.at_roots())
        tokens, parents, sees = (torch.cat(parts, dim=1) for parts in zip(*self._levels, strict=True))
        below = torch.cat((self._old_carry[:, self.stage, None], self.states), dim=1)
        self.stage += 1
        positions = torch.cat(self._positions[: len(self._levels)], dim=1)
        self.states = self._read(tokens, _rows_of(below, parents + 1), positions, sees)

    def _read(self, tokens: Tensor, hidden: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        """Runs the current stage over the newest n nodes: tokens and positions [B, n], hidden [B, n, H]."""
        begin, nodes = self._begin, self.nodes
        if self.stage:  # has read so many positions fewer. (A row that is too short for that gets no drafts.)
            begin, positions = ((one - self.stage).clamp(min=0) for one in (begin, positions))
        depths = None if self._depths is None else self._depths[:, :nodes]
        cache = self._reader.caches[self.stage]
        metadata = tree_metadata(cache, self._table, begin, self._reach, sees[:, :, :nodes], depths)
        return self._reader.read(self.stage, tokens, hidden, positions, metadata, self._reach)


def probed_positions(rows: int) -> int:
    """The most positions of a row that a probe of `rows` rows looks at."""
    return max(1, PROBED // rows)


@cache  # never freed: recorded rounds read them
def _tables(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns 0 .. size-1, a causal mask and an identity mask, [size, size] bool each."""
    own = torch.eye(size, dtype=torch.bool, device=device)
    return torch.arange(size, device=device), torch.ones_like(own).tril(), own


def _rows_of(states: Tensor, numbers: Tensor) -> Tensor:
    """Returns states [B, M, H] at the node numbers [B, n]: [B, n, H]."""
    return states.gather(1, numbers[:, :, None].expand(-1, -1, states.shape[2]))


class DraftSampling:
    """Chooses the drafts of one round: the most probable token in every row. Call it once per level, then ask for the
    distributions drawn from."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Returns draft vocabulary ids [B, 1] for logits [B, 1, D]."""
        return ops_for(logits.device.type).argmax(logits)

    def proposal(self) -> Proposal | None:
        """Returns the distributions; None if nothing was drawn."""
        return None


class DrawnTokens(DraftSampling):
    """Draws the drafts of requests for which `draws` is true; other rows take the most probable token.

    ids [D]: the target ids of the draft vocabulary. The request's temperature, top-k, top-p and min-p shape q too. The
    output distribution is exact for any q, but this q is nearer to the target's p. The random numbers are independent
    of the target's and of other rounds'.
    """

    def __init__(self, requests: Sequence[Request], ids: Tensor, draws: Draws) -> None:
        sampled = [row for row, request in enumerate(requests) if draws(request)]
        self._ids, self._batch = ids, len(requests)
        self._all = not any(request.params.temperature > 0 and not draws(request) for request in requests)
        self._sampled = upload(sampled, ids.device, torch.long)
        self._distributions = RowDistributions.of([requests[row].params for row in sampled], ids.device)
        self._roots = upload([requests[row].length for row in sampled], ids.device, torch.long)[:, None]
        self._drawn_from: list[Tensor] = []

    def __call__(self, logits: Tensor) -> Tensor:
        best = logits.max(dim=-1).indices
        q = self._distributions.probs(logits[self._sampled])
        q = torch.where(q[..., :1].isnan(), 1 / q.shape[-1], q)  # a head with broken weights: all of a row is nan
        positions = self._roots + len(self._drawn_from)
        self._drawn_from.append(q)
        drawn = draw_from(q[:, 0], self._distributions.round_uniform(self._roots, positions, Stream.DRAFT)[:, 0])
        return best.index_copy(0, self._sampled, drawn[:, None])

    def proposal(self) -> Proposal:
        q = torch.cat(self._drawn_from, dim=1)
        drawn = None if self._all else torch.zeros(self._batch, dtype=torch.bool, device=q.device)
        if drawn is not None:
            drawn[self._sampled] = True
        return Proposal(q.new_zeros(self._batch, *q.shape[1:]).index_copy(0, self._sampled, q), self._ids, drawn)


def draft_sampling_for(requests: Sequence[Request], ids: Tensor, draws: Draws | None) -> DraftSampling:
    """Returns the sampling of one round. draws None: no request ever draws."""
    return DraftSampling() if draws is None or not any(map(draws, requests)) else DrawnTokens(requests, ids, draws)


def draft_beams(
    nodes: DraftRollout, shape: DraftShape, limits: Sequence[DraftShape | None] | None, to_target: Tensor
) -> Candidates:
    """Expands the best nodes of each level by their k best children. Returns the candidates.

    These nodes are the k best, or for a best-first tree of N nodes the N - 2 best: no child scores above its parent, so
    beside a node that has a child in the tree all better ones of its level are in the tree.
    limits: a shape for each row; candidates outside a row's shape get the score -inf. to_target [D]: the target ids of
    the draft vocabulary.
    """
    k, steps, rows, device = shape.top_k, shape.num_steps, len(nodes.tokens), to_target.device
    ops, widths = ops_for(device.type), None if limits is None else _widths(limits, steps, device)
    drafted = shape.num_draft_tokens - 1
    most = max(1, drafted - 1) if nodes.best_first else k
    counts = [1]  # beams by level
    while len(counts) < steps:
        counts.append(min(most, k * counts[-1]))
    found = Candidates.empty(rows, k * sum(counts), device)
    beams, hidden = root_beams(rows, device, None if nodes.best_first else nodes.sees), nodes.at_roots()
    first = 0
    for level in range(steps):
        count = beams.tokens.shape[1]
        # [B, n, k] each; where no token before matters, the level has one distribution for all nodes.
        children = [one.expand(-1, count, -1) for one in nodes.best(hidden, k)]
        width = None if widths is None else widths[level]
        keep = 0 if level + 1 == steps else min(most, k * count)
        beams = ops.grow_beams(beams, *children, to_target, found, first, width, keep, nodes.nodes)
        first += k * count
        if keep:
            if nodes.best_first and (device.type == "cpu" or nodes.within is not None):  # the host may read
                beams = _in_reach(beams, found.scores[:, :first], drafted)
            hidden = nodes.grow(hidden, beams.tokens, beams.parents, beams.sees)
    return Candidates(*(one[:, :first] for one in found))


def _in_reach(beams: Beams, scores: Tensor, drafted: int) -> Beams:
    """Returns the beams among the `drafted` best candidates so far, scores [B, C]: no other has a child in the tree.
    The host reads their number."""
    if scores.shape[1] <= drafted:
        return beams
    least = scores.topk(drafted, dim=1).values[:, -1:]
    alive = (beams.scores >= least) & (beams.scores > -torch.inf)  # a row of fewer nodes holds none up
    count = max(1, int(alive.sum(dim=1).max()))
    tokens, parents, numbers, totals = (one[:, :count] for one in beams[:4])
    return Beams(tokens, parents, numbers, totals, None)


def rerank(roots: Tensor, found: Candidates, nodes: Sequence[int], deepest: int) -> DraftTree:
    """Runs the second phase: returns the tree of the best candidates. Arguments: `tree_reference.rank_candidates`."""
    return ops_for(roots.device.type).rank_candidates(roots, *found, nodes, deepest)


def _widths(limits: Sequence[DraftShape | None], steps: int, device: torch.device) -> Tensor:
    """Returns [steps, B]: how many children a node of each level has in the row's own shape."""
    own = [(0, 0) if one is None else (one.num_steps, one.top_k) for one in limits]
    return upload([[k if level < depth else 0 for depth, k in own] for level in range(steps)], device)
