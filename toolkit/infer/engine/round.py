"""One round of speculative decoding: the device's half (`run_round`) and the host's (`Rounds`).

    propose -> target forward over the tree -> choose -> follow -> keep features -> compact -> advance

Eager decoding runs this definition; CUDA graphs capture its three parts: the draft, the forward, and what follows it
(`finish`). They are functions of static buffers: the host reads nothing from the device during a part. Lengths, pages,
tokens and (in graphs) sampling settings come from `RoundState`, shapes from the tree.

Between the parts the host is free. It decides which drafts are worth their time (adaptive drafting), drafts itself
(lookup), ends chains, masks logits by a grammar, applies penalties and collects log-probabilities. A part that the host
takes a hand in runs eagerly, the others are replayed (`graph_rounds.py`).

Overlap: if all parts are graphs, round n+1 is launched before the host has read the result of round n.

    host     launch n+1 | read n, its tokens, stops and events | launch n+2 | read n+1 ..
    device   .. n       | n+1                                  | n+1        | n+2 ..

Where a request needs the host's edits or log-probabilities, draft and forward of round n+1 are launched first, and its
choice after round n is read: the host reads and edits while the target computes.

    host     draft, forward n+1 | read n, its tokens, stops and events | choice n+1 | draft, forward n+2 ..

Round n+1 starts from the device buffers that round n leaves: last tokens, lengths, features. The host does not know the
result of round n yet, so every row gets pages for the most that round n can commit. A row that ended in round n runs
once more on its own pages, and the host drops its output. So tokens and acceptance are the same as without overlap; the
host sees them one step later. The host reads round n first if the next round needs its result:

    the rows change    a request ended, was aborted, or reaches its token limit in round n; a prompt or a further
                       chunk of one is due; the pages do not suffice for both rounds, so a request may be preempted
    the round changes  another draft shape was set, or its draft or forward runs eagerly

Shapes: B rows, N nodes a row, A longest accepted path (root included), H hidden size, W feature width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from toolkit.infer.attention.metadata import PackedMetadata, tree_metadata
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.cache.cache_manager import ROOM
from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.cache.linear_states import LinearStates
from toolkit.infer.cache.round_state import RoundRows, RoundState, RowState, TargetStates, advanced, row_states
from toolkit.infer.drafters.drafter import Drafter
from toolkit.infer.drafters.head_drafter import HeadDrafter, Pending
from toolkit.infer.engine.scheduler import Scheduler
from toolkit.infer.graphs.graph_rounds import GraphRounds, Kind
from toolkit.infer.kernels.dispatch import ops_for
from toolkit.infer.kernels.tree_reference import AcceptedPath
from toolkit.infer.request.draft_tree import DraftTree
from toolkit.infer.request.request import NOT_FINITE, Request, VerifyEvent
from toolkit.infer.verify.sampler import Choices, NodeLogprobs, NodeSampler, Sampler
from toolkit.infer.verify.verifiers import (
    LOGIT_ROWS,
    ForcedAcceptance,
    Verifier,
    VerifyResult,
    follow,
    nodes_at_once,
    read_result,
)


@dataclass(frozen=True)
class RoundContext:
    """The models and the cache of an engine's rounds. head: the drafter that keeps features of each round, or None.
    states: of a hybrid target's linear-attention layers, else None. packed: forwards compute no padding. forced:
    acceptance by chance, for benchmarks."""

    forward: TargetForward
    cache: KVCache
    states: LinearStates | None
    head: HeadDrafter | None
    context_length: int
    packed: bool = False
    forced: ForcedAcceptance | None = None


def run_round(
    context: RoundContext, rows: RoundRows, propose: Callable[[RoundRows], DraftTree], sampler: NodeSampler
) -> tuple[AcceptedPath, Choices]:
    """Draft, verify and commit on the device. Returns the accepted paths and the target's token at every node.

    The KV cache of a row with L tokens holds L - 1 of them. The last token is the root of the row's tree."""
    tree = propose(rows)
    return finish(context, rows, tree, forward_tree(context, rows, tree), sampler)


