"""Log-probabilities of chosen tokens under the target's own law: the log-softmax of its logits, before any setting.

That is what vLLM and SGLang return by default. They say what the target thinks, not how the token was drawn.

Shapes: B rows of the batch, R of them asked, N nodes, n of them looked at here, K most probable tokens, A longest path.
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
    """Of the token that each node chose: chosen [R, N]; of the K most probable ones: top and ids [R, N, K]."""

    rows: Sequence[int]
    chosen: Tensor
    top: Tensor
    ids: Tensor

    @classmethod
    def of(cls, rows: Sequence[int], most: int, logits: Tensor, tokens: Tensor) -> NodeLogprobs:
        """logits [R, n, V] in any floating type, tokens [R, n]: what was chosen there."""
        values = logits.float()
        whole = values.logsumexp(dim=-1, keepdim=True)
        top, ids = values.topk(min(most, values.shape[-1]), dim=-1)
        return cls(rows, values.gather(2, tokens[:, :, None]).squeeze(2) - whole.squeeze(2), top - whole, ids)

    @classmethod
    def joined(cls, parts: Sequence[NodeLogprobs]) -> NodeLogprobs:
        """Parts that follow one another along the nodes."""
        chosen, top, ids = (
            torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("chosen", "top", "ids")
        )
        return cls(parts[0].rows, chosen, top, ids)

    def extra(self, path: Tensor) -> Tensor:
        """What the host needs of the nodes on `path` [B, A], as int64 [.], for `verify.walk` to read with the rest."""
        path = path[list(self.rows)]
        wide = path[:, :, None].expand(-1, -1, self.top.shape[2])
        chosen, top, ids = self.chosen.gather(1, path)[:, :, None], self.top.gather(1, wide), self.ids.gather(1, wide)
        bits = torch.cat((chosen, top), dim=2).contiguous().view(torch.int32).long()  # as they are, not rounded
        return torch.cat((bits, ids), dim=2).flatten()

    def record(self, requests: Sequence[Request], result: VerifyResult) -> None:
        """Give every asking request the entries of its newest tokens, those on the path that it really got.

        found: walked with `extra`.
        """
        most, nodes = self.top.shape[2], result.path.shape[1]
        read = iter(_nodes_of(result.extra_numbers, most))
        for row in self.rows:
            request = requests[row]
            new, wanted = request.output_ids[len(request.logprobs) :], request.params.logprobs
            entries = list(islice(read, nodes))  # of the whole path, of which the request may have got a part
            for token, (chosen, values, ids) in zip(new, entries, strict=False):
                best = tuple(zip(ids[:wanted], values[:wanted], strict=True))
                request.logprobs.append(TokenLogprob(token, chosen, best))


def _nodes_of(read: Sequence[int], most: int) -> Iterator[tuple[float, list[float], list[int]]]:
    """Of each node: log-probability of the token chosen, of the `most` best ones, and these."""
    for start in range(0, len(read), 1 + 2 * most):
        middle = start + 1 + most
        chosen, *values = memoryview(array("i", read[start:middle])).cast("B").cast("f")
        yield chosen, values, list(read[middle : middle + most])
