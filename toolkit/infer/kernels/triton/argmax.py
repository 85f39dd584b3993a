"""`reference.argmax` in Triton: the most probable token of each row, in one pass over the logits.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits per load


@triton.jit
def _argmax_rows(logits, ids, row_stride, vocabulary, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, block)
    best = tl.full((block,), float("-inf"), tl.float32)
    # A lane whose logits are all -inf keeps its first id, so a tie of -inf goes to the lowest id too.
    at = lanes
    for start in range(0, vocabulary, block):
        here = start + lanes
        # Convert to fp32 right after the load: Triton's interpreter computes wrong results in bf16.
        values = tl.load(logits + row * row_stride + here, mask=here < vocabulary, other=float("-inf")).to(tl.float32)
        better = values > best
        best = tl.where(better, values, best)
        at = tl.where(better, here, at)
    top = tl.max(best, axis=0)
    lowest = tl.min(tl.where(best == top, at, vocabulary - 1), axis=0)
    tl.store(ids + row, lowest.to(tl.int64))


def argmax(logits: Tensor) -> Tensor:
    """Logits [..., V] in any floating type -> ids [...] int64; the lowest id on a tie; nan counts as -inf."""
    rows = logits.reshape(-1, logits.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    ids = torch.empty(len(rows), dtype=torch.long, device=logits.device)
    if len(rows):
        _argmax_rows[(len(rows),)](rows, ids, rows.stride(0), rows.shape[1], block=BLOCK)
    return ids.view(logits.shape[:-1])
