"""`reference.argmax` and `reference.top_log_probs` in Triton: the most probable tokens, in one pass over the logits.

Shapes: R rows, V vocabulary, S chunks of a row's vocabulary.

The k most probable tokens take two kernels:

    first    one program per chunk: its k best tokens, its largest logit, its sum of exponentials
    second   one program per row: the k best of S * k tokens, and the log-sum-exp of the row
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.infer.kernels.triton.launch import dependent, wait_for_earlier

CHUNK = 4096  # logits per load


@triton.jit(do_not_specialize=["k"])
def _top_of_chunks(logits, top, ids, peaks, sums, row_stride, vocabulary, k, chunk: tl.constexpr):
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    here = part * chunk + tl.arange(0, chunk)
    left = here < vocabulary
    # Convert to fp32 right after the load: Triton's interpreter computes wrong results in bf16.
    values = tl.load(logits + row * row_stride + here, mask=left, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("-inf"))
    peak = tl.max(values, axis=0)
    tl.store(peaks + row * parts + part, peak)
    tl.store(sums + row * parts + part, tl.sum(tl.exp(values - tl.where(peak == float("-inf"), 0.0, peak)), axis=0))
    for place in range(0, k):
        best = tl.max(tl.where(left, values, float("-inf")), axis=0)
        # The lowest id on a tie; the vocabulary size if the chunk has no token left.
        token = tl.min(tl.where(left & (values == best), here, vocabulary), axis=0)
        left = left & (here != token)
        tl.store(top + (row * parts + part) * k + place, best)
        tl.store(ids + (row * parts + part) * k + place, token)


@triton.jit(do_not_specialize=["k"])
def _top_of_rows(
    top, ids, peaks, sums, scores, tokens, vocabulary, k, parts, wide: tl.constexpr, parts_wide: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    part, candidate = tl.arange(0, parts_wide), tl.arange(0, wide)
    peak = tl.load(peaks + row * parts + part, mask=part < parts, other=float("-inf"))
    total = tl.load(sums + row * parts + part, mask=part < parts, other=0.0)
    highest = tl.max(peak, axis=0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    lse = base + tl.log(tl.sum(total * tl.exp(peak - base), axis=0))
    values = tl.load(top + row * parts * k + candidate, mask=candidate < parts * k, other=float("-inf"))
    here = tl.load(ids + row * parts * k + candidate, mask=candidate < parts * k, other=vocabulary)
    left = here < vocabulary
    for place in range(0, k):
        best = tl.max(tl.where(left, values, float("-inf")), axis=0)
        token = tl.min(tl.where(left & (values == best), here, vocabulary), axis=0)
        left = left & (here != token)
        score = tl.minimum(best - lse, 0.0)
        tl.store(scores + row * k + place, tl.where(best > float("-inf"), score, float("-inf")))
        tl.store(tokens + row * k + place, token.to(tl.int64))


def top_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Logits [..., V] -> log-probabilities fp32 and ids int64 [..., k]; the lowest ids on ties; nan counts as -inf."""
    rows, device = logits.reshape(-1, logits.shape[-1]), logits.device
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    count, vocabulary = rows.shape
    assert k <= vocabulary, f"{k} of {vocabulary} tokens were asked for"
    parts = triton.cdiv(vocabulary, CHUNK)
    top = torch.empty(count, parts, k, dtype=torch.float32, device=device)
    ids = torch.empty(count, parts, k, dtype=torch.int32, device=device)
    peaks, sums = (torch.empty(count, parts, dtype=torch.float32, device=device) for _ in range(2))
    scores = torch.empty(count, k, dtype=torch.float32, device=device)
    tokens = torch.empty(count, k, dtype=torch.long, device=device)
    if count:
        _top_of_chunks[(count, parts)](rows, top, ids, peaks, sums, rows.stride(0), vocabulary, k, chunk=CHUNK)
        wide, parts_wide = triton.next_power_of_2(parts * k), triton.next_power_of_2(parts)
        _top_of_rows[(count,)](
            top, ids, peaks, sums, scores, tokens, vocabulary, k, parts, wide=wide, parts_wide=parts_wide
        )
    shape = (*logits.shape[:-1], k)
    return scores.view(shape), tokens.view(shape)


@triton.jit
def _best_of_parts(logits, peaks, ids, row_stride, vocabulary, block: tl.constexpr, pdl: tl.constexpr):
    wait_for_earlier(pdl)
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    here = part * block + tl.arange(0, block)
    # Convert to fp32 right after the load: Triton's interpreter computes wrong results in bf16.
    values = tl.load(logits + row * row_stride + here, mask=here < vocabulary, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("-inf"))
    peak = tl.max(values, axis=0)
    tl.store(peaks + row * parts + part, peak)
    # A tie of -inf goes to the lowest id too.
    tl.store(ids + row * parts + part, tl.min(tl.where(values == peak, here, vocabulary - 1), axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["parts"])
def _best_of_rows(peaks, ids, best, parts, wide: tl.constexpr, pdl: tl.constexpr):
    wait_for_earlier(pdl)
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, wide)
    peak = tl.load(peaks + row * parts + part, mask=part < parts, other=float("-inf"))
    first = tl.min(tl.where((peak == tl.max(peak, axis=0)) & (part < parts), part, wide - 1), axis=0)
    tl.store(best + row, tl.load(ids + row * parts + first))


def best_of_parts(logits: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Logits [R, V] -> the largest of each `block` tokens in fp32 and its id in int64, [R, S]; as `argmax`."""
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, block)
    peaks, ids = (torch.empty(rows, parts, dtype=kind, device=logits.device) for kind in (torch.float32, torch.long))
    if rows:
        _best_of_parts[(rows, parts)](
            logits, peaks, ids, logits.stride(0), vocabulary, block=block, num_warps=8, **dependent(logits)
        )
    return peaks, ids


def argmax(logits: Tensor) -> Tensor:
    """Logits [..., V] in any floating type -> ids [...] int64; the lowest id on a tie; nan counts as -inf."""
    rows = logits.reshape(-1, logits.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    peaks, ids = best_of_parts(rows, CHUNK)
    parts = peaks.shape[1]
    if parts > 1:
        best = torch.empty(len(rows), dtype=torch.long, device=logits.device)
        if len(rows):
            _best_of_rows[(len(rows),)](
                peaks, ids, best, parts, wide=triton.next_power_of_2(parts), num_warps=1, **dependent(rows)
            )
        ids = best
    return ids.view(logits.shape[:-1])
