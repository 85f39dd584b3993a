"""Apply penalties, logit bias and min_tokens to the target's logits, at every node of a request's tree.

An edit depends on one token's logit and on the count of this token in the preceding text. Only tokens of the preceding
text, tokens with a bias and stop ids can change: C candidates a row in place of the vocabulary.

Shapes: B rows of the batch, R of them edited, N nodes of a tree, n nodes in this call, C candidates a row,
V vocabulary.

The text before the token that a node chooses is the committed text and the drafts on the node's path. The root is
committed already and is not counted twice:

    committed  ... x      tree  x ── a ── b          at node b: committed, a, b
                                  └─ c               at node c: committed, c
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from toolkit.infer.request.draft_tree import DraftTree
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request
from toolkit.infer.request.upload import upload


def penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def is_edited(request: Request) -> bool:
    """Returns whether the target's logits are edited before the next token of this request is chosen."""
    return penalises(request.params) or bool(request.params.logit_bias) or holds_stops(request)


def holds_stops(request: Request) -> bool:
    """Returns whether min_tokens still forbids the stop ids."""
    return bool(request.stop_set) and len(request.output_ids) < request.params.min_tokens


class LogitEdits:
    """The edits of some rows of the batch. `apply` first counts the new tokens of their answers.

    requests: all requests of the batch. rows: the numbers of the edited ones, ascending.
    """

    def __init__(self, requests: Sequence[Request], rows: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.rows = upload(rows, device, torch.long)
        self._requests = [requests[row] for row in rows]
        size = (len(rows), vocab_size)
        self._counts = torch.zeros(size, dtype=torch.float32, device=device)  # of each token in the answer
        self._in_prompt = torch.zeros(size, dtype=torch.bool, device=device)
        self._bias = torch.zeros(size, dtype=torch.float32, device=device)
        self._stops = torch.zeros(size, dtype=torch.bool, device=device)
        self._read = [0] * len(rows)  # answer tokens counted
        biases = [request.params.biases for request in self._requests]
        stops = [[token for token in request.stop_set if token < vocab_size] for request in self._requests]
        prompts = [one.prompt_ids if one.params.repetition_penalty != 1 else [] for one in self._requests]
        added = [value for bias in biases for value in bias.values()]
        self._bias[self._places(biases)] = upload(added, device, torch.float32)
        self._stops[self._places(stops)] = True
        self._in_prompt[self._places(prompts)] = True
        self._known = [{*one[0], *one[1], *one[2]} for one in zip(biases, stops, prompts, strict=True)]
        self._candidates = self._padded([sorted(known) for known in self._known])
        self._settings(device)

    def _places(self, ids: Sequence[Iterable[int]]) -> tuple[Tensor, Tensor]:
        """Returns the rows and ids of all entries of `ids`, which has a collection for each row."""
        pairs = [(row, one) for row, some in enumerate(ids) for one in some]
        rows, tokens = upload(pairs, self.rows.device, torch.long).view(-1, 2).unbind(dim=1)
        return rows, tokens

    def _settings(self, device: torch.device) -> None:
        params = [request.params for request in self._requests]

        def column(values: list[float]) -> Tensor:
            return upload(values, device, torch.float32)[:, None, None]

        self._repetition = column([p.repetition_penalty for p in params])
        self._frequency = column([p.frequency_penalty for p in params])
        self._presence = column([p.presence_penalty for p in params])
        first = [len(r.prompt_ids) + r.params.min_tokens for r in self._requests]
        self._stops_from = upload(first, device)[:, None]  # the first position where a stop id is allowed

    def apply(self, logits: Tensor, positions: Tensor, tree: DraftTree, first: int) -> None:
        """Edits logits in place: [R, n, V] fp32, at the nodes first .. first+n-1 of the edited rows.

        positions [R, n]: index in the sequence of the token that each node chooses. tree: of the whole batch.
        """
        self._follow()
        nodes = logits.shape[1]
        drafts = tree.tokens[self.rows, 1:]
        on_path = tree.mask[self.rows, first : first + nodes, 1:]
        # A token may occur twice in `ids`. Both entries then hold the same value, so either may be kept.
        ids = torch.cat((self._candidates, drafts), dim=1)
        repeated = (drafts[:, :, None] == ids[:, None]).float()
        counts = self._counts.gather(1, ids)[:, None] + on_path.float() @ repeated
        index = ids[:, None].expand(-1, nodes, -1)
        logits.scatter_(2, index, self._edited(logits.gather(2, index), counts, ids, positions))

    def _edited(self, logits: Tensor, counts: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        """Returns the edited logits [R, n, C]. logits, counts [R, n, C]: of the tokens ids [R, C]."""
        in_answer = counts > 0
        scaled = torch.where(logits > 0, logits / self._repetition, logits * self._repetition)
        logits = torch.where(in_answer | self._in_prompt.gather(1, ids)[:, None], scaled, logits)
        logits = logits - self._frequency * counts - self._presence * in_answer
        logits = logits + self._bias.gather(1, ids)[:, None]
        too_early = positions < self._stops_from
        return logits.masked_fill(self._stops.gather(1, ids)[:, None] & too_early[:, :, None], -torch.inf)

    def _follow(self) -> None:
        """Counts the tokens that the answers got since the last call."""
        written: list[list[int]] = []
        fresh: list[list[int]] = []
        for row, request in enumerate(self._requests):
            new = request.output_ids[self._read[row] :] if penalises(request.params) else []
            self._read[row] += len(new)
            written.append(new)
            fresh.append(sorted(set(new) - self._known[row]))
            self._known[row].update(new)
        if not any(written):
            return
        places = self._places(written)
        self._counts.index_put_(places, torch.ones(len(places[0]), device=self._counts.device), accumulate=True)
        if any(fresh):
            self._candidates = torch.cat((self._candidates, self._padded(fresh)), dim=1)

    def _padded(self, ids: list[list[int]]) -> Tensor:
        """Returns ids as [R, longest], padded with id 0. The edit of token 0 is right in every row."""
        longest = max(len(row) for row in ids)
        filled = [row + [0] * (longest - len(row)) for row in ids]
        return upload(filled, self.rows.device, torch.long).view(len(ids), longest)
