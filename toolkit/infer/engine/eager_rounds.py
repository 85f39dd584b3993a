"""Eager rounds (without CUDA graphs): the host's work before and after each round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.infer.cache.round_state import RoundRows, RoundState, RowState, advanced, row_states
from toolkit.infer.drafters.drafter import Drafter
from toolkit.infer.engine.round import RoundContext, run_round
from toolkit.infer.request.draft_tree import DraftTree
from toolkit.infer.request.request import Request
from toolkit.infer.verify.sampler import NodeLogprobs, Sampler
from toolkit.infer.verify.verifiers import Verifier, VerifyResult, read_result


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
            tree = drafter.propose(requests, rows)
            proposed = time.perf_counter()
            return tree

        rows, stood = self.stand(requests)
        self._state.begin_round(len(requests))
        output = run_round(self._context, rows, propose, self._sampler_of(requests))
        result = read_result(output.followed, output.choices.extra)
        drafter.observe(requests, result)
        self._state.left[: len(stood)] = advanced(stood, result.path_tokens, self._unread(len(stood)))
        return EagerResult(result, output.choices.logprobs, proposed)

    def stand(self, requests: Sequence[Request]) -> tuple[RoundRows, list[RowState]]:
        """Copy lengths, roots and page tables of the requests to the device. Returns the rows and their states."""
        count, head = len(requests), self._context.head
        if head is not None:
            head.first_tokens(requests)
        stood = row_states(requests, self._unread(count))
        self._state.stand(stood, count)
        self._state.take_pages(count, count)
        return self._state.rows(count, max(length for _, length, _, _ in stood)), stood

    def _unread(self, count: int) -> list[int] | None:
        """Number of positions of each row that the head has not read; None without a head."""
        return None if self._context.head is None else self._context.head.unread[:count]

    def _sampler_of(self, requests: Sequence[Request]) -> Sampler:
        if self._sampler is None or self._sampler.outdated:
            target = self._context.forward.target
            self._sampler = Sampler(requests, target.vocab_size, target.device, self._verifier)
        return self._sampler
