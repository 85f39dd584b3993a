"""Penalties, bias and min_tokens: the target's logits as a request wants them changed, at every node of its tree.

Each edit is a function of one token's logit and of how often that token stands in front, so only tokens that stand
somewhere in front (or have a bias, or stop) are touched: C candidates a row instead of the vocabulary.

Shapes: B rows of the batch, R of them edited, N nodes of a tree, n of them looked at here, C candidates a row,
V vocabulary.

What stands in front of the token that a node chooses is what is committed and the drafts on the node's own path. The
root is committed already, so that it is not counted again:

    committed  ... x      tree  x ── a ── b          at node b: committed, a, b
                                  └─ c               at node c: committed, c
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.infer.request.draft_tree import DraftTree
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request


def penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def is_edited(request: Request) -> bool:
    """True when the next token of this request is not chosen from the target's logits as they are."""
    return penalises(request.params) or bool(request.params.logit_bias) or holds_stops(request)


def holds_stops(request: Request) -> bool:
    """True while min_tokens forbids the stop ids."""
    return bool(request.stop_set) and len(request.output_ids) < request.params.min_tokens


class LogitEdits:
    """The edits of some rows of the batch; follows their answers as they grow.

    requests: all of the batch. rows: the edited ones among them, ascending.
    """

    def __init__(self, requests: Sequence[Request], rows: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.rows = torch.tensor(rows, dtype=torch.long, device=device)
        self._requests = [requests[row] for row in rows]
        size = (len(rows), vocab_size)
        self._counts = torch.zeros(size, dtype=torch.float32, device=device)  # in the answer
        self._in_prompt = torch.zeros(size, dtype=torch.bool, device=device)
        self._bias = torch.zeros(size, dtype=torch.float32, device=device)
        self._stops = torch.zeros(size, dtype=torch.bool, device=device)
        self._read = [0] * len(rows)  # answer tokens counted
        self._known: list[set[int]] = []
        for row, request in enumerate(self._requests):
            bias = request.params.biases
            stops = [token for token in request.stop_set if token < vocab_size]
            prompt = request.prompt_ids if request.params.repetition_penalty != 1 else []
            self._bias[row, list(bias)] = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
            self._stops[row, stops] = True
            self._in_prompt[row, prompt] = True
            self._known.append({*bias, *stops, *prompt})
        self._candidates = self._padded([sorted(known) for known in self._known])
        self._settings(device)

    def _settings(self, device: torch.device) -> None:
        params = [request.params for request in self._requests]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]

        self._repetition = column([p.repetition_penalty for p in params])
        self._frequency = column([p.frequency_penalty for p in params])
        self._presence = column([p.presence_penalty for p in params])
        first = [len(r.prompt_ids) + r.params.min_tokens for r in self._requests]
        self._stops_from = torch.tensor(first, device=device)[:, None]  # the first position where a stop id may stand

    def apply(self, logits: Tensor, positions: Tensor, tree: DraftTree, first: int) -> None:
        """Edits in place. logits [R, n, V] fp32 at the nodes first .. first+n-1 of the edited rows; positions [R, n]:
        index in the sequence of the token that each chooses. tree: the whole batch's."""
        self._follow()
        nodes = logits.shape[1]
        drafts = tree.tokens[self.rows, 1:]
        on_path = tree.mask[self.rows, first : first + nodes, 1:]
        # A token may stand here twice. Both entries then hold the same value, so that it does not matter which is kept.
        ids = torch.cat((self._candidates, drafts), dim=1)
        repeated = (drafts[:, :, None] == ids[:, None]).float()
        counts = self._counts.gather(1, ids)[:, None] + on_path.float() @ repeated
        index = ids[:, None].expand(-1, nodes, -1)
        logits.scatter_(2, index, self._edited(logits.gather(2, index), counts, ids, positions))

    def _edited(self, logits: Tensor, counts: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        """The definition: logits and counts [R, n, C] of the tokens ids [R, C] -> what they become."""
        in_answer = counts > 0
        scaled = torch.where(logits > 0, logits / self._repetition, logits * self._repetition)
        logits = torch.where(in_answer | self._in_prompt.gather(1, ids)[:, None], scaled, logits)
        logits = logits - self._frequency * counts - self._presence * in_answer
        logits = logits + self._bias.gather(1, ids)[:, None]
        too_early = positions < self._stops_from
        return logits.masked_fill(self._stops.gather(1, ids)[:, None] & too_early[:, :, None], -torch.inf)

    def _follow(self) -> None:
        """Count the tokens that the answers got since the last round."""
        fresh: list[list[int]] = []
        rows: list[int] = []
        tokens: list[int] = []
        for row, request in enumerate(self._requests):
            new = request.output_ids[self._read[row] :] if penalises(request.params) else []
            self._read[row] += len(new)
            rows += [row] * len(new)
            tokens += new
            fresh.append(sorted(set(new) - self._known[row]))
            self._known[row].update(new)
        if not tokens:
            return
        at = torch.tensor([rows, tokens], device=self._counts.device)
        one = torch.ones(len(tokens), device=self._counts.device)
        self._counts.index_put_((at[0], at[1]), one, accumulate=True)
        if any(fresh):
            self._candidates = torch.cat((self._candidates, self._padded(fresh)), dim=1)

    def _padded(self, ids: list[list[int]]) -> Tensor:
        """[R, longest]; filled up with id 0, whose edit is right for every row."""
        longest = max(len(row) for row in ids)
        filled = [row + [0] * (longest - len(row)) for row in ids]
        return torch.tensor(filled, dtype=torch.long, device=self.rows.device).view(len(ids), longest)
