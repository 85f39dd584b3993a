"""Attention, norms, products, argmax, top-k, cuts of distributions and draws in plain torch: the reference that faster
kernels must match.

Shapes: B rows, N queries per row, S keys, Hq query heads, Hkv key heads, G = Hq / Hkv, D head dim of queries and keys,
Dv of values (equal to D except in DeepSeek's latent attention), V vocabulary. Of sampling: M rows, W most probable
tokens.

The heads of a group are folded into the query rows, so that keys and values are not repeated:

    q [B, Hq, N, D] -> [B, Hkv, G*N, D] against k, v [B, Hkv, S, ..]      (row g*N + n: query n, head g)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def argmax(logits: Tensor) -> Tensor:
    """Return the most probable token, the lowest id on a tie: logits [..., V] -> [...] int64."""
    # torch.argmax is five times slower in bf16 on a CPU.
    return logits.max(dim=-1).indices


def top_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k most probable tokens of logits [..., V]: log-probabilities fp32 and ids int64, both [..., k].

    Log-probabilities are <= 0, never nan, and descending. On a tie any of the ids are returned.
    """
    logits = logits.float()
    top, ids = logits.topk(k, dim=-1)
    scores = (top - logits.logsumexp(dim=-1, keepdim=True)).clamp(max=0.0)
    return torch.nan_to_num(scores, nan=-torch.inf, neginf=-torch.inf), ids


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, rounded: bool) -> Tensor:
    """RMSNorm (arXiv 1910.07467) of x [..., H] by weight [H] + offset, computed in fp32.

    rounded: the normed numbers are rounded to x's dtype before they are multiplied by the weight, as in Llama; then
    there is no offset.
    """
    numbers = x.float()
    numbers = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + eps)
    if rounded:
        return weight * numbers.to(x.dtype)
    return (numbers * (offset + weight.float())).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """x [..., K], weight [N, K], bias [N], residual [..., N] -> x @ weight^T + bias + residual, [..., N]."""
    product = F.linear(x, weight, bias)
    return product if residual is None else residual + product


def scaled_product(x: Tensor, levels: Tensor, scales: Tensor) -> Tensor:
    """x [M, K], levels [N, K] in float8, scales [N] fp32 -> x @ (levels * scales)^T, [M, N]."""
    return F.linear(x, (levels.float() * scales[:, None]).to(x.dtype))


def gated_linear(x: Tensor, gate_up: Tensor) -> Tensor:
    """x [..., K], gate_up [2 I, K], the gate's rows first -> silu(gate) * up of SwiGLU (arXiv 2002.05202), [..., I]."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.silu(gate) * up


def additive_mask(allowed: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """allowed [B, N, S] bool -> [B, 1, G*N, S]: 0 where allowed, -inf elsewhere. Every query needs an allowed key."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
    rows, queries, keys = allowed.shape
    return mask[:, None].expand(rows, groups, queries, keys).reshape(rows, 1, groups * queries, keys)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [B, Hq, N, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv], mask [B, 1, G*N, S] additive or None (all keys)
    -> [B, N, Hq, Dv].

    softcap c replaces a score s by c * tanh(s / c) before the mask (Gemma 2, arXiv 2408.00118).
    sinks [Hq] are scores of a key without a value: they add to the softmax denominator only (GPT-OSS, arXiv
    2508.10925).
    """
    rows, q_heads, queries, width = q.shape
    kv_heads = k.shape[1]
    folded = q.reshape(rows, kv_heads, q_heads // kv_heads * queries, width)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scaling)
    else:
        scores = torch.matmul(folded, k.transpose(-1, -2)).float() * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores + mask
        out = torch.matmul(_shares(scores, sinks).to(v.dtype), v)
    return out.reshape(rows, q_heads, queries, v.shape[-1]).transpose(1, 2)


def _shares(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [B, Hkv, G*N, S] over the keys, and over the query head's sink if sinks [Hq] are given."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    rows, kv_heads, folded, _ = scores.shape
    groups = len(sinks) // kv_heads
    column = sinks.float().view(1, kv_heads, groups, 1).expand(rows, kv_heads, groups, folded // groups)
    return torch.softmax(torch.cat((scores, column.reshape(rows, kv_heads, folded, 1)), dim=-1), dim=-1)[..., :-1]


def attend_causal(q: Tensor, k: Tensor, v: Tensor, *, scaling: float) -> Tensor:
    """Causal attention: q [B, Hq, N, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv] -> [B, N, Hq, Dv]."""
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2)


BLOCK = 256
UNDIVIDED = 1024  # the most tokens that are drawn in one step
GOLDEN = -7046029254386353131


def least_kept(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the least logit that top-k, top-p and min-p keep, [M, 1] fp32; -inf if they cut nothing.

    logits [M, V] fp32. top_k int64, top_p fp64, min_p fp32 [M]: the values 0, 1 and 0 cut nothing. top-k keeps the k
    largest logits, and those equal to the last of them; top-p the fewest of these with the share top_p of their mass;
    min-p those with min_p times the largest probability.
    """
    return floors_of(logits, *logits.sort(dim=-1, descending=True), top_k, top_p, min_p)[0]