def round_parts(
    context: RoundContext,
) -> tuple[Callable[..., TargetStates], Callable[..., tuple[AcceptedPath, Choices]]]:
    """`forward_tree` and `finish` of a context, for graphs."""
    return (lambda *given: forward_tree(context, *given)), (lambda *given, **how: finish(context, *given, **how))


def forward_tree(context: RoundContext, rows: RoundRows, tree: DraftTree) -> TargetStates:
    """The target's states at every node."""
    # Nodes past the context are never committed. The clamp keeps learned position tables in range.
    positions = (rows.lengths[:, None] + tree.depths).clamp(max=context.context_length - 1)
    places = context.cache, rows.table, rows.lengths, rows.span(tree.nodes), tree.mask, tree.depths
    states = None if context.states is None else context.states.nodes(len(rows.roots))
    if not context.packed or tree.nodes == 1 or tree.valid.all():
        hidden = context.forward(tree.tokens, positions, tree_metadata(*places), states)
        return TargetStates(hidden, None if context.head is None else context.head.features())
    pack = PackedMetadata(*places, tree.valid)
    hidden = context.forward(pack.pack(tree.tokens), pack.pack(positions), pack, states)
    features = None if context.head is None else pack.spread(context.head.features())
    return TargetStates(pack.spread(hidden), features, (hidden, pack.numbers))


def finish(
    context: RoundContext,
    rows: RoundRows,
    tree: DraftTree,
    states: TargetStates,
    sampler: NodeSampler,
    *,
    keep: bool = True,
) -> tuple[AcceptedPath, Choices]:
    """Choose, follow the choices and commit. keep: with the features; else `keep_features` comes afterwards."""
    choices, sums = choose_tokens(context, rows, tree, states, sampler)
    decided = tree, choices.tokens
    if context.forced is not None:
        decided = context.forced(*decided, rows.roots, rows.lengths)
    followed = follow(*decided)
    followed.mark_nonfinite(states.hidden, sums)
    committed = (followed.accepted + 1) * rows.real
    if keep:
        keep_features(context, rows, tree, followed, committed, states)
    if context.states is not None:
        context.states.commit(rows.lengths, followed.accepted)
    if not tree.is_chain:
        compact(context.cache, rows, followed)
    advance(rows, followed, committed)
    return followed, choices


def keep_features(
    context: RoundContext,
    rows: RoundRows,
    tree: DraftTree,
    followed: AcceptedPath,
    committed: Tensor,
    states: TargetStates,
) -> None:
    """Give the features of the accepted paths to the head, if there is one."""
    if context.head is not None:
        assert states.features is not None, "a forward beside a head takes its features"
        context.head.keep_features(rows, tree, followed, committed, states.features)


