"""Causal attention that returns its log-sum-exp, forward and backward, without an [L, L] matrix.

Merging the result with further keys needs the log-sum-exp, which `scaled_dot_product_attention` does not return. On a
CPU torch's internal operator returns it, for queries that see all earlier keys. On an NVIDIA GPU our own kernels do, in
all dtypes but float64 (`triton_attention.py`). In all other cases the code below works in tiles of queries, and
computes the scores again for backward.

The backward takes the output and log-sum-exp of a softmax that may include other keys too: its formulas
(FlashAttention, arXiv 2205.14135, algorithm 4) need nothing else of those keys. With P = exp(scores - lse):

    dV = P' dO      dS = P * (dO V' - rowsum(dO * O))      dQ = dS K * scale      dK = dS' Q * scale

If a query does not see all earlier keys (a sliding window, several documents in a row), or not all positions have a
query, `KeyRange` gives the keys that each query sees. A tile then reads only the keys that its queries see.

Shapes: B sequences, L positions, hd head dim, kv key/value heads, h = kv*G query heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.infer.kernels.dispatch import OLDEST
from toolkit.log import get_logger

TILE = 256  # queries of a tile in plain torch
# With fewer positions the CPU's backward is not faster in bfloat16, also with AMX (8 x 280: 45 ms, in fp32 40 ms).
LONG = 512

logger = get_logger(__name__)


@dataclass(frozen=True)
class KeyRange:
    """The keys that each query sees: first and last [B, N] int64, which both ascend along N."""

    first: Tensor
    last: Tensor

    @cached_property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        """The range of keys (begin, end) that each tile of queries sees; one read from the device."""
        firsts, lasts = self.first.split(TILE, dim=1), self.last.split(TILE, dim=1)
        bounds = torch.stack([torch.stack((a.min(), b.max() + 1)) for a, b in zip(firsts, lasts, strict=True)])
        return tuple((low, high) for low, high in bounds.tolist())


def causal_attention(q: Tensor, k: Tensor, v: Tensor, reach: KeyRange | None = None) -> tuple[Tensor, Tensor]:
    """q [B, h, L, hd], k and v [B, kv, L, hd] -> output like q, and the scores' log-sum-exp [B, h, L].

    With a reach there may be N < L queries. reach None: each query sees all keys up to its own position. Scores are
    scaled by 1/sqrt(hd). The log-sum-exp is in fp32 or fp64, the output in that dtype or in q's. Autograd does not
    differentiate this function; see `causal_attention_backward`.
    """
    kernels = kernels_for(q)
    if kernels is not None:
        return kernels.attend(q, k, v, reach)
    if q.device.type != "cpu" or reach is not None:
        return tiled_forward(q, k, v, reach)
    q, k, v = _for_operator(q, k, v, narrow=True)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)


def causal_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, reach: KeyRange | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of `out`, in the dtype of lse or of the inputs. out and lse [B, h, L] may
    include other keys."""
    kernels = kernels_for(q)
    if kernels is not None:
        return kernels.attend_backward(grad, q, k, v, out, lse, reach)
    if q.device.type != "cpu" or reach is not None:
        return tiled_backward(grad, q, k, v, out, lse, reach)
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    q, k, v = _for_operator(q, k, v, narrow=q.shape[2] >= LONG)
    # The operator needs this memory layout of the log-sum-exp.
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = backward(grad.to(q.dtype), q, k, v, out.to(q.dtype), lse, 0.0, True)
    return dq, *(x.unflatten(1, (kv_heads, group)).sum(2) for x in (dk, dv))


def kernels_for(q: Tensor) -> GpuKernels | None:
    return None if q.dtype == torch.float64 else gpu_kernels(q.device.type)