def floors_of(
    logits: Tensor, top: Tensor, ids: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """`least_kept` by the W largest logits, `top` [M, W], and their ids. Also return certain [M]: W were enough."""
    width = top.shape[1]
    # top-k: drop the tokens below the k-th largest; top-p then counts in shares of the mass that is left.
    kth = top.gather(1, (top_k.clamp(1, width) - 1)[:, None])
    limit = kth.masked_fill(top_k[:, None] == 0, -torch.inf)
    # softmax works by row: sums of other forms have bits that depend on the rows beside it.
    mass = logits.masked_fill(logits < limit, -torch.inf).softmax(dim=-1).gather(1, ids).double()
    # top-p: the first place where the sorted mass reaches top_p is the last place kept.
    reached = mass.cumsum(dim=-1) >= top_p[:, None]
    inside = reached.any(dim=-1)
    last = torch.where(inside, reached.int().argmax(dim=-1), width - 1)
    floor = top.gather(1, last[:, None]).masked_fill(top_p[:, None] == 1, -torch.inf)
    floor = torch.maximum(torch.maximum(floor, limit), top[:, :1] + min_p.double().log().float()[:, None])
    return floor, (top_k <= width) & (inside | (top_p == 1))


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Draw by the inverse CDF: weights [M, V] >= 0 (each row with a positive sum), u [M] in [0, 1) -> indices [M].

    Of many tokens it draws a block of BLOCK tokens first, then the token in it, so that sums stay short and exact.
    """
    rows, size = weights.shape
    if size <= UNDIVIDED:
        sums = weights.double().cumsum(dim=-1)
        return _first_above(sums, u * sums[:, -1])
    padding = -size % BLOCK
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    blocks = weights.view(rows, -1, BLOCK)
    edges = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    goal = u * edges[:, -1]
    block = _first_above(edges, goal)
    inside = blocks[torch.arange(rows, device=weights.device), block].double().cumsum(dim=-1)
    before = edges.gather(1, (block - 1).clamp(min=0)[:, None]).squeeze(1).masked_fill(block == 0, 0.0)
    return block * BLOCK + _first_above(inside, goal - before)


def _first_above(sums: Tensor, goal: Tensor) -> Tensor:
    """Return the index [M] of the first running sum [M, W] above `goal` [M].

    If rounding leaves none, return the index of the last sum that grew.
    """
    goal = torch.minimum(goal, sums[:, -1] * (1 - 2.0**-50))
    return torch.searchsorted(sums, goal[:, None], right=True).squeeze(1).clamp(max=sums.shape[1] - 1)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return SplitMix64 (Steele et al., OOPSLA 2014) of (seed, position), int64 that broadcast: float64 in [0, 1)."""
    x = mix(seeds) + positions * GOLDEN
    return _shift(mix(x), 11).double() * 2.0**-53


def mix(x: Tensor) -> Tensor:
    """Return SplitMix64's output function of a state, int64."""
    x = x + GOLDEN
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Return the logical right shift of int64 (the shift of torch keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
