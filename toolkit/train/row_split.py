"""Rows split over processes of a machine, for texts that one device does not hold: each has a part of every row.

Everything but attention works on each position by itself, and runs on the part. Attention needs all earlier positions:
an all-to-all before it gives each process all positions of an Sth of the heads, and one after it gives back the part's
positions of all heads (DeepSpeed-Ulysses, arXiv 2309.14509). So the attention itself, of the target and of the head, is
that of whole rows. What lies ahead of a part is known: the batch is planned on whole rows, which every process reads;
the tokens ahead are embedded here, and the target's last states ahead come from the next process. A root, with its
chain or block, belongs to the part of its position.

Shapes: S processes, B rows, L positions of a row, C of a part (S*C >= L: rows are padded), K steps of the unroll,
W = C + K + 1 (a part and the positions ahead that its roots reach), h heads, hd head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from toolkit.errors import TargetError
from toolkit.heads.decoder_layer import Attend
from toolkit.heads.head_config import HeadConfig
from toolkit.targets.features import Capture, LastCapture, TargetFeatures, target_features
from toolkit.targets.target import Target

ATTENTION = "toolkit_row_split"  # name in transformers' AttentionInterface; it has no mask function
WHOLE = "set train.data.split_rows=1"


@dataclass(frozen=True)
class RowSplit:
    """The processes that hold rows together. longest: positions of the longest row."""

    group: dist.ProcessGroup
    longest: int

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def part(self, length: int, steps: int) -> RowPart:
        """This process's part of rows of `length` positions that are unrolled for `steps`."""
        ahead = steps + 1
        count = max(-(-length // self.size), ahead)  # what a part reads ahead lies in the next one
        return RowPart(self, count * dist.get_rank(self.group), count, ahead)


@dataclass(frozen=True)
class RowPart:
    """Positions [begin, begin + count) of every row of a batch, and those ahead of them that are read too."""

    split: RowSplit
    begin: int
    count: int
    ahead: int

    @property
    def length(self) -> int:
        """Positions of a padded row."""
        return self.split.size * self.count

    def cut(self, whole: Tensor) -> Tensor:
        """[B, L, ...] -> [B, W, ...], with zeros past the end of the rows."""
        part = whole[:, self.begin : self.begin + self.count + self.ahead]
        missing = part.new_zeros(len(part), self.count + self.ahead - part.shape[1], *part.shape[2:])
        return torch.cat((part, missing), dim=1)

    def features(self, target: Target, capture: Capture, input_ids: Tensor) -> TargetFeatures:
        """The features of input_ids [B, W]: `aux` of the part's C positions, `last` of all W."""
        ids = input_ids[:, : self.count]
        at = torch.arange(self.count, device=ids.device)
        positions = (at + self.begin).clamp(max=target.max_context - 1)  # padding may lie past the last one
        with _split_attention_of(target):
            part = target_features(target, capture, ids, (at - positions).expand_as(ids), row_split=self.split)
        return TargetFeatures(part.aux, torch.cat((part.last, self._ahead_of(part.last)), dim=1))

    def attending(self, attend: Attend, batch: int) -> Attend:
        """`attend`, which gets all positions of some heads, for a caller with all heads of its part; see `by_heads`."""

        def split(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = attend(*(self.by_heads(x, batch) for x in (q, k, v)))
            return _exchanged(out.unflatten(0, (batch, -1)), 1, 2, self.split.group).flatten(0, 1)

        return split

    def by_heads(self, x: Tensor, batch: int) -> Tensor:
        """[B*N, h, hd] of a part's N positions, roots or places of blocks -> [B*S*N, h/S, hd] of those of all parts."""
        return _exchanged(x.unflatten(0, (batch, -1)), 2, 1, self.split.group).flatten(0, 1)

    def of_all(self, roots: Tensor) -> Tensor:
        """A part's roots [B, N], N in each part -> the positions in their rows of the roots of all parts, [B, S*N]."""
        return torch.cat(self._gathered(roots + self.begin), dim=1)

    def divided(self, anchors: Tensor) -> tuple[Tensor, Tensor, int]:
        """Ascending anchors [B, N] of whole rows -> those of this part, [B, n]; the place of each of the N among the
        S*n of all parts, [B, N]; n.

        Each part has as many as the part with most: the others are at its last position, and no step supervises them.
        """
        size, device = self.split.size, anchors.device
        part = anchors // self.count
        each = F.one_hot(part, size).sum(1)
        n = int(each.max())
        places = part * n + torch.arange(anchors.shape[1], device=device) - (each.cumsum(1) - each).gather(1, part)
        lasts = (torch.arange(size, device=device) + 1) * self.count - 1
        of_all = lasts.repeat_interleave(n).repeat(len(anchors), 1).scatter(1, places, anchors)
        first = self.begin // self.count * n
        return of_all[:, first : first + n] - self.begin, places, n

    def _ahead_of(self, states: Tensor) -> Tensor:
        """The first positions [B, K+1, H] of the next process's part [B, C, H]; zeros after the last part."""
        firsts = self._gathered(states[:, : self.ahead].contiguous())
        return [*firsts[1:], torch.zeros_like(firsts[0])][dist.get_rank(self.split.group)]

    def _gathered(self, own: Tensor) -> list[Tensor]:
        each = [torch.empty_like(own) for _ in range(self.split.size)]
        dist.all_gather(each, own, group=self.split.group)
        return each


class _Exchange(torch.autograd.Function):
    """All-to-all: dimension `scatter` is divided among the processes, and what they have of `gather` is joined."""

    @staticmethod
    def forward(ctx, x, scatter, gather, group):
        ctx.back = gather, scatter, group
        sent = torch.stack(x.chunk(dist.get_world_size(group), scatter))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), dim=gather)

    @staticmethod
    def backward(ctx, grad):
        return _exchanged(grad, *ctx.back), None, None, None


def _exchanged(x: Tensor, scatter: int, gather: int, group: dist.ProcessGroup) -> Tensor:
    exchanged: Tensor = _Exchange.apply(x, scatter, gather, group)
    return exchanged


def _split_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, row_split: RowSplit, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention of one of the target's layers. q, k, v [B, h, C, hd] -> [B, C, h, hd]."""
    window = options.get("sliding_window")
    fits = window is None or window >= row_split.longest
    if not fits or any(options.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise TargetError(
            f"{type(module).__name__} has a sliding window, a soft cap, sinks or a position bias, and rows are split "
            f"only for plain attention; {WHOLE}"
        )
    q, k, v = (_exchanged(x, 1, 2, row_split.group) for x in (q, k, v))
    out = sdpa_attention_forward(module, q, k, v, None, scaling=options.get("scaling"), is_causal=True)[0]
    return _exchanged(out, 1, 2, row_split.group), None


@contextmanager
def _split_attention_of(target: Target) -> Iterator[None]:
    AttentionInterface.register(ATTENTION, _split_attention)
    config: Any = target.config
    before, config._attn_implementation_internal = config._attn_implementation_internal, ATTENTION
    try:
        yield
    finally:
        config._attn_implementation_internal = before


@torch.no_grad()
def split_rows(target: Target, head: HeadConfig, group: dist.ProcessGroup, longest: int) -> RowSplit:
    """The split of rows over the group, all of whose processes must call this.

    Raises `TargetError` for heads that it cannot divide evenly, or a target whose states differ when rows are split.
    """
    split = RowSplit(group, longest)
    for name, config in ((target.name, target.config), ("the draft head", head)):
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        if heads % split.size or key_heads % split.size:
            raise TargetError(
                f"train.data.split_rows = {split.size}: {name} has {heads} attention heads and {key_heads} key heads; "
                "choose a number that divides both"
            )
    rope = getattr(target.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise TargetError(f"the rotary embedding of {target.name} depends on the length of what it reads; {WHOLE}")
    ids = torch.arange(8 * split.size, device=target.device)[None] * 7 % target.vocab_size
    part, capture = split.part(ids.shape[1], 1), LastCapture(target)
    try:
        ours = part.features(target, capture, part.cut(ids)).last[:, : part.count]
        theirs = part.cut(target_features(target, capture, ids).last)[:, : part.count]
    finally:
        capture.remove()
    difference = (ours - theirs).float().norm() / theirs.float().norm()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX, group=group)
    if not difference < (1e-3 if target.dtype == torch.float32 else 0.1):
        raise TargetError(
            f"the states of {target.name} differ by {float(difference):.0%} where rows are split: its layers do not "
            f"only attend by transformers' attention interface; {WHOLE}"
        )
    return split
