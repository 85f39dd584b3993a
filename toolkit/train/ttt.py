"""Training-time test (EAGLE-3, arXiv 2503.01840, section 3.2): the head's own outputs fed back for K steps.

Every position t of a sequence is a root whose chain of drafts is unrolled in parallel with all others.

    step k, root t:   hidden   k = 0: fused feature f_t        k > 0: the head's output at (t, k-1)
                      embed    x_{t+1+k} (ground truth)        position t+k
                      attends  step-0 keys of positions 0..t, and its own keys of steps 1..k
                      predicts x_{t+2+k}

which is what a drafted chain attends to when served: committed positions, then its own drafts.

Shapes: B sequences, L positions, T = B*L, H hidden size, A auxiliary layers, hd head dim, kv key/value heads, G query
heads a key/value head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from toolkit.models.eagle3 import Eagle3Head


class TTTAttention:
    """The attention of one unroll, called once a step by the draft layer; exact, in the dtype it is given."""

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length = batch, length
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, kv*G, hd], k and v [T, kv, hd] -> [T, kv*G, hd]."""
        q, k, v = (x.view(self.batch, self.length, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
        self.keys.append(k)
        self.values.append(v)
        group = q.shape[1] // k.shape[1]
        if len(self.keys) == 1:
            repeated = (x.repeat_interleave(group, dim=1) for x in (k, v))
            out = F.scaled_dot_product_attention(q, *repeated, is_causal=True)
        else:
            out = self._with_own_drafts(q, group)
        return out.transpose(1, 2).flatten(0, 1)

    def _with_own_drafts(self, q: torch.Tensor, group: int) -> torch.Tensor:
        """Causal over the step-0 keys, and each root over its own later keys (the diagonals), in one softmax."""
        batch, heads, length, width = q.shape
        q = q.unflatten(1, (heads // group, group)) * width**-0.5
        first = q.flatten(2, 3) @ self.keys[0].transpose(-1, -2)
        first = first.unflatten(2, (group, length)).float()
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        first = first.masked_fill(future, float("-inf"))
        own = [(q * key.unsqueeze(2)).sum(-1, dtype=torch.float32) for key in self.keys[1:]]
        weights = torch.cat((first, torch.stack(own, dim=-1)), dim=-1).softmax(-1).to(q.dtype)
        out = (weights[..., :length].flatten(2, 3) @ self.values[0]).unflatten(2, (group, length))
        for step, value in enumerate(self.values[1:]):
            out = out + weights[..., length + step].unsqueeze(-1) * value.unsqueeze(2)
        return out.flatten(1, 2)


def unroll(head: Eagle3Head, aux: torch.Tensor, embeds: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    """Yield the head's hidden states [B, L, H] (before its final norm) of steps 0..steps-1.

    aux [B, L, A*Ht] are the target's features, embeds [B, L, H] its embeddings of the same tokens. Rows whose token
    t+1+k lies past the end hold zeros as embedding; nothing is supervised there.
    """
    batch, length, width = embeds.shape
    attend = TTTAttention(batch, length)
    positions = torch.arange(length, device=embeds.device).repeat(batch)
    hidden = head.fuse(aux.flatten(0, 1))
    for step in range(steps):
        shifted = F.pad(embeds[:, 1 + step :], (0, 0, 0, min(1 + step, length)))
        hidden = head(shifted.flatten(0, 1), hidden, positions + step, attend, length + steps)
        yield hidden.view(batch, length, width)
