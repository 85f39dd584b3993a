"""Prefill: reads prompts into their rows, whole or in chunks, and samples the first tokens.

Shapes: B rows, T tokens of all of them, one row after another, H hidden size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from toolkit.infer.attention.metadata import prompts_metadata
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.cache.linear_states import LinearStates
from toolkit.infer.drafters.drafter import Drafter, unread_tokens
from toolkit.infer.engine.round import append
from toolkit.infer.engine.scheduler import LEAST_CHUNK, Scheduler
from toolkit.infer.graphs.graph_rounds import GraphRounds
from toolkit.infer.request.draft_tree import root_only, upload
from toolkit.infer.request.request import NOT_FINITE, Request, TokenLogprob
from toolkit.infer.verify.sampler import NodeLogprobs, Sampler
from toolkit.infer.verify.verifiers import follow, read_result
from toolkit.targets.target import Target

SMALLEST = 16  # tokens of a chunk: a pass over the weights costs as much as a few of them
SCORED = 64  # prompt tokens whose logits are in memory at once


class PromptReader:
    """Prefills the prompts that the scheduler admits, with the target and the drafter."""

    def __init__(
        self,
        target: Target,
        forward: TargetForward,
        cache: KVCache,
        scheduler: Scheduler,
        states: LinearStates | None = None,
        graphs: GraphRounds | None = None,
    ) -> None:
        """states: of a hybrid target's linear-attention layers; the scheduler then gives prompts one by one. graphs:
        read short prompts that come alone."""
        self._target, self._forward, self._cache, self._scheduler = target, forward, cache, scheduler
        self._states, self._graphs = states, graphs
        self.gap_s: float | None = None  # the pause of running requests that a chunk may make; None: any
        self._token_s = 0.0  # seconds a token of the last chunks

    def _most(self) -> int:
        """Prompt tokens to read now: a power of two that fits the pause, by the measured speed."""
        chunk = self._scheduler.chunk
        if self.gap_s is None or not self._scheduler.running:
            return chunk
        fits = int(self.gap_s / self._token_s) if self._token_s else LEAST_CHUNK
        return min(chunk, 1 << max(SMALLEST.bit_length(), fits.bit_length()) - 1)

    def read_due(self, drafter: Drafter, keep: Callable[[int, Request], None]) -> list[Request]:
        """Prefill one chunk of prompts, or further chunks while no request runs.

        keep(row, request) is called for each request when its text is in the cache.
        Returns the requests that got their first token.
        """
        begun: list[Request] = []
        running, most = self._scheduler.running, self._most()
        left = most
        while True:
            complete, fresh, tokens = self._read_some(left, drafter)
            if not tokens:
                return begun
            self._scheduler.has_read()
            for request in complete:
                request.ready = True
                keep(running.index(request), request)
            begun += fresh
            left = min(left - tokens, self._most()) if running else most
            if left < most / 4:  # too few tokens for another pass over the weights
                return begun

    def _read_some(self, most: int, drafter: Drafter) -> tuple[list[Request], list[Request], int]:
        """Prefill a group of prompts of at most `most` tokens, or a chunk of that size of one long prompt.

        Returns the requests that are complete now, the requests that got their first token (preempted requests have
        one already), and the tokens read: 0 if none are due.
        """
        scheduler = self._scheduler
        group = scheduler.next_group(most)
        if group:
            row, tokens = len(scheduler.running) - len(group), sum(request.unread for request in group)
            self._read_to_page_end(row, group, drafter)
            fresh = self._read(row, group, max(request.unread for request in group), drafter)
            return group, fresh, tokens
        request = scheduler.reading
        if request is None:
            return [], [], 0
        tokens = chunk_of(request.unread, most, drafter.lookahead)
        row = len(scheduler.running)
        if tokens == request.unread:
            group = [scheduler.reading_is_complete()]
            self._read_to_page_end(row, group, drafter)
        return group, self._read(row, [request], min(tokens, request.unread), drafter), tokens

    def _read_to_page_end(self, row: int, group: Sequence[Request], drafter: Drafter) -> None:
        """For a hybrid target, read a prompt up to its last whole page first: the prefix cache keeps the states there.

        The rest needs at least `lookahead` tokens, see `chunk_of`.
        """
        if self._states is None:
            return
        (request,) = group  # the scheduler gives prompts of such targets one by one
        end = request.n_read + request.unread - max(1, drafter.lookahead)
        tokens = end - end % self._cache.pool.page_size - request.n_read
        if tokens > 0:
            self._read(row, group, tokens, drafter)

    def _read(self, first_row: int, group: Sequence[Request], tokens: int, drafter: Drafter) -> list[Request]:
        """Read at most `tokens` next tokens of the rows from first_row on, to the end of all their texts or of none.

        Returns the requests that got their first token."""
        device, begun = self._target.device, time.perf_counter()
        starts, counts = [one.n_read for one in group], [min(tokens, one.unread) for one in group]
        input_ids, whole = unread_tokens(group, counts, device), group[0].unread <= tokens
        hidden = None
        if self._graphs is not None and len(group) == 1:
            hidden = self._graphs.prompt(first_row, input_ids, starts[0])
        if hidden is None:
            positions = upload([[start + i for start, n in zip(starts, counts, strict=True) for i in range(n)]], device)
            metadata = prompts_metadata(self._cache, first_row, starts, counts)
            states = None if self._states is None else self._states.prompt(first_row, starts)
            hidden = self._forward(input_ids, positions, metadata, states)
        drafter.admit(first_row, group, tokens)
        for request, own, start in zip(group, hidden[0].split(counts), starts, strict=True):
            if request.params.prompt_logprobs is not None:
                self._score_prompt(request, own, start)
        seconds = (time.perf_counter() - begun) / sum(counts)
        self._token_s = (self._token_s + seconds) / 2 if self._token_s else seconds
        for request, count in zip(group, counts, strict=True):
            request.n_read += count
        if self._states is not None:
            self._states.end_prompt([request.n_read for request in group])
        last = [end - 1 for end in accumulate(counts)]
        return self._first_tokens(group, input_ids[0], hidden[0], last) if whole else []

    def _score_prompt(self, request: Request, hidden: Tensor, start: int) -> None:
        """Keep the log-probabilities of the prompt's tokens that follow hidden [N, H], the states from `start` on."""
        begin = max(start, len(request.prompt_logprobs))  # a preempted request is read again
        for at in range(begin, min(start + len(hidden), len(request.prompt_ids) - 1), SCORED):
            ids = request.prompt_ids[at + 1 : min(at + SCORED, start + len(hidden)) + 1]
            tokens = upload([ids], hidden.device, torch.long)
            logits = self._target.logits(hidden[at - start :][: len(ids)])[None]
            most = request.params.prompt_logprobs or 0
            found = NodeLogprobs.of([0], tokens[0, :0], most, logits, tokens)
            columns = (ids, found.chosen[0].tolist(), found.ids[0].tolist(), found.top[0].tolist())
            for token, value, best, values in zip(*columns, strict=True):
                request.prompt_logprobs.append(TokenLogprob(token, value, tuple(zip(best, values, strict=True))))

    def _first_tokens(
        self, group: Sequence[Request], input_ids: Tensor, hidden: Tensor, last: Sequence[int]
    ) -> list[Request]:
        """Sample the first token of prompts that end at the indices `last` of input_ids [T]; hidden [T, H].

        Returns the requests that got a token. Preempted requests have tokens already and get none.
        """
        fresh = [row for row, request in enumerate(group) if not request.output_ids]
        if not fresh:
            return []
        device = hidden.device
        ends = upload([last[row] for row in fresh], device)
        requests = [group[row] for row in fresh]
        positions = upload([[len(request.prompt_ids)] for request in requests], device)
        sampler = Sampler(requests, self._target.vocab_size, device)
        roots = sampler.cut(root_only(input_ids[ends]))
        logits = self._target.logits(hidden[ends])[:, None]
        first = sampler(logits, positions, roots)
        followed = follow(roots, first.tokens)
        followed.mark_nonfinite(hidden[ends], logits.sum(dim=-1, dtype=torch.float32))
        result = read_result(followed, first.extra)
        for row, request in enumerate(requests):
            if any(math.isnan(entry.logprob) for entry in request.prompt_logprobs):
                request.fail(NOT_FINITE)
            else:
                append(request, row, result)
        if first.logprobs is not None:
            first.logprobs.record(requests, result)
        return requests


def chunk_of(unread: int, most: int, lookahead: int) -> int:
    """How many of `unread` tokens to read now: `most` unless the rest is too short.

    The last chunk needs at least `lookahead` tokens: a drafter entry depends on that many following tokens.
    """
    if unread <= most:
        return unread
    rest = max(unread - most, lookahead)
    return unread - rest if unread > rest else unread
