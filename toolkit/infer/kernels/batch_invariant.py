"""Operations whose result for a row has the same bits whatever rows are computed beside it, in plain torch.

A library chooses its program by the number of rows, and a vector's last numbers may take another path than the others.
Three remedies, all slower than what they replace:

    products          blocks of ROWS rows: the library sees one shape only
    functions (exp)   vectors of LANES numbers of one row, in calls too small to be divided among threads
    sums              halves added to each other: additions of two numbers are exact to the bit anywhere

Shapes: B rows, N queries per row, S keys, Hq query heads, Hkv key heads, G = Hq / Hkv, D head dim of queries and keys,
Dv of values, K keys of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.infer.kernels.paged_reference import Pages, Scoring, gather_pages

ROWS = 16
LANES = 64  # two vectors of bfloat16 with AVX-512, which torch's loops take together
SERIAL = 16384  # numbers of a call; torch divides 32768 and more among threads
KEYS = 64  # keys of a block, counted from the first one that a query sees
QUERIES = 16  # queries attended at once, which bounds the memory


def in_row_blocks(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`product` of rows x [..., K] -> [..., N], in blocks of ROWS rows."""
    rows = x.reshape(-1, x.shape[-1])
    padded = F.pad(rows, (0, 0, 0, -len(rows) % ROWS))
    out = torch.cat([product(block) for block in padded.split(ROWS)])[: len(rows)]
    return out.view(*x.shape[:-1], out.shape[-1])


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N]."""
    return in_row_blocks(lambda rows: F.linear(rows, weight, bias), x)


def in_lanes(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise `function` of x [..., W]: the numbers of a vector are always those of the same places of a row."""
    width = x.shape[-1]
    padded = F.pad(x, (0, -width % LANES)).contiguous()
    parts = [function(part) for part in padded.view(-1).split(SERIAL)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(padded.shape)[..., :width]


def sum_by_halves(x: Tensor, dim: int) -> Tensor:
    """The sum over one dimension. Its order depends on the dimension's size alone."""
    while (size := x.shape[dim]) > 1:
        half = (size + 1) // 2
        first, second = x.narrow(dim, 0, half), x.narrow(dim, half, size - half)
        both = first.narrow(dim, 0, size - half) + second
        x = both if size % 2 == 0 else torch.cat((both, first.narrow(dim, half - 1, 1)), dim=dim)
    return x.squeeze(dim)


def attend_in_order(q: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, scoring: Scoring) -> Tensor:
    """q [B, Hq, N, D], keys [B, S, Hkv, D], values [B, S, Hkv, Dv], allowed [B, N, S] bool -> [B, N, Hq, Dv].

    Each query adds the keys that it may see in ascending order of position, without gaps: the order of plain decoding,
    where a path's ancestors come before it. Of the window of `scoring`, `allowed` is aware already.
    """
    queries = q.split(QUERIES, dim=2), allowed.split(QUERIES, dim=1)
    return torch.cat([_attend(*some, keys, values, scoring) for some in zip(*queries, strict=True)], dim=1)


def attend_paths(q: Tensor, pages: Pages, lengths: Tensor, path: Tensor, counts: Tensor, scoring: Scoring) -> Tensor:
    """q [B, Hq, N, D] -> [B, N, Hq, Dv]. Query n adds lengths[b] committed keys, then those of counts[b, n] nodes.

    path [B, N, M]: the nodes that each query sees, in ascending order, itself last; [B, 1, M]: the queries share one.
    Node m is stored at lengths[b] + m. The order of the keys is the order of their positions, also for a window.
    """
    at = torch.arange(pages.span, device=q.device)
    places, ends = at.expand(*counts.shape, -1), lengths[:, None] + counts
    nodes = path.gather(2, (at - lengths[:, None]).clamp(0, path.shape[2] - 1)[:, None].expand(-1, path.shape[1], -1))
    places = torch.where(at < lengths[:, None, None], places, lengths[:, None, None] + nodes)
    allowed = at < ends[:, :, None]
    if scoring.window is not None:
        allowed = allowed & (ends[:, :, None] - 1 - at < scoring.window)
    seen = allowed.new_zeros(*counts.shape, pages.span + 1)  # the last one takes what is not allowed
    seen = seen.scatter_(2, places.masked_fill(~allowed, pages.span), allowed)[:, :, :-1]
    return attend_in_order(q, *gather_pages(pages), seen, scoring)


def _attend(q: Tensor, allowed: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
    groups, row = q.shape[1] // keys.shape[2], torch.arange(len(q), device=q.device)[:, None, None]
    asked = (q.float() * scoring.scaling).transpose(1, 2).unflatten(2, (-1, groups))[:, :, None]  # [B, N, 1, Hkv, G, D]
    counts = allowed.sum(dim=-1, keepdim=True)  # [B, N, 1]
    most = int(counts.max())
    order = allowed.logical_not().byte().argsort(dim=-1, stable=True)[..., :most]
    blocks = F.pad(order, (0, -most % KEYS)).split(KEYS, dim=-1)  # [B, N, K] each
    found = [sum_by_halves(asked * keys[row, at].float()[..., None, :], -1).flatten(3) for at in blocks]
    scores = torch.cat(found, dim=2).transpose(2, 3).contiguous()  # [B, N, Hq, S]
    if scoring.softcap is not None:
        scores = in_lanes(torch.tanh, scores / scoring.softcap) * scoring.softcap
    absent = torch.arange(scores.shape[-1], device=q.device) >= counts
    scores = scores.masked_fill(absent[:, :, None], -torch.inf)
    if scoring.sinks is not None:  # a key without a value, in a block of its own
        sinks = F.pad(scoring.sinks.float()[:, None], (0, KEYS - 1), value=-torch.inf)
        scores = torch.cat((sinks.expand(*scores.shape[:3], KEYS), scores), dim=-1)
    weights = in_lanes(torch.exp, scores - scores.amax(dim=-1, keepdim=True)).split(KEYS, dim=-1)  # [B, N, Hq, K] each
    whole, out = torch.zeros(()), torch.zeros(())
    for part in weights:
        whole = whole + sum_by_halves(part, -1)
    for part, at in zip(weights[-len(blocks) :], blocks, strict=True):
        shares = part.transpose(2, 3).unflatten(3, (-1, groups))[..., None]  # [B, N, K, Hkv, G, 1]
        out = out + sum_by_halves(shares * values[row, at].float()[..., None, :], 2)
    return (out.flatten(2, 3) / whole[..., None]).to(q.dtype)