def _for_operator(q: Tensor, k: Tensor, v: Tensor, *, narrow: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat the key/value heads for each query head. Convert to fp32 unless `narrow` and the CPU has AMX tiles, which
    multiply bfloat16.

    Forward + backward on one thread, 9 heads of 64: without AMX 8 x 280 positions take 25 + 116 ms in bfloat16 and
    20 + 40 ms in fp32; with AMX 2,048 positions take 20 + 88 ms in bfloat16 and 51 + 128 ms in fp32.
    """
    group = q.shape[1] // k.shape[1]
    narrow = narrow and q.dtype == torch.bfloat16 and _has_tiles()
    dtype = q.dtype if narrow else torch.promote_types(q.dtype, torch.float32)
    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    return q.to(dtype), k, v


@cache
def _has_tiles() -> bool:
    """False in versions of torch without `get_capabilities`: fp32 is slower with tiles, never wrong."""
    read = getattr(torch.cpu, "get_capabilities", None)
    return read is not None and read().get("amx_tile", False)


def tiled_forward(q: Tensor, k: Tensor, v: Tensor, reach: KeyRange | None = None) -> tuple[Tensor, Tensor]:
    """`causal_attention` in plain torch."""
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    for start in range(0, q.shape[2], TILE):
        rows, keys = _tile(start, q.shape[2], reach)
        scores = _scores(q, k, rows, keys, reach)
        total = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(total).exp_().to(q.dtype)
        out[:, :, rows] = _heads(weights.flatten(2, 3) @ v[:, :, keys], q.shape[1])
        lse[:, :, rows] = total.squeeze(-1).flatten(1, 2)
    return out, lse


def tiled_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, reach: KeyRange | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`causal_attention_backward` in plain torch; sums over tiles in fp32."""
    kv_heads, width = k.shape[1], q.shape[-1]
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
    delta = (grad.to(lse.dtype) * out).sum(-1)
    for start in range(0, q.shape[2], TILE):
        rows, keys = _tile(start, q.shape[2], reach)
        scores = _scores(q, k, rows, keys, reach)
        of_group = (kv_heads, -1)
        weights = scores.sub_(lse[:, :, rows].unflatten(1, of_group).unsqueeze(-1)).exp_().flatten(2, 3)
        upstream = grad[:, :, rows].unflatten(1, of_group).flatten(2, 3)
        dv[:, :, keys] += weights.to(q.dtype).transpose(-1, -2) @ upstream
        change = (upstream @ v[:, :, keys].transpose(-1, -2)).to(lse.dtype)
        change -= delta[:, :, rows].unflatten(1, of_group).flatten(2, 3).unsqueeze(-1)
        change = change.mul_(weights).mul_(width**-0.5).to(q.dtype)
        dq[:, :, rows] = _heads(change @ k[:, :, keys], q.shape[1])
        dk[:, :, keys] += change.transpose(-1, -2) @ q[:, :, rows].unflatten(1, of_group).flatten(2, 3)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _tile(start: int, length: int, reach: KeyRange | None) -> tuple[slice, slice]:
    """The queries of the tile that begins at `start`, and the range of keys that they see."""
    end = min(start + TILE, length)
    return slice(start, end), slice(0, end) if reach is None else slice(*reach.tiles[start // TILE])


def _scores(q: Tensor, k: Tensor, rows: slice, keys: slice, reach: KeyRange | None) -> Tensor:
    """Scaled scores [B, kv, G, rows, keys] in fp32 or fp64; -inf where the query does not see the key."""
    kv_heads, width = k.shape[1], q.shape[-1]
    part = q[:, :, rows].unflatten(1, (kv_heads, -1))
    count = part.shape[3]
    scores = (part * width**-0.5).flatten(2, 3) @ k[:, :, keys].transpose(-1, -2)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)).unflatten(2, (-1, count))
    if reach is None:
        future = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
        scores[..., rows.start :].masked_fill_(future, float("-inf"))
        return scores
    at = torch.arange(keys.start, keys.stop, device=q.device)
    hidden = (at < reach.first[:, rows, None]) | (at > reach.last[:, rows, None])
    return scores.masked_fill_(hidden[:, None, None], float("-inf"))


def _heads(x: Tensor, heads: int) -> Tensor:
    """[B, kv, G*R, hd] -> [B, h, R, hd]."""
    return x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2)


class GpuKernels(NamedTuple):
    """score_rows replaces the tiles of `loss._score`; attend and attend_backward replace the tiled functions of
    `causal_attention.py`; merge and merge_backward the plain ones of `ttt.py`."""

    score_rows: Callable[..., tuple[Tensor, Tensor]]
    attend: Callable[..., tuple[Tensor, Tensor]]
    attend_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    merge: Callable[..., tuple[Tensor, Tensor]]
    merge_backward: Callable[..., tuple[Tensor, list[Tensor], list[Tensor]]]


@cache
def gpu_kernels(device_type: str) -> GpuKernels | None:
    """The kernels on NVIDIA GPUs with bfloat16 products (Ampere and later); None elsewhere or without Triton. Logs the
    choice once."""
    if device_type != "cuda":
        return None
    missing = _missing()
    if missing is not None:
        logger.info("training computes losses and attention in plain torch: %s", missing)
        return None
    from toolkit.train.triton_attention import attend, attend_backward, merge, merge_backward
    from toolkit.train.triton_loss import score_rows

    logger.info("training computes losses and attention with Triton kernels")
    return GpuKernels(score_rows, attend, attend_backward, merge, merge_backward)


def _missing() -> str | None:
    if torch.version.hip is not None:
        return "the Triton kernels need an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < OLDEST:
        return f"the GPU has compute capability {major}.{minor}, the Triton kernels need {OLDEST[0]}.{OLDEST[1]}"
    return None if find_spec("triton") is not None else "triton is not installed"
