"""Keep a head's drafts inside of the rows' grammars, so that few of them are cut afterwards.

A grammar can be told to the head only level by level: what may follow a draft depends on the draft. The host reads the
tokens of each level, and sets the head's logits of tokens outside of the grammar to -inf:

    committed {"a":      level 1 at the root   1 .6   x .3   "b" .1        x is masked: 1 and "b" are drafted
                         level 2 at 1          , .7   } .2   x .1          by the state after {"a":1

Shapes: B rows, n nodes of a level, D size of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.infer.request.request import Request
from toolkit.infer.verify.logits_processors import packed, unpacked


class DraftMasks:
    """The grammars of one round of drafting. ids [D]: the target ids of the draft vocabulary."""

    def __init__(self, requests: Sequence[Request], ids: Tensor) -> None:
        self._requests, self._ids = requests, ids
        self._mask_bytes = next(one.grammar.mask_bytes for one in requests if one.grammar is not None)
        self._paths: list[list[list[int]]] = [[[]] for _ in requests]  # by row and node of the level: its drafts

    @classmethod
    def of(cls, requests: Sequence[Request], ids: Tensor) -> DraftMasks | None:
        """None if no request has a grammar."""
        return cls(requests, ids) if any(one.grammar is not None for one in requests) else None

    def __call__(self, logits: Tensor) -> Tensor:
        """Returns the logits [B, n, D] of the level, masked. They stay as they are at a node that nothing of the draft
        vocabulary may follow: what is drafted there is cut later."""
        masks: list[list[bytes | None]] = [
            [None] * len(paths) if one.grammar is None else one.grammar.after(one.output_ids, paths)
            for one, paths in zip(self._requests, self._paths, strict=True)
        ]
        allowed = unpacked(packed(masks, self._mask_bytes, self._ids.device))[..., self._ids]
        return logits.masked_fill(~allowed & allowed.any(dim=-1, keepdim=True), -torch.inf)

    def grow(self, tokens: Tensor, parents: Tensor | None) -> None:
        """Takes the next level: tokens and parents [B, n], the place of each node's parent in the level above. None:
        every level has one node."""
        above = torch.zeros_like(tokens) if parents is None else parents
        levels = torch.stack((tokens, above), dim=1).tolist()
        self._paths = [
            [[*paths[parent], token] for token, parent in zip(*level, strict=True)]
            for paths, level in zip(self._paths, levels, strict=True)
        ]
