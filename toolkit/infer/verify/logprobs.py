"""Log-probabilities of chosen tokens: the log-softmax of the target's logits, before any sampling parameter.

vLLM and SGLang return the same by default. The values describe the target's distribution, not the one drawn from.

Shapes: B rows of the batch, R of them asked, N nodes, n nodes in this call, K most probable tokens, A longest path, V
vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from toolkit.infer.request.request import Request, TokenLogprob
from toolkit.infer.verify.walk import VerifyResult


@dataclass(frozen=True)
class NodeLogprobs:
    """Log-probabilities at every node of the rows that asked.

    rows: their row numbers in the batch. chosen [R, N]: of the token chosen. top, ids [R, N, K]: the K most probable
    tokens.
    """

    rows: Sequence[int]
    chosen: Tensor
    top: Tensor
    ids: Tensor

    @classmethod
    def of(cls, rows: Sequence[int], most: int, logits: Tensor, tokens: Tensor) -> NodeLogprobs:
        """Computes them. logits [R, n, V] of any floating type; tokens [R, n]: the tokens chosen; most: K."""
        values = logits.float()
        whole = values.logsumexp(dim=-1, keepdim=True)
        top, ids = values.topk(min(most, values.shape[-1]), dim=-1)
        return cls(rows, values.gather(2, tokens[:, :, None]).squeeze(2) - whole.squeeze(2), top - whole, ids)

    @classmethod
    def joined(cls, parts: Sequence[NodeLogprobs]) -> NodeLogprobs:
        """Concatenates parts along the nodes."""
        chosen, top, ids = (
            torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("chosen", "top", "ids")
        )
        return cls(parts[0].rows, chosen, top, ids)

    def extra(self, path: Tensor) -> Tensor:
        """Returns the entries of the nodes on `path` [B, A] as int64 of one dimension (`extra` of `read_result`)."""
        path = path[list(self.rows)]
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
