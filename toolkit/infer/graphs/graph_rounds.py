"""Rounds that run as one recorded graph: which ones can, at which sizes, and what the host does around them.

A graph is recorded when a bucket of rows first meets a draft shape and a kind of sampling. Rounds that ask for more
than a graph does (its reason is logged, once) run eagerly, as they do without graphs; both leave the same behind.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from toolkit.infer.attention.kv_cache import KVCache
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.compiled.compiled_rounds import CompiledRounds, CompileSettings
from toolkit.infer.draft_tree import DraftShape
from toolkit.infer.drafters.autoregressive_drafter import AutoregressiveDrafter
from toolkit.infer.drafters.drafter import Drafter, NoDrafter
from toolkit.infer.errors import CompileError, EngineError
from toolkit.infer.graphs.cuda_capture import Capture, CudaCapture, Run
from toolkit.infer.graphs.device_round import DeviceRound, Machine
from toolkit.infer.graphs.fixed_laws import FixedLaws
from toolkit.infer.graphs.round_state import PADDING, RoundState, Standing
from toolkit.infer.kernels.choose import ops_for
from toolkit.infer.request import Request
from toolkit.infer.sampling.logit_edits import is_edited
from toolkit.infer.sampling.sampling_params import SamplingParams
from toolkit.infer.sampling.verifiers import Verifier
from toolkit.infer.verify import Walk, as_walk
from toolkit.log import get_logger
from toolkit.target.load import Target

logger = get_logger(__name__)

STEP = 8  # rows between two buckets, from the first bucket of that size on


@dataclass(frozen=True)
class GraphSettings:
    """max_rows: rounds of more rows run eagerly. capture: how a round is recorded; None: as a CUDA graph. compiled:
    rounds are recorded with compiled layers."""

    max_rows: int
    capture: Capture | None = None
    compiled: CompileSettings | None = None

    def check(self, device: torch.device) -> None:
        """Raises EngineError for settings that nothing can be recorded with on this device."""
        if self.max_rows < 1:
            raise EngineError(f"cuda_graph_max_bs is {self.max_rows}; a graph has at least 1 row")
        if self.capture is None and device.type != "cuda":
            raise EngineError(
                f"cuda_graph_max_bs came with {device} as device; graphs need a GPU: leave --cuda-graph-max-bs out, or "
                "use --device cuda"
            )
        if self.compiled is not None and self.compiled.max_rows > self.max_rows:
            raise EngineError(
                f"torch_compile_max_bs is {self.compiled.max_rows} and cuda_graph_max_bs {self.max_rows}; layers are "
                f"compiled for rounds that are recorded: lower the first to {self.max_rows}, or raise the second"
            )


def buckets_up_to(rows: int) -> list[int]:
    """The numbers of rows that graphs are recorded for: 1, 2, 4, 8, 16, 24, .. and `rows` itself."""
    return sorted({rows, *(one for one in (1, 2, 4) if one < rows), *range(STEP, rows, STEP)})


@dataclass
class _Recorded:
    round: DeviceRound
    replay: Run


@dataclass(frozen=True)
class _Kind:
    """What one recording is good for. cut: laws may be cut by top-k, top-p, min-p; None: all rows are greedy."""

    bucket: int
    shape: DraftShape | None
    cut: bool | None


@dataclass
class GraphRounds:
    """The recorded rounds of one engine, a cache in scattered pages and its target's own forward.

    Raises EngineError for settings or a machine that nothing can be recorded on.
    """

    settings: GraphSettings
    target: Target
    forward: TargetForward
    cache: KVCache
    drafter: Drafter
    verifier: Verifier
    max_batch: int
    max_context: int
    _recorded: dict[_Kind, _Recorded] = field(default_factory=dict)
    _held: Tensor | None = None  # the pending features that were recorded
    _said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        shape = self.cache.shape
        self.settings.check(shape.device)
        if self.cache.pool.homes:
            raise EngineError("cuda graphs came with a cache at homes; they need scattered pages (scattered_pages)")
        rows = min(self.settings.max_rows, self.max_batch)
        self._buckets = buckets_up_to(rows)
        self._capture = self.settings.capture or CudaCapture()
        ops = ops_for(shape.device.type)
        drafter = self.drafter if isinstance(self.drafter, AutoregressiveDrafter) else None
        self._head = drafter
        self._never = self._why_never(ops.paged_width)
        self._compiled = self._compile()
        state = RoundState(rows, self.cache.pool, shape.device)
        self._machine = Machine(self.target, self.forward, self.cache, ops, drafter, self.max_context, state)
        if self._compiled is not None:  # now: no request shall wait for a compiler
            with torch.inference_mode():
                for bucket in [one for one in self._buckets if one <= self._compiled.settings.max_rows]:
                    self._recording(_Kind(bucket, None if drafter is None else drafter.shape, None))

    def run(self, requests: Sequence[Request]) -> Walk | None:
        """The round of these rows; None where it has to run eagerly."""
        reason = self._never or self._why_eager(requests)
        if reason is not None:
            if reason not in self._said:
                self._said.add(reason)
                logger.info("cuda graphs: rounds run eagerly where %s", reason)
            return None
        try:
            recorded = self._recording(self._kind(requests))
        except EngineError as error:  # for good: the next round would meet the same
            self._never = "they cannot be recorded"
            self._said.add(self._never)
            logger.warning("cuda graphs: %s; all rounds run eagerly", error)
            return None
        state, rows = self._machine.state, len(requests)
        state.settle(requests)
        state.place(self._standing(requests), recorded.round.rows)
        recorded.replay()
        numbers = recorded.round.found[:rows].tolist()
        found = as_walk(recorded.round.followed, numbers, [])
        for row, (accepted, tokens) in enumerate(zip(found.accepted, found.path_tokens, strict=True)):
            state.left[row] = (tokens[-1], state.left[row][1] + accepted + 1, accepted + 1, 1)
        if self._head is not None:
            self._head.note_round(requests, found)
        return found

    def _compile(self) -> CompiledRounds | None:
        if self.settings.compiled is None:
            return None
        if self._never is not None:
            raise CompileError(f"torch_compile: no round is recorded, since {self._never}; leave --torch-compile out")
        head = None if self._head is None else self._head.module
        return CompiledRounds(self.settings.compiled, self.forward, head)

    # -- which rounds --------------------------------------------------------------------------------------------------

    def _why_never(self, paged_width: int) -> str | None:
        if not isinstance(self.drafter, (NoDrafter, AutoregressiveDrafter)):
            return f"{type(self.drafter).__name__} decides on the host what is drafted"
        shapes = [one.shape for one in (self.cache, *(self._head.reader.caches if self._head is not None else ()))]
        widest = max(max(shape.head_dim, shape.value_dim or 0) for shape in shapes)
        if shapes[0].device.type == "cuda" and widest > paged_width:
            return f"heads of {widest} are wider than the {paged_width} that attention reads from pages"
        return None

    def _why_eager(self, requests: Sequence[Request]) -> str | None:
        if len(requests) > self._buckets[-1]:
            return f"more than {self._buckets[-1]} requests run"
        head = self._head
        if any(is_edited(one) or one.params.logprobs is not None for one in requests):
            return "a request has penalties, biases or min_tokens, or asks for log-probabilities"
        if head is None:
            return None
        if self.verifier.draws_drafts and any(one.params.temperature > 0 for one in requests):
            return f'drafts are drawn (verify="{self.verifier.name}")'
        if any(head.shape_of(one) != head.shape for one in requests):
            return "a request is not drafted for in the engine's own shape"
        if max(head.pending.counts[: len(requests)]) > head.shape.num_steps + 1:
            return "the head has more to read than one round leaves"
        return None

    def _kind(self, requests: Sequence[Request]) -> _Kind:
        bucket = next(one for one in self._buckets if one >= len(requests))
        drawing = [one.params for one in requests if one.params.temperature > 0]
        cut = any(map(_is_cut, drawing)) if drawing else None
        return _Kind(bucket, None if self._head is None else self._head.shape, cut)

    # -- their recordings ----------------------------------------------------------------------------------------------

    def _recording(self, kind: _Kind) -> _Recorded:
        if self._head is not None:
            pending = self._head.pending
            pending.hold(self._buckets[-1], self._head.shape.num_steps + 1)
            if pending.features is not self._held:  # they grew, so that what was recorded reads old ones
                self._recorded.clear()
                self._capture = self.settings.capture or CudaCapture()  # a pool dies with its graphs
                self._held = pending.features
        if kind not in self._recorded:
            self._recorded[kind] = self._record(kind)
        return self._recorded[kind]

    def _record(self, kind: _Kind) -> _Recorded:
        """Recorded on padding rows, so that no request's pages change; what waits in these rows is put back."""
        started = time.perf_counter()
        machine, rows = self._machine, slice(0, kind.bucket)
        laws = None if kind.cut is None else FixedLaws(machine.state, kind.bucket, cut=kind.cut)
        one = DeviceRound(machine, kind.bucket, kind.shape, laws)
        compiled = self._compiled
        if compiled is not None and kind.bucket > compiled.settings.max_rows:
            compiled = None
        stores = [] if self._head is None else self._head.pending.stores
        before = [store[rows].clone() for store in stores]
        machine.state.place([], kind.bucket)
        try:
            replay = self._capture(one if compiled is None else compiled.around(one))
        finally:
            for store, kept in zip(stores, before, strict=True):
                store[rows] = kept
        what = "plain decoding" if kind.shape is None else kind.shape.name
        law = {None: "greedy", False: "sampled", True: "sampled from cut laws"}[kind.cut]
        law += "" if compiled is None else ", compiled"
        seconds = time.perf_counter() - started
        logger.info("cuda graphs: %d rows of %s, %s, recorded in %.1f s", kind.bucket, what, law, seconds)
        return _Recorded(one, replay)

    def _standing(self, requests: Sequence[Request]) -> list[Standing]:
        head = self._head
        if head is not None:
            head.first_tokens(requests)
        counts = [PADDING[2]] * len(requests) if head is None else head.pending.counts[: len(requests)]
        return [(one.output_ids[-1], one.length - 1, count, 1) for one, count in zip(requests, counts, strict=True)]


def _is_cut(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0
