"""One round of speculative decoding. Eager decoding runs this definition; a CUDA graph captures it.

    propose -> target forward over the tree -> choose -> follow -> keep features -> compact -> advance

It is a function of static buffers: the host reads nothing from the device during a round. Lengths, pages, tokens and
(in graphs) sampling settings come from `RoundState`, shapes from the tree. Eager rounds and graphs differ in three
things: how the tree is proposed, how tokens are chosen, and the span of keys that attention reads.

`EagerRounds` runs rounds without a graph, with the host's work before and after each.

Shapes: B rows, N nodes a row, A longest accepted path (root included), H hidden size, W feature width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.infer.attention.metadata import tree_metadata
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.cache.linear_states import LinearStates
from toolkit.infer.cache.round_state import RoundRows, RoundState, RowState, advanced, row_states
from toolkit.infer.drafters.drafter import Drafter
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.kernels.dispatch import ops_for
from toolkit.infer.kernels.tree_reference import Followed
from toolkit.infer.request.draft_tree import DraftTree
from toolkit.infer.request.request import NOT_FINITE, Request, VerifyEvent
from toolkit.infer.verify.forced import ForcedAcceptance
from toolkit.infer.verify.sampler import Choices, NodeLogprobs, NodeSampler, Sampler
from toolkit.infer.verify.verifiers import Verifier, VerifyResult, follow, nodes_at_once, read_result


@dataclass(frozen=True)
class RoundContext:
    """The models and the cache of an engine's rounds. head: the drafter that keeps features of each round, or None.
    states: of a hybrid target's linear-attention layers, else None. forced: acceptance by chance, for benchmarks."""

    forward: TargetForward
    cache: KVCache
    states: LinearStates | None
    head: HeadDrafter | None
    context_length: int
    forced: ForcedAcceptance | None = None


def run_round(
    context: RoundContext, rows: RoundRows, propose: Callable[[RoundRows], DraftTree], sampler: NodeSampler
) -> tuple[Followed, Choices]:
    """Draft, verify and commit on the device. Returns the accepted paths and the target's token at every node.

    The KV cache of a row with L tokens holds L - 1 of them. The last token is the root of the row's tree."""
    tree = propose(rows)
    hidden = forward_tree(context, rows, tree)
    choices, sums = choose_tokens(context, rows, tree, hidden, sampler)
    decided = tree, choices.tokens
    if context.forced is not None:
        decided = context.forced(*decided, rows.roots, rows.lengths)
    followed = follow(*decided)
    followed.mark_nonfinite(hidden, sums)
    committed = (followed.accepted + 1) * rows.real
    if context.head is not None:
        context.head.keep_features(rows, tree, followed, committed)
    if context.states is not None:
        context.states.commit(rows.lengths, followed.accepted)
    if not tree.is_chain:
        compact(context.cache, rows, followed)
    advance(rows, followed, committed)
    return followed, choices


def round_numbers(
    context: RoundContext, rows: RoundRows, propose: Callable[[RoundRows], DraftTree], sampler: NodeSampler
) -> Tensor:
    """Run the round as a graph captures it. Returns `Followed.numbers` of the accepted paths."""
    return run_round(context, rows, propose, sampler)[0].numbers


def forward_tree(context: RoundContext, rows: RoundRows, tree: DraftTree) -> Tensor:
    """The target's hidden states at every node, [B, N, H]."""
    # Nodes past the context are never committed. The clamp keeps learned position tables in range.
    positions = (rows.lengths[:, None] + tree.depths).clamp(max=context.context_length - 1)
    metadata = tree_metadata(context.cache, rows.table, rows.lengths, rows.span(tree.nodes), tree.mask, tree.depths)
    states = None if context.states is None else context.states.nodes(len(rows.roots))
    return context.forward(tree.tokens, positions, metadata, states)


def choose_tokens(
    context: RoundContext, rows: RoundRows, tree: DraftTree, hidden: Tensor, sampler: NodeSampler
) -> tuple[Choices, Tensor]:
    """The target's token at every node, [B, N], and the sum of its logits, [B, N] fp32; hidden [B, N, H].

    Logits of large batches are computed in parts."""
    nodes = nodes_at_once(*hidden.shape[:2], drawn=tree.proposal is not None)
    positions = (rows.lengths + 1)[:, None] + tree.depths
    chosen, sums = [], []
    for first in range(0, tree.nodes, nodes):
        logits = context.forward.logits(hidden[:, first : first + nodes])
        sums.append(logits.sum(dim=-1, dtype=torch.float32))
        chosen.append(sampler(logits, positions[:, first : first + nodes], tree, first))
    return (chosen[0], sums[0]) if len(chosen) == 1 else (Choices.joined(chosen), torch.cat(sums, dim=1))


