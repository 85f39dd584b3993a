"""The rounds of an engine as CUDA graphs: which parts of a round are replayed, and why others run eagerly.

    draft     the head's, if all rows have one shape that the device can draft alone; else the host drafts eagerly
    forward   always, unless more requests run than a graph has rows for
    choice    unless a request needs the host's edits, its log-probabilities or a draw against the head's distribution

A short prompt that comes alone is read by the forward of a chain (`prompt`).

A round whose draft and forward are graphs needs no host before its choice (`Kind`): it may start before the result of
the one before it is read. Eager parts and graphs leave the same state; the reason for eager ones is logged once. The
host's work around a round is in engine/round.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.cache.round_state import RoundRows, RoundState, TargetStates
from toolkit.infer.drafters.draft_rollout import DraftSampling
from toolkit.infer.drafters.drafter import Drafter, NoDrafter
from toolkit.infer.drafters.head_drafter import CATCH_UP, HeadDrafter, Pending
from toolkit.infer.drafters.lookup import MOST_DEPTH
from toolkit.infer.graphs.compiled_forward import CompiledForward
from toolkit.infer.graphs.recordings import (
    ATTEMPTS,
    PROMPT_SIZES,
    SAMPLING_KINDS,
    BrokenCaptureError,
    Capture,
    CudaCapture,
    HostTree,
    Part,
    Recorded,
    Source,
    WarmUpError,
    buckets_up_to,
)
from toolkit.infer.kernels.tree_reference import AcceptedPath
from toolkit.infer.request.draft_tree import DraftShape, DraftTree, chain_tree, root_only, without_padding
from toolkit.infer.request.params import CompileError, EngineError, SamplingParams
from toolkit.infer.request.request import Request
from toolkit.infer.verify.logits_processors import is_edited
from toolkit.infer.verify.sampler import recorded_sampler
from toolkit.infer.verify.verifiers import Verifier
from toolkit.log import Progress, get_logger

logger = get_logger(__name__)

ROOTS = HostTree(1, True)  # the trees of plain decoding


@dataclass(frozen=True)
class Kind:
    """A round whose parts are all graphs, or all but the choice (edited: a request needs the host's edits or
    log-probabilities). shape None: plain decoding. cut: as of `Part`."""

    bucket: int
    shape: DraftShape | None
    cut: bool | None
    edited: bool = False

    @property
    def most_tokens(self) -> int:
        """The largest number of tokens that a round commits per row."""
        return 1 if self.shape is None else self.shape.num_steps + 1

    @property
    def parts(self) -> list[Part]:
        """In the order of their replay."""
        parts = [Part("choice", self.bucket, self.shape or ROOTS, self.cut)]
        while (before := parts[0].before) is not None:
            parts.insert(0, before)
        return parts[:-1] if self.edited else parts


class GraphRounds:
    """The graphs of one engine; those of its own draft shape, or of plain decoding, are captured when it is built.

    forward, finish: the parts of a round (engine/round.py); they run on `state`. head: the drafter with a head, if any;
    drafter: the engine's, around it. rows: the engine's largest batch. chunk: the most tokens of a prompt that are read
    at once. cuda_graph_max_bs: larger rounds run eagerly.
    torch_compile_max_bs: larger ones have uncompiled layers; None: all. capture: how to capture a part; None: as a CUDA
    graph. short_lived: capture a part when it is needed, not when the engine is built. agreed: the minimum of a number
    over all ranks; None: there is one process. Raises CompileError.
    """

    def __init__(
        self,
        forward: Callable[[RoundRows, DraftTree], TargetStates],
        finish: Callable[..., tuple[AcceptedPath, Any]],
        state: RoundState,
        target: TargetForward,
        drafter: Drafter,
        head: HeadDrafter | None,
        verifier: Verifier,
        *,
        rows: int,
        chunk: int,
        cuda_graph_max_bs: int,
        torch_compile_max_bs: int | None = None,
        capture: Capture | None = None,
        short_lived: bool = False,
        agreed: Callable[[int], int] | None = None,
    ) -> None:
        self._forward, self._finish, self._state = forward, finish, state
        self._head, self._verifier, self._short_lived, self._agreed = head, verifier, short_lived, agreed
        self._needs_host = not isinstance(drafter, HeadDrafter | NoDrafter)
        self._said: set[str] = set()
        self._compiled: CompiledForward | None = None
        if torch_compile_max_bs is not None:
            self._compiled = CompiledForward(target, None if head is None else head.reader)
        self._most_compiled = torch_compile_max_bs or 0
        self.buckets = buckets_up_to(min(cuda_graph_max_bs, rows))
        self._prompts = [HostTree(size, True) for size in PROMPT_SIZES if size < 2 * chunk]
        self._rows, self._unread = rows, 0  # the most positions of a row that the head leaves unread
        if head is not None:
            head.recorded_draft = self.draft
            if self._needs_host:  # rounds without the head leave more
                most = max(MOST_DEPTH + 1, head.shape.num_draft_tokens)
                self._unread = CATCH_UP + HostTree.holding(most, False).nodes
        self._given_capture, self._capture = capture, capture or CudaCapture()
        self.made: dict[Part, Recorded] = {}
        self._failures: dict[Part, int] = {}  # attempts
        self._broken: str | None = None  # why nothing further is captured
        self._held: Tensor | None = None  # the buffer of unread features that the graphs use
        self._staged: dict[tuple[int, HostTree], DraftTree] = {}  # the trees that the host hands to a forward
        # Of the current round: rows of its graphs (None: it is eager), rows of requests, the recorded draft if there is
        # one, where the trees come from. rows_lost sets the rows again after a capture.
        self._bucket: int | None = None
        self._count = 0
        self._draft: DraftTree | None = None
        self._source: Source = ROOTS
        self.rows_lost: Callable[[], object] = lambda: None
        self.record_at_start()

    @torch.inference_mode()
    def record_at_start(self) -> None:
        """Capture the rounds of the current draft shape, unless parts are captured at their first use. No round may be
        in flight. The largest are captured first, so that the smaller ones reuse their memory."""
        started, self.rows_lost = time.perf_counter(), lambda: None
        self._hold()
        if self._short_lived or (self._head is None and self._needs_host):
            return
        cuts = [None] if self._verifier.draws_drafts else list(SAMPLING_KINDS)
        kinds = [Kind(bucket, self._shape_at(bucket), cut) for bucket in reversed(self.buckets) for cut in cuts]
        parts = list(dict.fromkeys(part for kind in kinds for part in kind.parts))
        parts += [Part("forward", 1, source) for source in reversed(self._prompts)]
        before = len(self.made)
        with Progress(len(parts), "recording CUDA graphs", "graph") as bar:
            for part in parts:
                if part.before is None or part.before in self.made:  # else it is tried again at its first use
                    self._part(part)
                bar.update()
        if (made := len(self.made) - before) > 0:
            rows = ", ".join(map(str, self.buckets))
            logger.info("cuda graphs: %d recorded, of %s rows, in %.1f s", made, rows, time.perf_counter() - started)

    # -- rounds that need no host --------------------------------------------------------------------------------------

    def kind_of(self, requests: Sequence[Request]) -> Kind | None:
        """The kind of a round of these requests that needs no host before its choice; None if it needs the host."""
        bucket, head = self._bucket_of(len(requests)), self._head
        if bucket is None or self._needs_host or any(one.grammar is not None for one in requests):
            return None
        if head is not None and self._why_eager_draft(requests, head) is not None:
            return None
        edited = self._why_eager_choice(requests) is not None
        return Kind(bucket, None if head is None else head.shape, None if edited else _cut(requests), edited)

    def begin(self, requests: Sequence[Request]) -> Kind | None:
        """Begin a round. Returns its kind if it has one and its parts are recorded."""
        self._count, self._bucket, self._draft = len(requests), self._bucket_of(len(requests)), None
        self.rows_lost = lambda: None  # the caller sets the rows after this
        self._hold()
        self._shape_at(self.padded(len(requests)))
        kind = self.kind_of(requests)
        return None if kind is None or any(self._part(part) is None for part in kind.parts) else kind

    def padded(self, count: int) -> int:
        """The rows of a round of `count` requests: those of its graphs, the last ones padding."""
        return self._bucket_of(count) or count

    def replay(self, kind: Kind) -> Tensor:
        """Launch all parts, not edited. Returns `AcceptedPath.numbers` of the accepted paths."""
        for part in kind.parts:
            recorded = self.made[part]
            recorded.replay()
        numbers: Tensor = recorded.result
        return numbers

    def replay_forward(self, kind: Kind) -> tuple[DraftTree, TargetStates]:
        """Launch draft and forward. Returns the trees of the requests' rows and the states at their nodes."""
        roots = self._state.rows(self._count).roots
        tree = root_only(roots) if kind.shape is None else self.draft(kind.shape)
        states = None if tree is None else self.forward(tree)
        assert tree is not None and states is not None, "the parts of a kind are recorded"
        return tree, states.cut(self._count, tree.nodes)

    # -- the parts of others -------------------------------------------------------------------------------------------

    def draft(self, shape: DraftShape) -> DraftTree | None:
        """Draft `shape` in every row of the current round. None if no graph does."""
        head = self._head
        assert head is not None
        if self._bucket is None or (recorded := self._part(Part("draft", self._bucket, shape))) is None:
            return None
        recorded.replay()
        tree, pending = recorded.result
        # A copy: all graphs share one memory, and a forward that was captured before this draft may write over it.
        carry = pending.carry.clone() if pending.carry.shape[1] else pending.carry
        head.pending = Pending([0] * self._count, carry)
        self._draft, self._source = _first_rows(tree, self._count), shape
        return self._draft

    @property
    def drafted(self) -> bool:
        """Whether the current round's trees are a recorded draft, whose features a recorded choice keeps."""
        return isinstance(self._source, DraftShape)

    def forward(self, tree: DraftTree) -> TargetStates | None:
        """The target's states at every node of the current round's trees, and of padding. None if no graph does."""
        if self._bucket is None:
            return None
        if tree is not self._draft:
            self._source = HostTree.holding(tree.nodes, tree.is_chain)
        recorded = self._part(Part("forward", self._bucket, self._source))
        if recorded is None:
            return None
        if isinstance(self._source, HostTree) and self._source != ROOTS:
            _stage(tree, self._staged[self._bucket, self._source])
        recorded.replay()
        states: TargetStates = recorded.result
        return states

    def choose(self, requests: Sequence[Request]) -> AcceptedPath | None:
        """Choose and commit after `forward`. Returns the accepted paths of these requests; None if no graph does.

        Features are kept only of recorded drafts (`drafted`)."""
        assert self._bucket is not None
        if self._why_eager_choice(requests) is not None:
            return None
        recorded = self._part(Part("choice", self._bucket, self._source, _cut(requests)))
        if recorded is None:
            return None
        recorded.replay()
        return AcceptedPath(recorded.result[: len(requests)])

    def prompt(self, row: int, tokens: Tensor, start: int) -> Tensor | None:
        """Read the next tokens [1, T] of a prompt, after `start` others, into this row of the pool. No round may be in
        flight. Returns the target's states [1, T, H], and gives the head its features; None if no graph does."""
        count, self.rows_lost = tokens.shape[1], lambda: None
        source = next((one for one in self._prompts if one.nodes >= count), None)
        if source is None or (recorded := self._part(Part("forward", 1, source))) is None:
            return None
        self._state.set_rows([(0, start, 1, 1)], 1)
        self._state.set_tables(1, 1, first=row)
        _stage(chain_tree(tokens[:, 0], tokens[:, 1:], [count - 1]), self._staged[1, source])
        recorded.replay()
        states: TargetStates = recorded.result.cut(1, count)
        if self._head is not None and states.features is not None:
            self._head.reader.head.put_features(states.features)
        return states.hidden

    # -- which parts have graphs ---------------------------------------------------------------------------------------

    def _bucket_of(self, count: int) -> int | None:
        bucket = next((one for one in self.buckets if one >= count), None)
        if bucket is None:
            self._say(f"rounds run eagerly where more than {self.buckets[-1]} requests run")
        return bucket

    def _why_eager_draft(self, requests: Sequence[Request], head: HeadDrafter) -> str | None:
        why = head.why_eager(requests, own := [head.shape_of(one) for one in requests])
        if why is None and own[0] != head.shape:
            why = "requests have another draft shape than the engine"
        if why is not None:
            self._say(f"drafts run eagerly where {why}")
        return why

    def _why_eager_choice(self, requests: Sequence[Request]) -> str | None:
        """Why the choices of these requests have no graph; None: they have one."""
        why = None
        if any(is_edited(one) or one.params.logprobs is not None for one in requests):
            why = "a request has penalties, biases or min_tokens, or asks for log-probabilities"
        elif any(one.grammar is not None for one in requests):
            why = "a request has a grammar, which the host reads at every node"
        elif any(one.forced_ids for one in requests):
            why = "the text of a request is given"
        elif self._head is not None and any(map(self._verifier.draws_for, requests)):
            why = f"drafts are drawn (`verify` is {self._verifier.name})"
        if why is not None:
            self._say(f"tokens are chosen eagerly where {why}")
        return why

    def _say(self, what: str) -> None:
        """Log it, once."""
        if what not in self._said:
            self._said.add(what)
            logger.info("cuda graphs: %s", what)

    def _shape_at(self, count: int) -> DraftShape | None:
        """What rounds of `count` rows draft from now on; None: nothing."""
        if self._head is None:
            return None
        self._head.take_rows(count)
        return self._head.shape

    def _hold(self) -> None:
        """Allocate the head's input buffers, before anything is captured that reads them. If they have moved, drop all
        graphs: they read the old ones."""
        if (head := self._head) is None:
            return
        self._unread = max(self._unread, head.shape.num_steps + 1)
        head.inputs.hold(self._rows, self._unread)
        if head.inputs.features is not self._held:
            self.drop()
            self._failures.clear()
            self._held = head.inputs.features

    # -- captures ------------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Drop all graphs, also those whose capture failed."""
        self.made.clear()
        self._capture = self._given_capture or CudaCapture()  # a memory pool ends with its graphs

    def _part(self, part: Part) -> Recorded | None:
        """The recording of a part, captured if it is new: it runs on padding rows, then the round's are set again.

        None if it or a part before it could not be captured; the log says why, once for each reason. Raises
        CompileError."""
        if part.before is not None and self._part(part.before) is None:
            return None
        if part in self.made or self._failures.get(part, 0) >= ATTEMPTS:
            return self.made.get(part)
        pending = None if self._head is None else self._head.pending
        try:
            why = self._try_on_all_ranks(part)
        finally:
            if self._head is not None and pending is not None:
                self._head.pending = pending
            self.rows_lost()
        if why is not None:
            self._failures[part] = self._failures.get(part, 0) + 1
            if why not in self._said:
                logger.warning("cuda graphs: %s, and others perhaps, run eagerly: %s", part.name, why)
            self._said.add(why)
        return self.made.get(part)

    def _try_on_all_ranks(self, part: Part) -> str | None:
        """`_try` it, unless captures are broken. What one rank cannot capture runs eagerly on all: in a collective each
        of them must be in the same part."""
        why = self._broken or self._try(part)
        if self._agreed is None:
            return why
        own = (why is None) + (self._broken is None)
        if (least := self._agreed(own)) < own:
            why = why or "another rank could not record it"
            self._broken = self._broken or (why if least == 0 else None)
            self.made.pop(part, None)
            if not self.made:
                self.drop()
        return why

    def _try(self, part: Part) -> str | None:
        """Capture it. Returns the reason as text if it failed: the exception would keep the part's frames, and with
        them its tensors, in memory."""
        try:
            self.made[part] = self._record(part)
        except CompileError:
            raise
        except EngineError as error:
            if isinstance(error, WarmUpError) and self._agreed is not None:
                raise
            if isinstance(error, BrokenCaptureError):
                self._broken = str(error)
            return str(error)
        return None

    def _record(self, part: Part) -> Recorded:
        """Capture on padding rows, so that no request's pages change. Restore the rows' unread features afterwards."""
        recorded = Recorded(partial(self._run, part, self._state.rows(part.bucket)))
        stores = [] if self._head is None else self._head.inputs.stores
        before = [store[: part.bucket].clone() for store in stores]
        self._state.set_rows([], part.bucket)
        self._state.set_tables(0, part.bucket)
        try:
            of_prompt = part.bucket == 1 and part.source in self._prompts
            compiles = part.bucket <= self._most_compiled and not of_prompt
            compiled = self._compiled if compiles else None
            recorded.replay = self._capture(recorded if compiled is None else compiled.around(recorded))
        finally:
            for store, kept in zip(stores, before, strict=True):
                store[: part.bucket] = kept
        return recorded

    def _run(self, part: Part, rows: RoundRows) -> Any:
        """Run a part on rows whose number is that of its bucket."""
        head = self._head
        if part.what == "draft":
            assert head is not None and isinstance(shape := part.source, DraftShape)
            return head.draft(rows, shape, [shape] * part.bucket, DraftSampling(), shape.num_steps + 1), head.pending
        tree, pending = self._trees(part.bucket, part.source, rows)
        if part.what == "forward":
            return self._forward(rows, tree)
        states = self.made[Part("forward", part.bucket, part.source)].result
        if head is not None and pending is not None:
            head.pending = pending
        sampler = recorded_sampler(self._state, part.bucket, part.cut)
        return self._finish(rows, tree, states, sampler, keep=pending is not None)[0].numbers

    def _trees(self, bucket: int, source: Source, rows: RoundRows) -> tuple[DraftTree, Pending | None]:
        """The trees that a recorded forward reads, and what the recorded draft has left, if they come from one."""
        if isinstance(source, DraftShape):
            tree, pending = self.made[Part("draft", bucket, source)].result
            return tree, pending
        if source == ROOTS:
            return root_only(rows.roots), None
        if (bucket, source) not in self._staged:
            self._staged[bucket, source] = _empty_trees(bucket, source, rows.roots.device)
        return self._staged[bucket, source], None


