"""Dynamic rows: ids outside of the token map that a head can draft because a running request uses them.

A token map leaves out rare ids, and what it leaves out is never drafted. But ids that a prompt contains, or that the
target has just chosen, are likely to come again (ideas: MicroSpec, arXiv 2605.26444; DynaSpec, arXiv 2510.13847). So
the output matrix gets a block of E further rows, those of the target's output matrix, whose ids change:

    rows       0 .. D-1            D .. D+E-1
    ids        the token map       ids outside of it: the latest that prompts and answers of the batch contained

All requests of a batch share the block. Answers do not depend on it. The first ids of a block are the lowest outside
of the map, so that all its rows are those of different ids at any time.

Shapes: D rows of the token map, E rows of the block, V target vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.infer.request.upload import upload
from toolkit.log import get_logger
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap

log = get_logger(__name__)

# A head's own output matrix takes rows of the target's only if it has stayed near them: mean cosine of its rows.
SAME_ROWS = 0.9
COMPARED = 256  # rows


class DynamicRows:
    """The block. weight [E, H], bias [E] or None. to_target [D + E]: the target ids of all rows; the last E change.

    finish: the target's logit factor or soft cap; None: a head with an output matrix of its own applies none. of_map:
    the layer of the map's rows. If it is a plain one, its weight and the block's become parts of one matrix, and one
    product scores both.
    """

    def __init__(
        self,
        target: Target,
        token_map: TokenMap,
        size: int,
        finish: Callable[[Tensor], Tensor] | None,
        of_map: nn.Module,
    ) -> None:
        kept = token_map.t2d.tolist()
        self._first = list(islice((token for token in range(target.vocab_size) if not kept[token]), size))
        self._kept, self._finish, self._size = kept, finish, token_map.size
        self._target, count = target, len(self._first)
        self.to_target = torch.cat((token_map.ids, token_map.ids.new_zeros(count))).to(target.device)
        self.weight = torch.empty(count, target.hidden_size, dtype=target.dtype, device=target.device)
        self.bias = None if target.lm_head.bias is None else target.lm_head.bias.new_empty(count)
        self._whole: tuple[Tensor, Tensor | None] | None = None  # weight [D + E, H] and bias [D + E] of map and block
        if isinstance(of_map, nn.Linear) and (of_map.bias is None) == (self.bias is None):
            self._whole = self._joined(of_map)
        self.restart()

    @torch.inference_mode(False)  # new weights are copied into the layer outside of that mode
    def _joined(self, of_map: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """Moves the layer's weight and bias, and the block's, into common tensors."""

        def joined(own: Tensor, block: Tensor) -> tuple[Tensor, nn.Parameter, Tensor]:
            whole = own.new_empty(len(own) + len(block), *own.shape[1:])
            whole[: len(own)] = own.detach()
            return whole, nn.Parameter(whole[: len(own)], requires_grad=False), whole[len(own) :]

        weight, of_map.weight, self.weight = joined(of_map.weight, self.weight)
        if self.bias is None or of_map.bias is None:
            return weight, None
        bias, of_map.bias, self.bias = joined(of_map.bias, self.bias)
        return weight, bias

    def restart(self) -> None:
        """Gives the rows to the first ids again, from the target's current weights."""
        # The least recent id first; its row is the next to be replaced.
        self._slots = {token: slot for slot, token in enumerate(self._first)}
        # Of a packed or quantised matrix this is a copy, made once.
        self._rows, self._bias = self._target.lm_head.weight, self._target.lm_head.bias
        if self._rows.data_ptr() != self._target.lm_head.weight.data_ptr():
            log.info("dynamic rows keep a copy of the output matrix, %.0f MB", self._rows.nbytes / 1e6)
        slots = torch.arange(len(self._first), device=self.to_target.device)
        self._fill(slots, torch.tensor(self._first, dtype=torch.long, device=self.to_target.device))

    def use(self, tokens: Sequence[int]) -> None:
        """Gives these ids rows, the last one being the most recent; ids of the token map have theirs already."""
        outside = list(dict.fromkeys(token for token in reversed(tokens) if not self._kept[token]))
        changed: dict[int, int] = {}
        for token in reversed(outside[: len(self._slots)]):
            slot = self._slots.pop(token, None)
            if slot is None:
                oldest = next(iter(self._slots))
                slot = self._slots.pop(oldest)
                changed[slot] = token
            self._slots[token] = slot
        if not changed:
            return
        device = self.to_target.device
        self._fill(*(upload(list(part), device) for part in (changed.keys(), changed.values())))

    def _fill(self, slots: Tensor, ids: Tensor) -> None:
        """Gives the rows `slots` to `ids`, in place: recorded rounds read these tensors."""
        self.to_target[self._size + slots] = ids
        self.weight[slots] = self._rows[ids]
        if self.bias is not None and self._bias is not None:
            self.bias[slots] = self._bias[ids]

    def logits(self, states: Tensor, of_map: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits [..., D + E] of normed states [..., H]; of_map: returns those of the map's rows, [..., D]."""
        scores = F.linear(states.to(self.weight.dtype), *(self._whole or (self.weight, self.bias)))
        scores = scores if self._finish is None else self._finish(scores)
        return scores if self._whole is not None else torch.cat((of_map(states), scores), dim=-1)


def rows_agree(own: Tensor, target: Target, token_map: TokenMap) -> bool:
    """Whether a head's own output matrix [D, H] has rows like the target's: copied from it, and hardly changed."""
    if own.shape[1] != target.hidden_size:
        return False
    take = torch.linspace(0, token_map.size - 1, min(COMPARED, token_map.size)).long()
    mine, theirs = own[take.to(own.device)].float(), target.lm_head.weight[token_map.ids[take].to(own.device)].float()
    return bool(F.cosine_similarity(mine, theirs, dim=1).mean() > SAME_ROWS)