def choose_tokens(
    context: RoundContext, rows: RoundRows, tree: DraftTree, states: TargetStates, sampler: NodeSampler
) -> tuple[Choices, Tensor]:
    """The target's token at every node, [B, N], and the sum of its logits, [B, N] fp32.

    Logits of large batches are computed in parts."""
    hidden, of_valid = states.hidden, None
    if states.packed is not None and states.packed[0].shape[1] <= LOGIT_ROWS:
        flat, places = states.packed
        of_valid = context.forward.logits(flat[0])  # [T, V]
    nodes = nodes_at_once(*hidden.shape[:2], drawn=tree.proposal is not None)
    positions = (rows.lengths + 1)[:, None] + tree.depths
    chosen, sums = [], []
    for first in range(0, tree.nodes, nodes):
        part = slice(first, first + nodes)
        logits = context.forward.logits(hidden[:, part]) if of_valid is None else of_valid[places[:, part]]
        sums.append(logits.sum(dim=-1, dtype=torch.float32))
        chosen.append(sampler(logits, positions[:, part], tree, first))
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
    its result; None: its tokens are not chosen yet. kind: of a round that needed no host before its choice. logprobs:
    of the rows that asked for them. began: perf_counter, at the earliest the landing of the previous round. proposed:
    end of drafting; None for a round with a kind, all of which counts as verification. unchosen: the trees, the
    target's states and what the draft left, until the tokens are chosen.
    """

    requests: list[Request]
    states: list[RowState] | None
    read: Callable[[], VerifyResult] | None
    kind: Kind | None = None
    logprobs: NodeLogprobs | None = None
    began: float = field(default_factory=time.perf_counter)
    proposed: float | None = None
    unchosen: tuple[DraftTree, TargetStates, Pending | None] | None = None


class Rounds:
    """The host's half of every round, eager or recorded, of the requests that run in `scheduler`.

        launch   first tokens, lengths, page tables and sampling settings -> the round starts
        land     its result is read -> the drafter, the states and the host's copy of the rows follow it
        choose   with overlap: the tokens of the next round, if the host edits their logits

    graphs: None: all rounds run eagerly. overlap: launch the graphs of a round before the one before it has landed.
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
        self.eager_rounds = 0  # whose forward no graph could run, of an engine that has some
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
            self.graphs.record_at_start()

    def launch(self, drafter: Drafter) -> bool:
        """Launch a round of all running requests. `drafter` proposes the trees of an eager one.

        Returns whether it lands in the next step: a graph with overlap. Else the caller lands it now.
        """
        assert self._in_flight is None, "the round in flight has not landed yet"
        began, requests = time.perf_counter(), self._scheduler.running
        kind = None if self.graphs is None else self.graphs.begin(requests)
        states = self.set_rows(requests)
        if kind is None:
            self._in_flight = self._run(list(requests), drafter, states, began)
        else:
            self.state.set_sampling(requests)
            self._in_flight = self._replay(list(requests), states, kind)
            self.choose()
        return kind is not None and self.overlap

    def land(self, drafter: Drafter) -> tuple[InFlight, VerifyResult] | None:
        """Read the result of the round in flight; None if there is none.

        With overlap, launch the next round first if possible; it is in flight afterwards. The caller calls `choose`
        when the requests have the tokens that were read."""
        landing, self._in_flight = self._in_flight, None  # after an error no round is in flight
        if landing is None:
            return None
        following = self._launch_after(landing)
        assert landing.states is not None and landing.read is not None, "rounds land in the order of their launches"
        result, head, count = landing.read(), self._context.head, len(landing.states)
        if landing.kind is None:
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

    def choose(self) -> None:
        """Choose the tokens of the round in flight, unless a graph does, and launch what follows."""
        flight, head = self._in_flight, self._context.head
        if flight is None or flight.unchosen is None:
            return
        self._in_flight = None  # an error leaves no round in flight
        (tree, states, pending), flight.unchosen = flight.unchosen, None
        if head is not None and pending is not None:
            head.pending = pending  # the landing of the round before set another
        rows, sampler = self.state.rows(len(flight.requests)), self._sampler_of(flight.requests)
        followed, choices = finish(self._context, rows, tree, states, sampler)
        flight.logprobs = choices.logprobs
        flight.read = read_later(followed.numbers, None if choices.extra is None else choices.extra(followed.path))
        self._in_flight = flight

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

    def set_rows(self, requests: Sequence[Request]) -> list[RowState]:
        """Copy lengths, roots and page tables of the requests to the device, and padding up to the rows of a graph.

        Returns the states of the requests."""
        if self._context.head is not None:
            self._context.head.first_tokens(requests)
        states = row_states(requests, self._unread(len(requests)))
        count = len(requests) if self.graphs is None else self.graphs.padded(len(requests))
        self.state.set_rows(states, count)
        self.state.set_tables(len(requests), count)
        return states

    def _run(self, requests: list[Request], drafter: Drafter, states: list[RowState], began: float) -> InFlight:
        """Run a round part by part."""
        sampler, graphs, context = self._sampler_of(requests), self.graphs, self._context
        rows = self.state.rows(len(requests), max(length for _, length, _, _ in states))
        if graphs is not None:
            graphs.rows_lost = lambda: self._set_again(requests)
            self.state.set_sampling(requests)
        tree = sampler.cut(drafter.propose(requests, rows))
        proposed, count, choices = time.perf_counter(), len(requests), None
        self.state.forget_rows(count)
        seen = None if graphs is None else graphs.forward(tree)
        if graphs is None or seen is None:
            self.eager_rounds += graphs is not None
            followed, choices = finish(context, rows, tree, forward_tree(context, rows, tree), sampler)
        elif (path := graphs.choose(requests)) is None:
            followed, choices = finish(context, rows, tree, seen.cut(count, tree.nodes), sampler)
        else:
            followed = path
            if not graphs.drafted:
                committed = (followed.accepted + 1) * rows.real
                keep_features(context, rows, tree, followed, committed, seen.cut(count, seen.nodes))
        read = partial(read_result, followed, None if choices is None else choices.extra)
        logprobs = None if choices is None else choices.logprobs
        return InFlight(requests, states, read, None, logprobs, began, proposed)

    def _sampler_of(self, requests: Sequence[Request]) -> Sampler:
        if self._sampler is None or self._sampler.outdated:
            target = self._context.forward.target
            self._sampler = Sampler(requests, target.vocab_size, target.device, self._verifier)
        return self._sampler

    def _set_again(self, requests: list[Request]) -> None:
        """Set the rows after a capture in the middle of their round, which changes them before the host reads it."""
        self.set_rows(requests)
        self.state.forget_rows(len(requests))

    def _replay(self, requests: list[Request], states: list[RowState] | None, kind: Kind) -> InFlight:
        """Launch the graphs of a round; `choose` launches the rest."""
        assert self.graphs is not None
        self.state.forget_rows(len(requests))
        if not kind.edited:
            return InFlight(requests, states, read_later(self.graphs.replay(kind)[: len(requests)]), kind)
        seen, head = self.graphs.replay_forward(kind), self._context.head
        return InFlight(requests, states, None, kind, unchosen=(*seen, None if head is None else head.pending))

    def _launch_after(self, landing: InFlight) -> InFlight | None:
        """Launch the next round of the same rows, from the state that `landing` leaves on the device.

        Returns None if `landing` has to be read first."""
        running = self._scheduler.running
        kind = landing.kind
        if not self.overlap or self.graphs is None or kind is None:
            return None
        if any(request.finished or request.ends_with_next for request in running) or self._scheduler.prompts_due():
            return None
        if self.graphs.kind_of(running) != kind:
            return None
        # A row may be past its token limit and past the context. Its page table ends ROOM positions after the context.
        written = kind.most_tokens + self._scheduler.memory.slack
        if written > ROOM or not self._scheduler.make_room_ahead(kind.most_tokens):
            return None
        self.state.set_tables(len(running), kind.bucket)
        return self._replay(landing.requests, None, kind)

    def _unread(self, count: int) -> list[int] | None:
        """Number of positions of each row that the head has not read; None without a head."""
        return None if self._context.head is None else self._context.head.unread[:count]


def read_later(numbers: Tensor, extra: Tensor | None = None) -> Callable[[], VerifyResult]:
    """Start one copy of a result to the host. Returns what waits for it and reads it.

    numbers: as of AcceptedPath. extra: as of `read_result`."""
    count, flat = numbers.numel(), numbers.flatten()
    copy = HostCopy(flat if extra is None else torch.cat((flat, extra)))

    def read() -> VerifyResult:
        flat = copy.read()
        return read_result(AcceptedPath(flat[:count].view(numbers.shape)), lambda _: flat[count:])

    return read


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
