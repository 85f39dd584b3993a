"""The rounds of an engine as CUDA graphs: which graph a round of some requests has, and why one has none.

A round that a graph does not support runs eagerly; the reason is logged once. Both leave the same state. The host's
work around a round is in engine/round.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.cache.round_state import RoundState
from toolkit.infer.drafters.drafter import Drafter
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.graphs.compiled_forward import CompiledForward
from toolkit.infer.graphs.recordings import Capture, Kind, Recorded, Recordings, RunRound, buckets_up_to
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request
from toolkit.infer.verify.logits_processors import is_edited
from toolkit.infer.verify.verifiers import Verifier
from toolkit.log import get_logger

logger = get_logger(__name__)


class GraphRounds:
    """The graphs of one engine, captured when it is built.

    run_round: the function to capture; it runs on `state`. rows: the engine's largest batch. cuda_graph_max_bs: larger
    rounds run eagerly. torch_compile_max_bs: larger ones have uncompiled layers; None: all. capture: how to capture a
    round; None: as a CUDA graph. short_lived: capture a round when it is needed, not when the engine is built.
    Raises CompileError.
    """

    def __init__(
        self,
        run_round: RunRound,
        state: RoundState,
        forward: TargetForward,
        drafter: Drafter,
        verifier: Verifier,
        *,
        rows: int,
        cuda_graph_max_bs: int,
        torch_compile_max_bs: int | None = None,
        capture: Capture | None = None,
        short_lived: bool = False,
    ) -> None:
        self._head = drafter if isinstance(drafter, HeadDrafter) else None
        self._verifier, self._short_lived = verifier, short_lived
        self._said: set[str] = set()
        compiled = None
        if torch_compile_max_bs is not None:
            compiled = CompiledForward(forward, None if self._head is None else self._head.reader)
        buckets = buckets_up_to(min(cuda_graph_max_bs, rows))
        self.recordings = Recordings(
            run_round, state, self._head, buckets, rows, capture, compiled, torch_compile_max_bs or 0
        )
        self.record_all()

    @torch.inference_mode()
    def record_all(self) -> None:
        """Capture all rounds of the current draft shape, unless at their first use. No round may be in flight."""
        if not self._short_lived:
            shape = None if self._head is None else self._head.shape
            self.recordings.record_all(shape, drawn=not self._verifier.draws_drafts)

    def graph_for(self, requests: Sequence[Request]) -> tuple[Kind, Recorded] | None:
        """The graph of a round of these requests, and its kind; None if the round has to run eagerly."""
        kind = self.kind_of(requests)
        recorded = None if kind is None else self.recordings.of(kind)
        return None if kind is None or recorded is None else (kind, recorded)

    def kind_of(self, requests: Sequence[Request]) -> Kind | None:
        """The kind of graph for a round of these requests; None if it has to run eagerly."""
        reason = self.why_eager(requests)
        if reason is not None:
            if reason not in self._said:
                self._said.add(reason)
                logger.info("cuda graphs: rounds run eagerly where %s", reason)
            return None
        bucket = next(one for one in self.recordings.buckets if one >= len(requests))
        drawing = [one.params for one in requests if one.params.temperature > 0]
        cut = any(map(_is_cut, drawing)) if drawing else None
        return Kind(bucket, None if self._head is None else self._head.shape, cut)

    def why_eager(self, requests: Sequence[Request]) -> str | None:
        """Why a round of these requests has no graph; None: it has one."""
        head, most = self._head, self.recordings.buckets[-1]
        if len(requests) > most:
            return f"more than {most} requests run"
        if any(is_edited(one) or one.params.logprobs is not None for one in requests):
            return "a request has penalties, biases or min_tokens, or asks for log-probabilities"
        if any(one.grammar is not None for one in requests):
            return "a request has a grammar, which the host reads at every node"
        if head is None:
            return None
        if any(map(self._verifier.draws_for, requests)):
            return f"drafts are drawn (`verify` is {self._verifier.name})"
        if any(head.shape_of(one) != head.shape for one in requests):
            return "a request has another draft shape than the engine, or no drafts"
        if max(head.unread[: len(requests)]) > head.shape.num_steps + 1:
            return "the head has more unread positions than one round leaves"
        return None


def _is_cut(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0