def _cut(requests: Sequence[Request]) -> bool | None:
    drawing = [one.params for one in requests if one.params.temperature > 0]
    return any(map(_is_cut, drawing)) if drawing else None


def _is_cut(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


TENSORS = ("tokens", "parents", "depths", "mask", "valid")  # of a tree


def _first_rows(tree: DraftTree, count: int) -> DraftTree:
    return replace(tree, **{name: getattr(tree, name)[:count] for name in TENSORS})


def _empty_trees(rows: int, size: HostTree, device: torch.device) -> DraftTree:
    numbers = torch.zeros(rows, size.nodes, dtype=torch.long, device=device)
    mask = torch.eye(size.nodes, dtype=torch.bool, device=device).repeat(rows, 1, 1)
    valid = numbers.bool()
    valid[:, 0] = True  # padding rows have a root too
    return DraftTree(numbers, numbers - 1, numbers.clone(), mask, valid, size.nodes - 1, size.is_chain)


def _stage(tree: DraftTree, staged: DraftTree) -> None:
    """Copy the host's trees to where the graph reads them. Nodes beyond theirs are padding."""
    count, more = len(tree.tokens), staged.nodes - tree.nodes
    valid = pad(tree.valid, (0, more))
    for name in TENSORS:
        value = getattr(tree, name)
        if more:
            value = pad(value, (0, more, 0, more) if name == "mask" else (0, more))
            value = without_padding(value, valid) if name == "mask" else value
        getattr(staged, name)[:count] = value
