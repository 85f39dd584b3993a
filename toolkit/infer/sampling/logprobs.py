"""Log-probabilities of chosen tokens under the target's own law: the log-softmax of its logits, before any setting.

That is what vLLM and SGLang return by default. They say what the target thinks, not how the token was drawn.

Shapes: B rows of the batch, R of them asked, N nodes, n of them looked at here, K most probable tokens, A longest path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.infer.request import Request, TokenLogprob
from toolkit.infer.verify import Walk


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

    def record(self, requests: Sequence[Request], found: Walk) -> None:
        """Give every asking request the entries of its newest tokens, those on the path that it really got."""
        path = found.path[list(self.rows)]
        wide = path[:, :, None].expand(-1, -1, self.top.shape[2])
        chosen, top, ids = self.chosen.gather(1, path), self.top.gather(1, wide), self.ids.gather(1, wide)
        for row, *kept in zip(self.rows, chosen.tolist(), top.tolist(), ids.tolist(), strict=True):
            request = requests[row]
            new, most = request.output_ids[len(request.logprobs) :], request.params.logprobs
            for token, logprob, values, tokens in zip(new, *kept, strict=False):
                best = tuple(zip(tokens[:most], values[:most], strict=True))
                request.logprobs.append(TokenLogprob(token, logprob, best))
