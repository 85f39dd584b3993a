"""Attention, norms, argmax and top-k in plain torch: the reference that faster kernels must match.

Shapes: B rows, N queries per row, S keys, Hq query heads, Hkv key heads, G = Hq / Hkv, D head dim of queries and keys,
Dv of values (equal to D except in DeepSeek's latent attention), V vocabulary.

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
