"""Rounds that accept as many drafts as a pattern says, with everything else computed as ever.

A head with random weights is never right, so the cost of a round would be that of a round that accepts nothing. Inside
`forced` the accepted path of a tree follows its deepest path as far as the pattern says, in the place of the target's
own choices (which are still computed):

    pattern 1 2      row 0 accepts 1, 2, 1, 2, ..      row 1 accepts 2, 1, 2, 1, ..      accept_length 2.5

The pattern and its place in it lie on the device, so that recorded rounds go through it too. Such tokens are not the
target's: nothing but time may be read off them.

Shapes: B rows, N nodes a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from toolkit.infer.kernels.dispatch import Ops
from toolkit.infer.verify import verifiers as verify
from toolkit.tokenmap.token_map import TokenMap


class _Pattern:
    """pattern: drafts accepted, round after round. The token behind them is one that the head cannot draft."""

    def __init__(self, pattern: Sequence[int], token_map: TokenMap, vocab_size: int, device: torch.device) -> None:
        self._pattern = torch.tensor(list(pattern), device=device)
        self._rounds = torch.zeros((), dtype=torch.long, device=device)
        self._drafted = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._drafted[token_map.ids.to(device)] = True
        self._undrafted = int((~self._drafted).nonzero()[0])

    def choices(self, tokens: Tensor, parents: Tensor, mask: Tensor, valid: Tensor, choices: Tensor) -> Tensor:
        """What the target would have to choose, [B, N]; arguments as of `follow_choices`."""
        rows, nodes = tokens.shape
        depths = (mask.sum(dim=-1) - 1).masked_fill(~valid, -1)
        deepest = depths.argmax(dim=1)[:, None, None].expand(-1, 1, nodes)
        turn = (self._rounds + torch.arange(rows, device=tokens.device)) % len(self._pattern)
        wanted = self._pattern[turn][:, None]
        self._rounds.add_(1)
        chosen = mask.gather(1, deepest)[:, 0] & (depths >= 1) & (depths <= wanted)
        others = choices.masked_fill(self._drafted[choices], self._undrafted)
        # Nodes that are not on the path write behind the last column.
        widened = torch.nn.functional.pad(others, (0, 1))
        return widened.scatter(1, parents.masked_fill(~chosen, nodes), tokens)[:, :nodes].contiguous()


@contextmanager
def forced(pattern: Sequence[int], token_map: TokenMap, vocab_size: int, device: torch.device) -> Iterator[None]:
    """Engines that run inside accept by the pattern; graphs must be recorded inside, too.

    Raises ValueError for a pattern without numbers or with negative ones, and where every id can be drafted.
    """
    if not pattern or min(pattern) < 0:
        raise ValueError(f"pattern {list(pattern)} came; at least one number of accepted drafts, 0 or more, is needed")
    if token_map.size >= vocab_size:
        raise ValueError(f"all {vocab_size} ids can be drafted; one that cannot must end a run: a smaller token map")
    place = _Pattern(pattern, token_map, vocab_size, device)
    own = verify.ops_for

    def ops_for(device_type: str) -> Ops:
        ops = own(device_type)

        def follow_choices(*given: Any) -> Any:
            tokens, parents, depths, mask, valid, choices, *others = given
            if tokens.shape[1] > 1:
                choices = place.choices(tokens, parents, mask, valid, choices)
            return ops.follow_choices(tokens, parents, depths, mask, valid, choices, *others)

        return replace(ops, follow_choices=follow_choices)

    verify.ops_for = ops_for
    try:
        yield
    finally:
        verify.ops_for = own
