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

import torch
from torch import Tensor

from toolkit.infer.cache.round_state import RoundState
from toolkit.infer.kernels.dispatch import ops_for
from toolkit.infer.request.draft_tree import DraftTree, upload
from toolkit.infer.request.request import Request, TokenLogprob
from toolkit.infer.verify.logits_processors import GrammarMasks, LogitEdits, below_min_tokens, is_edited
from toolkit.infer.verify.token_distribution import RowDistributions
from toolkit.infer.verify.verifiers import NO_TOKEN, TARGET, Verifier, VerifyResult


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


# (logits [B, n, V], positions [B, n]: index in the sequence of the token to choose, tree, first) -> the tokens after
# the nodes first .. first+n-1 of `tree`.
NodeSampler = Callable[..., Choices]


class Sampler:
    """The NodeSampler of some requests, by row. Built when the rows change, used in every step.

    Rows without penalties, bias, min_tokens and grammar skip the edits; greedy rows skip the draws. Call `cut` on every
    tree before the target reads it.
    """

    def __init__(
        self, requests: Sequence[Request], vocab_size: int, device: torch.device, verifier: Verifier = TARGET
    ) -> None:
        params = [request.params for request in requests]
        edited = [row for row, one in enumerate(requests) if is_edited(one) or one.grammar is not None]
        sampled = [row for row, one in enumerate(params) if one.temperature > 0]
        self._choose, self._all_sampled = verifier.choose, len(sampled) == len(params)
        self._sampled = upload(sampled, device, torch.long)
        self._distributions = RowDistributions.of([params[row] for row in sampled], device) if sampled else None
        self._edits = self._masks = None
        self._edited: Tensor | None = None
        if edited:
            self._edited = upload(edited, device, torch.long)
            both = [(sampled.index(row), at) for at, row in enumerate(edited) if row in sampled]
            self._both = upload(both, device, torch.long).view(-1, 2).unbind(dim=1)  # places in `sampled`, in `edited`
        if any(map(is_edited, requests)):
            self._edits = LogitEdits(requests, edited, vocab_size, device)
        if any(one.grammar is not None for one in requests):
            self._masks = GrammarMasks(requests, edited, vocab_size, device)
        self._asking = [row for row, p in enumerate(params) if p.logprobs is not None]
        self._asking_rows = upload(self._asking, device, torch.long)
        self._most = max((p.logprobs or 0 for p in params), default=0)
        self._below_min = [request for request in requests if below_min_tokens(request)]
        self._forced = ForcedAnswers.of(requests, device)

    @property
    def outdated(self) -> bool:
        """True after a row has reached its min_tokens: a new Sampler may skip the edits of this row."""
        return any(not below_min_tokens(request) for request in self._below_min)

    def cut(self, tree: DraftTree) -> DraftTree:
        """Returns the tree without drafts outside of the rows' grammars."""
        return tree if self._masks is None else self._masks.cut(tree)

    def __call__(self, logits: Tensor, positions: Tensor, tree: DraftTree, first: int = 0) -> Choices:
        """See `NodeSampler`."""
        tokens = self._tokens(logits, self._edit(logits, positions, tree, first), positions, tree)
        if self._forced is not None:
            tokens = self._forced(tokens, positions)
        if not self._asking:
            return Choices(tokens, None)
        rows = self._asking_rows
        return Choices(tokens, NodeLogprobs.of(self._asking, rows, self._most, logits[rows], tokens[rows]))

    def _edit(self, logits: Tensor, positions: Tensor, tree: DraftTree, first: int) -> Tensor | None:
        """Returns the edited logits of the edited rows, fp32; None if there are none."""
        if self._edited is None:
            return None
        edited = logits[self._edited].float()
        if self._edits is not None:
            self._edits.apply(edited, positions[self._edited], tree, first)
        if self._masks is not None:
            self._masks.apply(edited, tree, first)
        return edited

    def _tokens(self, logits: Tensor, edited: Tensor | None, positions: Tensor, tree: DraftTree) -> Tensor:
        if self._distributions is None or not self._all_sampled:
            tokens = greedy(logits)
            if edited is not None and self._edited is not None:
                tokens.index_copy_(0, self._edited, greedy(edited))
            if self._distributions is None:
                return tokens
        rows = self._sampled
        own = logits if self._all_sampled else logits[rows]
        if edited is not None:
            own = own.float().index_copy(0, self._both[0], edited[self._both[1]])
        at = positions if self._all_sampled else positions[rows]
        drawn = self._choose(self._distributions, own, at, tree, rows)
        return drawn if self._all_sampled else tokens.index_copy_(0, rows, drawn)


def recorded_sampler(state: RoundState, rows: int, cut: bool | None) -> NodeSampler:
    """Returns the NodeSampler of a captured round of `rows` rows without edits, whose settings are those of `state` at
    the replay. cut: rows may have top-k, top-p or min-p; None: all rows are greedy."""
    sampled = state.sampled[:rows, None]
    names = ("temperature", "top_p", "top_k", "min_p", "seeds")
    of_rows = {name: getattr(state, name)[:rows] for name in names}
    distributions = None if cut is None else RowDistributions(**of_rows, cut=cut)

    def choose(logits: Tensor, positions: Tensor, tree: DraftTree, first: int = 0) -> Choices:
        best = greedy(logits)
        if distributions is None:
            return Choices(best, None)
        return Choices(torch.where(sampled, distributions.draw(logits, positions), best), None)

    return choose


class ForcedAnswers:
    """The tokens of `Request.forced_ids` in place of the target's choices, so that the accepted text is the answer.
    Rows without forced ids keep the choices."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        answers = [torch.tensor(one.forced_ids or [NO_TOKEN]) for one in requests]
        padded = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=NO_TOKEN)
        self._ids = padded.to(device)  # [B, L], L tokens of the longest answer
        self._begins = upload([[len(one.prompt_ids)] for one in requests], device)

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device) -> ForcedAnswers | None:
        """None if no request has forced ids."""
        return cls(requests, device) if any(one.forced_ids for one in requests) else None

    def __call__(self, choices: Tensor, positions: Tensor) -> Tensor:
        """choices, positions [B, n]: the target's tokens and their indices in the sequence. Returns the tokens [B, n].

        Nodes past the end of an answer keep the target's choice; the request ends before it."""
        at = (positions - self._begins).clamp(max=self._ids.shape[1] - 1)
        forced = self._ids.gather(1, at)
        return torch.where(forced == NO_TOKEN, choices, forced)


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
