"""The training pass of a block drafter (`heads/dspark.py`): the blocks of all roots in one pass.

Every position t of a sequence is a root, as in ttt.py. Its block drafts at once what a chain drafts step by step, so
supervision, losses and forecasts are those of a chain:

    step k, root t:   query    k = 0: x_{t+1} (ground truth)    k > 0: mask k            position t+1+k
                      attends  keys of the features of positions 0..t, and all keys of its own block
                      bias     of the token x_{t+1+k} (ground truth)
                      predicts x_{t+2+k}

A block whose first place is no draft (DFlash) drafts step k at place k+1, at position t+2+k, where the masks are.

Shapes: B sequences, L positions, N roots a row, b places of a block, Q = N*b, H hidden size, W feature width, hd head
dim, kv key/value heads, G query heads a key/value head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.checkpoint import checkpoint

from toolkit.heads.dspark import DSparkHead
from toolkit.train.causal_attention import Reach
from toolkit.train.ttt import MergedAttention


class BlockAttention:
    """The attention of one layer: first `write`, then one call. reach: the context that each query [B, Q] sees."""

    def __init__(self, batch: int, size: int, reach: Reach) -> None:
        self.batch, self.size, self.reach = batch, size, reach
        self.context: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """k and v [B*L, kv, hd] of the context."""
        self.context = self._by_head(k), self._by_head(v)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [B*Q, kv*G, hd], k and v [B*Q, kv, hd] -> like q."""
        assert self.context is not None, "the context is written first"
        keys, values = ([one, *self._own(new)] for one, new in zip(self.context, (k, v), strict=True))
        out = MergedAttention.apply(self._by_head(q), self.reach, *keys, *values)
        return out.transpose(1, 2).flatten(0, 1)

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (self.batch, -1)).transpose(1, 2)

    def _own(self, x: torch.Tensor) -> list[torch.Tensor]:
        """For each place of a block, what stands there in the block of each query: b times [B, kv, Q, hd]."""
        blocks = self._by_head(x).unflatten(2, (-1, self.size))
        return [one.repeat_interleave(self.size, dim=2) for one in blocks.unbind(3)]


def unroll_blocks(
    head: DSparkHead,
    features: torch.Tensor,
    embeds: torch.Tensor,
    steps: int,
    starts: torch.Tensor | None = None,
    anchors: torch.Tensor | None = None,
    *,
    checkpointing: bool = False,
) -> Iterator[torch.Tensor]:
    """Yield the states [B, N, H] of steps 0..steps-1, at most as many as the head drafts, as `ttt.unroll` does.
    Arguments: of `ttt.unroll`.

    A root whose x_{t+1} lies past the end of its row reads the row's last token; it is not supervised.
    """
    (batch, length, width), size, device = embeds.shape, head.config.block_size, embeds.device
    first_draft = size - head.config.drafts_at_once
    assert steps <= size - first_draft, f"a block of {size} has no step {steps}"
    every = torch.arange(length, device=device).expand(batch, -1)
    starts = torch.zeros_like(every) if starts is None else starts
    roots = every if anchors is None else anchors

    def whole(at: torch.Tensor) -> torch.Tensor:
        """Values at roots [B, N, ..] repeated for the places of their blocks: [B, Q, ..]."""
        return at.repeat_interleave(size, dim=1)

    def of_roots(values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return whole(values.gather(1, at[:, :, None].expand(-1, -1, values.shape[2]))).flatten(0, 1)

    first = starts.gather(1, roots)
    places = torch.arange(size, device=device).repeat(roots.shape[1])
    positions = (whole(roots - first) + 1 + places).flatten()
    reach = Reach(whole(first), whole(roots))

    def run(features: torch.Tensor) -> torch.Tensor:
        layers = [BlockAttention(batch, size, reach) for _ in head.layers]
        hidden = head.first_hidden(features.flatten(0, 1))
        written, attending = iter(layers), iter(layers)
        head.write_context(hidden, (every - starts).flatten(), length + size, lambda k, v: next(written).write(k, v))
        queries = of_roots(embeds, (roots + 1).clamp(max=length - 1))
        of_features = of_roots(hidden.view(batch, length, -1), roots)
        attend = lambda q, k, v: next(attending)(q, k, v)  # noqa: E731
        return head(queries, of_features, positions, attend, length + size)

    if checkpointing and torch.is_grad_enabled():
        states = checkpoint(run, features, use_reentrant=False, preserve_rng_state=False)
    else:
        states = run(features)
    yield from head.read(0, states).view(batch, -1, size, width).unbind(2)[first_draft : first_draft + steps]
