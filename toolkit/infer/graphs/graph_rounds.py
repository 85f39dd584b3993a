"""Runs rounds as one CUDA graph each: decides which rounds can, and does the host's work around them.

A round that a graph does not support runs eagerly; the reason is logged once. Both leave the same state.

A launched round is in flight until the host has read its results.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.cache.round_state import RoundState, RowState, advanced, row_states
from toolkit.infer.drafters.drafter import Drafter, NoDrafter
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.graphs.compiled_forward import CompiledForward
from toolkit.infer.graphs.recordings import (
    GraphSettings,
    Kind,
    Recorded,
    Recordings,
    RunRound,
    buckets_up_to,
)
from toolkit.infer.kernels.dispatch import ops_for
from toolkit.infer.kernels.tree_reference import AcceptedPath
from toolkit.infer.request.params import CompileError, EngineError, SamplingParams
from toolkit.infer.request.request import Request
from toolkit.infer.verify.logits_processors import is_edited
from toolkit.infer.verify.verifiers import Verifier, VerifyResult, read_result
from toolkit.log import get_logger

logger = get_logger(__name__)


@dataclass
class GraphRounds:
    """The graphs of one engine with a cache of scattered pages. run_round: the function to capture; it runs on `state`.

    Raises EngineError for a cache that graphs do not support.
    """

    settings: GraphSettings
    run_round: RunRound
    state: RoundState
    forward: TargetForward
    cache: KVCache
    drafter: Drafter
    verifier: Verifier
    _said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        shape = self.cache.shape
        assert self.settings.capture is not None or shape.device.type == "cuda", "EngineConfig.check lets no CPU record"
        if self.cache.pool.contiguous:
            raise EngineError(
                "the cache is contiguous, but CUDA graphs need scattered pages; set `scattered_pages` to True"
            )
        rows = self.cache.pool.rows
        buckets = buckets_up_to(min(self.settings.max_rows, rows))
        self._most_rows = buckets[-1]
        self._head = self.drafter if isinstance(self.drafter, HeadDrafter) else None
        self._never = self._why_never(ops_for(shape.device.type).paged_width)
        self._recordings = Recordings(
            self.run_round, self.state, self._head, buckets, rows, self.settings.capture, self._compile()
        )
        self.record_all()

    @torch.inference_mode()
    def record_all(self) -> None:
        """Capture all rounds of the current draft shape, unless at their first use. No round may be in flight."""
        if not self.settings.at_start:
            return
        if self._never is None:
            shape = None if self._head is None else self._head.shape
            self._recordings.record_all(shape, drawn=not self.verifier.draws_drafts)
        else:
            self._say(self._never)

    def launch(self, requests: Sequence[Request]) -> InFlight | None:
        """Launch a round from the current state of these requests. Returns None if it has to run eagerly."""
        kind = self.kind_of(requests)
        recorded = None if kind is None else self._recordings.of(kind)
        if kind is None or recorded is None:
            return None
        self.state.set_sampling(requests)
        if self._head is not None:
            self._head.first_tokens(requests)
        states = row_states(requests, None if self._head is None else self._head.unread[: len(requests)])
        self.state.set_rows(states, kind.bucket)
        return self._start(list(requests), kind, recorded, states)

    def launch_after(self, in_flight: InFlight) -> InFlight:
        """Launch the next round of the same rows, from the state that `in_flight` leaves on the device."""
        return self._start(in_flight.requests, in_flight.kind, in_flight.recorded, None)

    def _start(
        self, requests: list[Request], kind: Kind, recorded: Recorded, states: list[RowState] | None
    ) -> InFlight:
        self.state.set_tables(len(requests), kind.bucket)
        self.state.forget_rows(len(requests))
        recorded.replay()
        return InFlight(requests, kind, recorded, states, HostCopy(recorded.numbers[: len(requests)]))

    def land(self, in_flight: InFlight, following: InFlight | None) -> VerifyResult:
        """Wait for a round and return its result. following: the round that was launched after it, or None."""
        assert in_flight.states is not None, "rounds land in the order in which they were launched"
        result = in_flight.result()
        if self._head is not None:
            self._head.observe_recorded(in_flight.requests, result)
        unread = None if self._head is None else self._head.unread[: len(in_flight.states)]
        states = advanced(in_flight.states, result.path_tokens, unread)
        if following is None:
            self.state.known[: len(states)] = states
        else:
            following.states, following.began = states, time.perf_counter()
        return result

    def _compile(self) -> CompiledForward | None:
        if self.settings.compiled is None:
            return None
        if self._never is not None:
            raise CompileError(
                f"no round is recorded, because {self._never}, so none is compiled; leave `torch_compile` out"
            )
        reader = None if self._head is None else self._head.reader
        return CompiledForward(self.settings.compiled, self.forward, reader)

    # -- choice between graph and eager --------------------------------------------------------------------------------

    def _why_never(self, paged_width: int) -> str | None:
        if not isinstance(self.drafter, (NoDrafter, HeadDrafter)):
            return f"{type(self.drafter).__name__} chooses its drafts on the host"
        if self._head is not None and self._head.ends_chains:
            return "the host ends chains by the head's confidence"
        shapes = [one.shape for one in (self.cache, *(self._head.reader.caches if self._head is not None else ()))]
        widest = max(max(shape.head_dim, shape.value_dim or 0) for shape in shapes)
        if shapes[0].device.type == "cuda" and widest > paged_width:
            return f"heads are {widest} wide, and paged attention supports at most {paged_width}"
        return None

    def kind_of(self, requests: Sequence[Request]) -> Kind | None:
        """The kind of graph for a round of these requests; None if it has to run eagerly."""
        reason = self._never or self._why_eager(requests)
        if reason is not None:
            self._say(reason)
            return None
        bucket = next(one for one in self._recordings.buckets if one >= len(requests))
        drawing = [one.params for one in requests if one.params.temperature > 0]
        cut = any(map(_is_cut, drawing)) if drawing else None
        return Kind(bucket, None if self._head is None else self._head.shape, cut)

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            logger.info("cuda graphs: rounds run eagerly where %s", reason)

    def _why_eager(self, requests: Sequence[Request]) -> str | None:
        if len(requests) > self._most_rows:
            return f"more than {self._most_rows} requests run"
        head = self._head
        if any(is_edited(one) or one.params.logprobs is not None for one in requests):
            return "a request has penalties, biases or min_tokens, or asks for log-probabilities"
        if any(one.grammar is not None for one in requests):
            return "a request has a grammar, which the host reads at every node"
        if head is None:
            return None
        if any(map(self.verifier.draws_for, requests)):
            return f"drafts are drawn (`verify` is {self.verifier.name})"
        if any(head.shape_of(one) != head.shape for one in requests):
            return "a request has another draft shape than the engine, or no drafts"
        if max(head.unread[: len(requests)]) > head.shape.num_steps + 1:
            return "the head has more unread positions than one round leaves"
        return None


def _is_cut(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


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


@dataclass(eq=False)
class InFlight:
    """requests: by row. states: the rows' states at its begin; None until the previous round has landed."""

    requests: list[Request]
    kind: Kind
    recorded: Recorded
    states: list[RowState] | None
    results: HostCopy
    began: float = field(default_factory=time.perf_counter)  # at the earliest the landing of the previous round

    @property
    def most_tokens(self) -> int:
        """The largest number of tokens that it commits per row."""
        return 1 if self.kind.shape is None else self.kind.shape.num_steps + 1

    def result(self) -> VerifyResult:
        """Wait for the round and return its result."""
        return read_result(AcceptedPath(self.results.read()))
