"""Choose the token after every node, by argmax or by a draw, and keep the log-probabilities of chosen tokens.

By default a draw is a pure function of (seed, position, logits). A verified tree node therefore draws the same token as
plain decoding at the same position. Verification that accepts a draft only if it equals the draw is exact at any
temperature. `verifiers.py` has the other rules.

Log-probabilities are the log-softmax of the target's logits, before any sampling parameter, as in vLLM and SGLang by
default. They describe the target's distribution, not the one drawn from.

Shapes: B rows of the batch, R of them asked for log-probabilities, N nodes a row, n nodes in this call, K most probable
tokens, A longest path, V vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from toolkit.infer.kernels.dispatch import ops_for
from toolkit.infer.request.draft_tree import DraftTree
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request, TokenLogprob
from toolkit.infer.request.upload import upload
from toolkit.infer.verify.forced import ForcedAnswers
from toolkit.infer.verify.grammar_masks import GrammarMasks
from toolkit.infer.verify.logit_edits import LogitEdits, holds_stops, is_edited
from toolkit.infer.verify.token_distribution import RowDistributions
from toolkit.infer.verify.verifiers import TARGET, Verifier, VerifyResult

GREEDY = SamplingParams()


@dataclass(frozen=True)
class Choices:
    """The token after every node. tokens [B, n]. logprobs: of the rows that asked for them; None if no row did."""

    tokens: Tensor
    logprobs: NodeLogprobs | None

    @property
    def extra(self) -> Callable[[Tensor], Tensor] | None:
        """The argument `extra` of `read_result`."""
        return None if self.logprobs is None else self.logprobs.extra

    @classmethod
    def joined(cls, parts: Sequence[Choices]) -> Choices:
        """Concatenates parts along the nodes."""
        kept = [part.logprobs for part in parts if part.logprobs is not None]
        return cls(torch.cat([part.tokens for part in parts], dim=1), NodeLogprobs.joined(kept) if kept else None)


class NodeSampler(Protocol):
    """Chooses the tokens of a round."""

    def __call__(self, logits: Tensor, positions: Tensor, tree: DraftTree, first: int = 0) -> Choices:
        """Returns the tokens after the nodes first .. first+n-1 of `tree`.

        logits [B, n, V]. positions [B, n]: index in the sequence of the token to choose.
        """
        ...


class Sampler:
    """The sampling parameters of the running rows as tensors. Built when the rows change, used in every step.

    Rows without penalties, bias, min_tokens and grammar skip the edits; greedy rows skip the draws. Call `cut` on every
    tree before the target reads it.
    """

    def __init__(
        self, requests: Sequence[Request], vocab_size: int, device: torch.device, verifier: Verifier = TARGET
    ) -> None:
        params = [request.params for request in requests]
        edited = [row for row, one in enumerate(requests) if is_edited(one) or one.grammar is not None]
        self._plain_rows = _Rows([p if row not in edited else GREEDY for row, p in enumerate(params)], verifier, device)
        self._edits = self._masks = None
        self._edited: Tensor | None = None
        if edited:
            self._edited = upload(edited, device, torch.long)
            self._edited_rows = _Rows([params[row] for row in edited], verifier, device, edited)
        if any(map(is_edited, requests)):
            self._edits = LogitEdits(requests, edited, vocab_size, device)
        if any(one.grammar is not None for one in requests):
            self._masks = GrammarMasks(requests, edited, vocab_size, device)
        self._asking = [row for row, p in enumerate(params) if p.logprobs is not None]
        self._asking_rows = upload(self._asking, device, torch.long)
        self._most = max((p.logprobs or 0 for p in params), default=0)
        self._holding = [request for request in requests if holds_stops(request)]
        self._forced = ForcedAnswers.of(requests, device)

    @property
    def outdated(self) -> bool:
        """True after a row has reached its min_tokens: a new Sampler may skip the edits of this row."""
        return any(not holds_stops(request) for request in self._holding)

    def cut(self, tree: DraftTree) -> DraftTree:
        """Returns the tree without drafts outside of the rows' grammars."""
        return tree if self._masks is None else self._masks.cut(tree)

    def __call__(self, logits: Tensor, positions: Tensor, tree: DraftTree, first: int = 0) -> Choices:
        """See `NodeSampler`."""
        tokens = self._plain_rows(logits, positions, tree)
        if self._edited is not None:
            rows = self._edited
            changed = logits[rows].float()
            if self._edits is not None:
                self._edits.apply(changed, positions[rows], tree, first)
            if self._masks is not None:
                self._masks.apply(changed, tree, first)
            tokens = tokens.index_copy(0, rows, self._edited_rows(changed, positions[rows], tree))
        if self._forced is not None:
            tokens = self._forced(tokens, positions)
        if not self._asking:
            return Choices(tokens, None)
        rows = self._asking_rows
        return Choices(tokens, NodeLogprobs.of(self._asking, rows, self._most, logits[rows], tokens[rows]))