def compact(cache: KVCache, rows: RoundRows, followed: Followed) -> None:
    """Move the KV entries of accepted nodes to the positions of plain decoding."""
    ops, places = ops_for(rows.table.device.type), (rows.table, rows.page_size, rows.lengths)
    ops.compact(cache.keys, cache.values, *places, followed.path, followed.accepted)


def advance(rows: RoundRows, followed: Followed, committed: Tensor) -> None:
    """Advance lengths and roots of the rows by `committed` [B] tokens. Padding rows do not change."""
    torch.mul(followed.tokens.gather(1, followed.accepted[:, None])[:, 0], rows.real, out=rows.roots)
    rows.lengths.add_(committed)


def commit(
    requests: Sequence[Request], result: VerifyResult, logprobs: NodeLogprobs | None, started: float, proposed: float
) -> list[Request]:
    """Append accepted drafts and the bonus token to the answers, truncate at stops and limits, log one event each.

    requests: by row. Ended requests get nothing: overlap runs one round too many for them. logprobs: of the rows that
    asked for them. started, proposed: begin of the round and end of drafting (perf_counter).
    Returns the requests that got tokens or ended.
    """
    verified = time.perf_counter()
    rows = [row for row, request in enumerate(requests) if not request.finished]
    counts = [append(requests[row], row, result) for row in rows]
    if logprobs is not None:
        logprobs.record(requests, result)
    times = (proposed - started, verified - proposed, time.perf_counter() - verified)
    for row, count in zip(rows, counts, strict=True):
        accepted, offer = result.accepted[row], (result.offered[row], result.depth_offered[row])
        cut = count < accepted + 1
        requests[row].events.append(VerifyEvent(*offer, accepted, count, cut, *times, len(rows)))
    return [requests[row] for row in rows]


def append(request: Request, row: int, result: VerifyResult) -> int:
    """Append a row's tokens to its request, or end it where they mean nothing. Returns the number of tokens."""
    if row in result.nonfinite:
        request.fail(NOT_FINITE)
        return 0
    return request.append_run(result.path_tokens[row], result.accepted[row])


@dataclass(frozen=True)
class EagerResult:
    """logprobs: of the rows that asked for them. proposed: end of drafting (perf_counter)."""

    result: VerifyResult
    logprobs: NodeLogprobs | None
    proposed: float


class EagerRounds:
    """Runs rounds on `state`. The host reads each result before the next round begins."""

    def __init__(self, context: RoundContext, state: RoundState, verifier: Verifier) -> None:
        self._context, self._state, self._verifier = context, state, verifier
        self._sampler: Sampler | None = None  # None: the rows changed

    def rows_changed(self) -> None:
        """Drop the sampler: the requests or their rows changed."""
        self._sampler = None

    def __call__(self, requests: Sequence[Request], drafter: Drafter) -> EagerResult:
        """Run one round of these requests. `drafter` proposes the trees."""
        proposed = 0.0

        def propose(rows: RoundRows) -> DraftTree:
            nonlocal proposed
            tree = sampler.cut(drafter.propose(requests, rows))
            proposed = time.perf_counter()
            return tree

        sampler = self._sampler_of(requests)
        rows, states = self.set_rows(requests)
        self._state.forget_rows(len(requests))
        followed, choices = run_round(self._context, rows, propose, sampler)
        result = read_result(followed, choices.extra)
        drafter.observe(requests, result)
        if self._context.states is not None:
            self._context.states.observe([length for _, length, _, _ in states], result.accepted)
        self._state.known[: len(states)] = advanced(states, result.path_tokens, self._unread(len(states)))
        return EagerResult(result, choices.logprobs, proposed)

    def set_rows(self, requests: Sequence[Request]) -> tuple[RoundRows, list[RowState]]:
        """Copy lengths, roots and page tables of the requests to the device. Returns the rows and their states."""
        count, head = len(requests), self._context.head
        if head is not None:
            head.first_tokens(requests)
        states = row_states(requests, self._unread(count))
        self._state.set_rows(states, count)
        self._state.set_tables(count, count)
        return self._state.rows(count, max(length for _, length, _, _ in states)), states

    def _unread(self, count: int) -> list[int] | None:
        """Number of positions of each row that the head has not read; None without a head."""
        return None if self._context.head is None else self._context.head.unread[:count]

    def _sampler_of(self, requests: Sequence[Request]) -> Sampler:
        if self._sampler is None or self._sampler.outdated:
            target = self._context.forward.target
            self._sampler = Sampler(requests, target.vocab_size, target.device, self._verifier)
        return self._sampler
