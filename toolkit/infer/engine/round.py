"""One round of speculative decoding: the device's half (`run_round`) and the host's (`Rounds`).

    propose -> target forward over the tree -> choose -> follow -> keep features -> compact -> advance

Eager decoding runs this definition; a CUDA graph captures it. It is a function of static buffers: the host reads
nothing from the device during a round. Lengths, pages, tokens and (in graphs) sampling settings come from `RoundState`,
shapes from the tree. Eager rounds and graphs differ in three things: how the tree is proposed, how tokens are chosen,
and the span of keys that attention reads.

Overlap: a graph of round n+1 is launched before the host has read the result of round n.

    host     launch n+1 | read n, its tokens, stops and events | launch n+2 | read n+1 ..
    device   .. n       | n+1                                  | n+1        | n+2 ..

Round n+1 starts from the device buffers that round n leaves: last tokens, lengths, features. The host does not know the
result of round n yet, so every row gets pages for the most that round n can commit. A row that ended in round n runs
once more on its own pages, and the host drops its output. So tokens and acceptance are the same as without overlap; the
host sees them one step later. The host reads round n first if the next round needs its result:

    the rows change    a request ended, was aborted, or reaches its token limit in round n; a prompt or a further
                       chunk of one is due; the pages do not suffice for both rounds, so a request may be preempted
    the round changes  another draft shape was set, or it runs eagerly (`GraphRounds.why_eager`)

Shapes: B rows, N nodes a row, A longest accepted path (root included), H hidden size, W feature width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from toolkit.infer.attention.metadata import tree_metadata
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.cache.cache_manager import ROOM
from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.cache.linear_states import LinearStates
from toolkit.infer.cache.round_state import RoundRows, RoundState, RowState, advanced, row_states
from toolkit.infer.drafters.drafter import Drafter
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.engine.scheduler import Scheduler
from toolkit.infer.graphs.graph_rounds import GraphRounds
from toolkit.infer.graphs.recordings import Kind, Recorded
from toolkit.infer.kernels.dispatch import ops_for
from toolkit.infer.kernels.tree_reference import AcceptedPath
from toolkit.infer.request.draft_tree import DraftTree
from toolkit.infer.request.request import NOT_FINITE, Request, VerifyEvent
from toolkit.infer.verify.sampler import Choices, NodeLogprobs, NodeSampler, Sampler
from toolkit.infer.verify.verifiers import ForcedAcceptance, Verifier, VerifyResult, follow, nodes_at_once, read_result


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
) -> tuple[AcceptedPath, Choices]:
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


def compact(cache: KVCache, rows: RoundRows, followed: AcceptedPath) -> None:
    """Move the KV entries of accepted nodes to the positions of plain decoding."""
    ops, places = ops_for(rows.table.device.type), (rows.table, rows.page_size, rows.lengths)
    ops.compact(cache.keys, cache.values, *places, followed.path, followed.accepted)


def advance(rows: RoundRows, followed: AcceptedPath, committed: Tensor) -> None:
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


@dataclass(eq=False)
class InFlight:
    """A launched round whose result the host has not read yet.

    requests: by row. states: the rows' states at its begin; None until the previous round has landed. read: waits for
    its result. graph: the kind of its graph and the graph; None: it ran eagerly. logprobs: of the rows that asked for
    them. began: perf_counter, at the earliest the landing of the previous round. proposed: end of drafting, which a
    graph does not tell: `began`, so that all of it counts as verification.
    """

    requests: list[Request]
    states: list[RowState] | None
    read: Callable[[], VerifyResult]
    graph: tuple[Kind, Recorded] | None = None
    logprobs: NodeLogprobs | None = None
    began: float = field(default_factory=time.perf_counter)
    proposed: float | None = None


class Rounds:
    """The host's half of every round, eager or recorded, of the requests that run in `scheduler`.

        launch   first tokens, lengths, page tables and sampling settings -> the round starts
        land     its result is read -> the drafter, the states and the host's copy of the rows follow it

    graphs: None: all rounds run eagerly. overlap: launch the graph of a round before the one before it has landed.
    """

    def __init__(
        self,
        context: RoundContext,
        state: RoundState,
        verifier: Verifier,
        scheduler: Scheduler,
        graphs: GraphRounds | None = None,
        *,
        overlap: bool = True,
    ) -> None:
        self._context, self.state, self._verifier, self._scheduler = context, state, verifier, scheduler
        self.graphs, self.overlap = graphs, overlap and graphs is not None
        self.eager_rounds = 0  # that no graph could run, of an engine that has some
        self._in_flight: InFlight | None = None
        self._sampler: Sampler | None = None  # of eager rounds; None: the rows changed

    @property
    def in_flight(self) -> bool:
        """Whether a launched round has not landed yet."""
        return self._in_flight is not None

    def rows_changed(self) -> None:
        """Drop the sampler: the requests or their rows changed."""
        self._sampler = None

    def shape_changed(self) -> None:
        """Capture the rounds of a new draft shape now, so that no request waits for it. Not with a round in flight."""
        if self.graphs is not None and not self.in_flight:
            self.graphs.record_all()

    def launch(self, drafter: Drafter) -> bool:
        """Launch a round of all running requests. `drafter` proposes the trees of an eager one.

        Returns whether it lands in the next step: a graph with overlap. Else the caller lands it now.
        """
        assert self._in_flight is None, "the round in flight has not landed yet"
        began, requests = time.perf_counter(), self._scheduler.running
        graph = None if self.graphs is None else self.graphs.graph_for(requests)
        rows, states = self.set_rows(requests, None if graph is None else graph[0].bucket)
        if graph is None:
            self.eager_rounds += self.graphs is not None
            self._in_flight = self._run(list(requests), drafter, rows, states, began)
        else:
            self.state.set_sampling(requests)
            self._in_flight = self._replay(list(requests), states, graph)
        return graph is not None and self.overlap

    def land(self, drafter: Drafter) -> tuple[InFlight, VerifyResult] | None:
        """Read the result of the round in flight; None if there is none.

        With overlap, launch the next round first if possible; it is in flight afterwards."""
        landing, self._in_flight = self._in_flight, None  # after an error no round is in flight
        if landing is None:
            return None
        following = self._launch_after(landing)
        assert landing.states is not None, "rounds land in the order in which they were launched"
        result, head, count = landing.read(), self._context.head, len(landing.states)
        if landing.graph is None:
            drafter.observe(landing.requests, result)
        elif head is not None:
            head.observe_recorded(landing.requests, result)
        if self._context.states is not None:
            self._context.states.observe([length for _, length, _, _ in landing.states], result.accepted)
        states = advanced(landing.states, result.path_tokens, self._unread(count))
        if following is None:
            self.state.known[:count] = states
        else:
            following.states, following.began = states, time.perf_counter()
        self._in_flight = following
        return landing, result

    def drop(self) -> None:
        """Drop the round in flight: later users of its pages are launched after it."""
        self._in_flight = None

    def may_take_rows(self) -> bool:
        """Whether the rows of ended requests may be freed. A round in flight holds them until it lands.

        If all requests have ended, drop the round in flight: later users of its pages are launched after it.
        """
        if any(not request.finished for request in self._scheduler.running):
            return self._in_flight is None
        self.drop()
        return True

    def set_rows(self, requests: Sequence[Request], count: int | None = None) -> tuple[RoundRows, list[RowState]]:
        """Copy lengths, roots and page tables of the requests to the device; padding follows, up to `count` rows.

        Returns the rows and the states of the requests."""
        if self._context.head is not None:
            self._context.head.first_tokens(requests)
        states = row_states(requests, self._unread(len(requests)))
        count = len(requests) if count is None else count
        self.state.set_rows(states, count)
        self.state.set_tables(len(requests), count)
        return self.state.rows(count, max(length for _, length, _, _ in states)), states

    def _run(
        self, requests: list[Request], drafter: Drafter, rows: RoundRows, states: list[RowState], began: float
    ) -> InFlight:
        """Run an eager round."""
        proposed = 0.0

        def propose(rows: RoundRows) -> DraftTree:
            nonlocal proposed
            tree = sampler.cut(drafter.propose(requests, rows))
            proposed = time.perf_counter()
            return tree

        if self._sampler is None or self._sampler.outdated:
            target = self._context.forward.target
            self._sampler = Sampler(requests, target.vocab_size, target.device, self._verifier)
        sampler = self._sampler
        self.state.forget_rows(len(requests))
        followed, choices = run_round(self._context, rows, propose, sampler)
        read = partial(read_result, followed, choices.extra)
        return InFlight(requests, states, read, None, choices.logprobs, began, proposed)

    def _replay(self, requests: list[Request], states: list[RowState] | None, graph: tuple[Kind, Recorded]) -> InFlight:
        """Launch a graph."""
        self.state.forget_rows(len(requests))
        recorded = graph[1]
        recorded.replay()
        numbers = HostCopy(recorded.numbers[: len(requests)])
        return InFlight(requests, states, lambda: read_result(AcceptedPath(numbers.read())), graph)

    def _launch_after(self, landing: InFlight) -> InFlight | None:
        """Launch the next round of the same rows, from the state that `landing` leaves on the device.

        Returns None if `landing` has to be read first."""
        running = self._scheduler.running
        if not self.overlap or self.graphs is None or landing.graph is None:
            return None
        if any(request.finished or request.ends_with_next for request in running) or self._scheduler.prompts_due():
            return None
        kind = landing.graph[0]
        if self.graphs.kind_of(running) != kind:
            return None
        # A row may be past its token limit and past the context. Its page table ends ROOM positions after the context.
        written = kind.most_tokens + self._scheduler.memory.slack
        if written > ROOM or not self._scheduler.make_room_ahead(kind.most_tokens):
            return None
        self.state.set_tables(len(running), kind.bucket)
        return self._replay(landing.requests, None, landing.graph)

    def _unread(self, count: int) -> list[int] | None:
        """Number of positions of each row that the head has not read; None without a head."""
        return None if self._context.head is None else self._context.head.unread[:count]


class HostCopy:
    """An asynchronous copy of `numbers` to the host, in stream order after all work launched so far."""

    def __init__(self, numbers: Tensor) -> None:
        self._over: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._over = torch.cuda.Event()
            self._over.record()
        else:
            self._numbers = numbers.clone()

    def read(self) -> Tensor:
        """Wait for the copy, but not for later work, and return it."""
        if self._over is not None:
            self._over.synchronize()
        return self._numbers