class _Rows:
    """Some rows of the batch; those with temperature > 0 draw. numbers: their row numbers in it (None: all rows)."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        verifier: Verifier,
        device: torch.device,
        numbers: Sequence[int] | None = None,
    ) -> None:
        hot = [row for row, settings in enumerate(params) if settings.temperature > 0]
        self._hot = upload(hot, device, torch.long)
        self._all_hot = len(hot) == len(params)
        self._numbers = self._hot if numbers is None else upload(numbers, device)[self._hot]
        self._distributions = RowDistributions([params[row] for row in hot], device)
        self._choose = verifier.choose

    def __call__(self, logits: Tensor, positions: Tensor, tree: DraftTree) -> Tensor:
        """logits [R, n, V] and positions [R, n] of these rows, tree of the whole batch -> token ids [R, n]."""
        if not len(self._hot):
            return greedy(logits)
        if self._all_hot:
            return self._choose(self._distributions, logits, positions, tree, self._numbers)
        chosen = self._choose(self._distributions, logits[self._hot], positions[self._hot], tree, self._numbers)
        return greedy(logits).index_copy_(0, self._hot, chosen)


def greedy(logits: Tensor) -> Tensor:
    """Returns the most probable token, the lowest id among equals: [..., V] -> [...]."""
    return ops_for(logits.device.type).argmax(logits)


def most_probable(logits: Tensor, count: int) -> Tensor:
    """Returns the ids of the `count` largest of fp32 logits [..., V], largest first, lowest id first among equals.

    Plain topk chooses among equals by `count`, so a request's entries would depend on what another one asks for.
    """
    bits, words = (logits + 0.0).view(torch.int32), logits.shape[-1]  # -0.0 is 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # in the order of the floats
    unequal = ordered * words + torch.arange(words - 1, -1, -1, device=logits.device)
    return unequal.topk(min(count, words), dim=-1).indices


@dataclass(frozen=True)
class NodeLogprobs:
    """Log-probabilities at every node of the rows that asked.

    rows: their row numbers in the batch; at [R]: the same on the device. chosen [R, N]: of the token chosen. top, ids
    [R, N, K]: the K most probable tokens.
    """

    rows: Sequence[int]
    at: Tensor
    chosen: Tensor
    top: Tensor
    ids: Tensor

    @classmethod
    def of(cls, rows: Sequence[int], at: Tensor, most: int, logits: Tensor, tokens: Tensor) -> NodeLogprobs:
        """Computes them. logits [R, n, V] of any floating type; tokens [R, n]: the tokens chosen; most: K."""
        values = logits.float()
        ids = most_probable(values, most)
        values = values.log_softmax(dim=-1)  # by row: the bits of logsumexp depend on the other rows
        return cls(rows, at, values.gather(2, tokens[:, :, None]).squeeze(2), values.gather(2, ids), ids)

    @classmethod
    def joined(cls, parts: Sequence[NodeLogprobs]) -> NodeLogprobs:
        """Concatenates parts along the nodes."""
        chosen, top, ids = (
            torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("chosen", "top", "ids")
        )
        return cls(parts[0].rows, parts[0].at, chosen, top, ids)

    def extra(self, path: Tensor) -> Tensor:
        """Returns the entries of the nodes on `path` [B, A] as int64 of one dimension (`extra` of `read_result`)."""
        path = path[self.at]
        wide = path[:, :, None].expand(-1, -1, self.top.shape[2])
        chosen, top, ids = self.chosen.gather(1, path)[:, :, None], self.top.gather(1, wide), self.ids.gather(1, wide)
        bits = torch.cat((chosen, top), dim=2).contiguous().view(torch.int32).long()  # fp32 bits, not rounded
        return torch.cat((bits, ids), dim=2).flatten()

    def record(self, requests: Sequence[Request], result: VerifyResult) -> None:
        """Appends the entries of the newest tokens to every request that asked. result: read with `extra`."""
        most, nodes = self.top.shape[2], result.path.shape[1]
        read = iter(_nodes_of(result.extra_numbers, most))
        for row in self.rows:
            request = requests[row]
            new, wanted = request.output_ids[len(request.logprobs) :], request.params.logprobs
            entries = list(islice(read, nodes))  # of the whole path; the request may have got only a part
            for token, (chosen, values, ids) in zip(new, entries, strict=False):
                best = tuple(zip(ids[:wanted], values[:wanted], strict=True))
                request.logprobs.append(TokenLogprob(token, chosen, best))


def _nodes_of(read: Sequence[int], most: int) -> Iterator[tuple[float, list[float], list[int]]]:
    """Yields for each node: log-probability of the token chosen, those of the `most` best tokens, and their ids."""
    for start in range(0, len(read), 1 + 2 * most):
        middle = start + 1 + most
        chosen, *values = memoryview(array("i", read[start:middle])).cast("B").cast("f")
        yield chosen, values, list(read[middle : middle + most])
