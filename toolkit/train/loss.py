"""The losses on the draft vocabulary with their gradients, computed in chunks of rows.

The fp32 logits of all tokens of a batch would be the largest tensor of a training. So the forward pass computes the
logits of one chunk of states, overwrites them with the gradient of the loss, a tile at a time, and adds the chunk's
share to the gradients of the states and the output matrix (as Liger's fused linear cross-entropy, arXiv 2410.10989).
No tensor with a vocabulary dimension is kept after its chunk. The backward pass multiplies the gradients by the
upstream factor.

Shapes: N states (supervised rows of all steps), M teacher rows, n rows of a tile, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F

from toolkit.data.batches import on_device
from toolkit.head_kinds import HEAD_KINDS
from toolkit.recipe_fields import LossName
from toolkit.train.causal_attention import gpu_kernels
from toolkit.train.target_side import TeacherRows, aligned

Tensor = torch.Tensor

# A tile of fp32 rows (8,192 wide: 2 MB) should stay in a CPU core's cache from the first op to the last.
TILE_ROWS = 64
PIECE_ROWS = 1024
# Logits of a chunk (rows times vocabulary), and its fewest rows. With fewer rows, adding to the gradient of the output
# matrix would take a large share of the time.
CHUNK_LOGITS, LEAST_CHUNK = 2**23, 128
# Bytes of a GPU's memory for each logit of a chunk; of a 32,000-row matrix 80 GB then hold 8,388 rows at once (0.5 GB).
MEMORY_SHARE = 256
# Of the LK hybrid; the best value in the paper.
ETA = 3.0
# The share of the cross-entropy in DSpark's loss.
CROSS_ENTROPY = 0.1

# (z [n, D] shifted logits, p [n, D] rows that sum to 1, choice [n] right ids, weight [n]) -> losses [n]; z is
# overwritten with weight * (the loss's gradient). z and p in fp32, or fp64 in tests.
RowLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Scores [n, D] -> logits [n, D]: a logit factor, a soft cap.
LogitsProcessor = Callable[[Tensor], Tensor]


def soft_cross_entropy(z: Tensor, p: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
    """-sum_v p(v) log q(v) (EAGLE-3, arXiv 2503.01840): logsumexp(z) - p.z, whose gradient is q - p."""
    dot = torch.linalg.vecdot(p, z)
    total = z.exp_().sum(-1)
    z.mul_((weight / total)[:, None]).addcmul_(p, weight[:, None], value=-1)
    return total.log() - dot


def hard_cross_entropy(z: Tensor, p: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
    """-log q(choice), with the teacher's argmax as the label. Rows without a label (-1) must have weight 0."""
    label = choice.clamp(min=0)[:, None]
    picked = z.gather(1, label).squeeze(1)
    total = z.exp_().sum(-1)
    z.mul_((weight / total)[:, None]).scatter_add_(1, label, -weight[:, None])
    return total.log() - picked


def total_variation(z: Tensor, p: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
    """1 - alpha, where alpha = sum_v min(p(v), q(v)) is the chance that a sampled draft is accepted."""
    q = z.exp_().div_(z.sum(-1, keepdim=True))
    distance, change = _distance(q, p)
    torch.mul(change, weight[:, None], out=z)
    return distance


def lk_hybrid(z: Tensor, p: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
    """lambda KL(p||q) + (1 - lambda)(1 - alpha), lambda = exp(-ETA alpha) of each row, held fixed in the gradient
    (LK losses, arXiv 2602.23881). KL dominates while p and q hardly overlap, where total variation has almost no
    gradient; total variation dominates later."""
    dot = torch.linalg.vecdot(p, z)
    total = z.exp_().sum(-1)
    divergence = torch.special.xlogy(p, p).sum(-1) + total.log() - dot
    q = z.div_(total[:, None])
    distance, change = _distance(q, p)
    share = (-ETA * (1 - distance)).exp()
    q.sub_(p).mul_((weight * share)[:, None]).addcmul_(change, (weight * (1 - share))[:, None])
    return share * divergence + (1 - share) * distance


def dspark(z: Tensor, p: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
    """0.1 hard cross-entropy + 0.9 total variation (DSpark, arXiv 2607.05147). Rows without a label (-1) must have
    weight 0."""
    label = choice.clamp(min=0)[:, None]
    picked = z.gather(1, label).squeeze(1)
    total = z.exp_().sum(-1)
    q = z.div_(total[:, None])
    distance, change = _distance(q, p)
    q.mul_((weight * CROSS_ENTROPY)[:, None]).scatter_add_(1, label, -(weight * CROSS_ENTROPY)[:, None])
    q.addcmul_(change, (weight * (1 - CROSS_ENTROPY))[:, None])
    return CROSS_ENTROPY * (total.log() - picked) + (1 - CROSS_ENTROPY) * distance


def _distance(q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Total variation of q and p by row, and its gradient in q's logits: q(v) (sum over u where q < p of q(u) - [q(v) <
    p(v)])."""
    short = torch.where(q < p, q, 0.0)
    return (q - p).abs_().sum(-1).mul_(0.5), (q * short.sum(-1, keepdim=True)).sub_(short)


ROW_LOSSES: dict[LossName, RowLoss] = {
    "soft_cross_entropy": soft_cross_entropy,
    "hard_cross_entropy": hard_cross_entropy,
    "total_variation": total_variation,
    "lk_hybrid": lk_hybrid,
    "dspark": dspark,
}


@dataclass(frozen=True)
class DraftLoss:
    """The loss of N states; called instead of `F.linear` with the head's output matrix.

    rows [N]: the teacher row of each state; on the host, so that reading them does not wait for a GPU. choice [N]: the
    right token as a draft id, -1 if the draft vocabulary lacks it. weight [N]: the factor of each row's loss; it must
    be 0 for rows whose argmax is not in the draft vocabulary.
    """

    name: LossName
    teacher: TeacherRows
    rows: Tensor
    choice: Tensor
    weight: Tensor

    def __call__(
        self,
        states: Tensor,
        matrix: Tensor,
        bias: Tensor | None = None,
        logits_processor: LogitsProcessor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """states [N, H], matrix [D, H] -> (sum of weight * loss, differentiable; losses [N] fp32; argmax [N]).

        bias [D] and logits_processor (a logit factor or soft cap) belong to a target's matrix and get no gradient.
        """
        return cast(tuple[Tensor, Tensor, Tensor], _TiledLoss.apply(states, matrix, bias, logits_processor, self))


def best_tokens(
    states: Tensor, matrix: Tensor, bias: Tensor | None = None, logits_processor: LogitsProcessor | None = None
) -> Tensor:
    """The argmax [N] over the draft vocabulary without a loss, in chunks; arguments as `DraftLoss.__call__`."""

    wide, wide_bias = aligned(matrix), None if bias is None else aligned(bias)

    def best(part: Tensor) -> Tensor:
        scores = F.linear(part, wide, wide_bias)[:, : len(matrix)]
        return (scores if logits_processor is None else logits_processor(scores)).max(-1).indices

    return torch.cat([best(part) for part in states.split(chunk_rows(len(matrix), states.device))])


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    return max(chunk_logits(device) // vocabulary, LEAST_CHUNK)


@cache
def chunk_logits(device: torch.device) -> int:
    """Logits of a chunk. Each chunk rewrites the gradient of the output matrix, so a GPU computes many at once: by its
    memory, not by what is free of it, because a resumed training must cut the same chunks."""
    return logits_at_once(torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0)


def logits_at_once(memory: int) -> int:
    """Logits of a chunk on a GPU of so many bytes; 0: on a CPU."""
    return max(CHUNK_LOGITS, 1 << max(1, memory // MEMORY_SHARE).bit_length() - 1)


class _TiledLoss(torch.autograd.Function):
    """Computes losses, argmax and gradients of each chunk together. States are sorted by teacher row, so that a row's
    distribution is computed once for all steps."""

    @staticmethod
    def forward(ctx, states, matrix, bias, logits_processor, task):
        precise = torch.promote_types(states.dtype, torch.float32)
        losses = states.new_empty(len(states), dtype=precise)
        best = torch.empty(len(states), dtype=torch.long, device=states.device)
        grad_states = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        size, matrix, bias = len(matrix), aligned(matrix), None if bias is None else aligned(bias)
        grad_matrix = torch.zeros_like(matrix, dtype=precise) if ctx.needs_input_grad[1] else None
        for at, offsets, probs in _chunks(task, chunk_rows(size, states.device)):
            part = states[at]
            logits = F.linear(part, matrix, bias)  # 0 behind the vocabulary, and so are the gradients
            losses[at], best[at] = _score(task, logits[:, :size], logits_processor, at, offsets, probs)
            if grad_states is not None:
                grad_states[at] = logits @ matrix
            if grad_matrix is not None:
                _add_product(grad_matrix, logits, part)
        ctx.save_for_backward(grad_states, None if grad_matrix is None else grad_matrix[:size].to(matrix.dtype))
        ctx.mark_non_differentiable(losses, best)
        return torch.dot(losses, task.weight.to(precise)), losses, best

    @staticmethod
    def backward(ctx, gradient, *_):
        # One dimension, because torch rounds a scalar to the gradient's dtype before the product.
        factor = gradient.reshape(1)
        grads = [None if saved is None else _scaled(saved, factor) for saved in ctx.saved_tensors]
        return *grads, None, None, None


def _chunks(task: DraftLoss, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield for each chunk the indices [c] of its states, their offsets [c] into the chunk's teacher rows, and the
    distributions of these rows."""
    order = task.rows.argsort(stable=True)
    rows = task.rows[order]
    starts = torch.arange(0, len(rows), size, device=rows.device)
    lasts = (starts + size).clamp(max=len(rows)) - 1
    # All bounds in one read: where the rows are on a GPU each read waits for all queued work.
    bounds = torch.stack((rows[starts], rows[lasts] + 1), dim=1).tolist()
    order, rows = on_device(order, task.weight.device), on_device(rows, task.weight.device)
    for number, (low, high) in enumerate(bounds):
        span = slice(number * size, (number + 1) * size)
        yield order[span], rows[span] - low, task.teacher.probs(slice(low, high))


def _score(
    task: DraftLoss,
    logits: Tensor,
    logits_processor: LogitsProcessor | None,
    at: Tensor,
    offsets: Tensor,
    probs: Tensor,
) -> tuple[Tensor, Tensor]:
    """Losses [c] and argmax [c] of a chunk; `logits` is overwritten with the gradients of the scores."""
    kernels = gpu_kernels(logits.device.type) if logits_processor is None else None
    if kernels is not None:
        return kernels.score_rows(task.name, logits, probs, offsets, task.choice[at], task.weight[at], ETA)
    row_loss, losses, best = ROW_LOSSES[task.name], [], []
    size = TILE_ROWS if logits.device.type == "cpu" else max(CHUNK_LOGITS // logits.shape[1], LEAST_CHUNK)
    for start in range(0, len(logits), size):
        tile = slice(start, start + size)
        z, to_scores = _finished(logits[tile].to(torch.promote_types(logits.dtype, torch.float32)), logits_processor)
        top = z.max(-1)
        best.append(top.indices)
        z -= top.values[:, None]
        rows = at[tile]
        losses.append(row_loss(z, probs[offsets[tile]].to(z.dtype), task.choice[rows], task.weight[rows].to(z.dtype)))
        logits[tile] = to_scores(z)
    return torch.cat(losses), torch.cat(best)


def _finished(scores: Tensor, logits_processor: LogitsProcessor | None) -> tuple[Tensor, LogitsProcessor]:
    """Logits that may be overwritten, and a function from the gradient of the logits to that of the scores."""
    if logits_processor is None:
        return scores, lambda gradient: gradient
    with torch.enable_grad():
        leaf = scores.detach().clone().requires_grad_()
        logits = logits_processor(leaf)
    return logits.detach().clone(), lambda gradient: torch.autograd.grad(logits, leaf, gradient)[0]


def _add_product(total: Tensor, gradient: Tensor, states: Tensor) -> None:
    """total [D, H] += gradient' [D, c] @ states [c, H], the sum in `total`'s dtype."""
    if states.dtype == total.dtype:
        total.addmm_(gradient.T, states)
        return
    # On a CPU in pieces, so that a product is still in the cache when it is added.
    size = PIECE_ROWS if total.device.type == "cpu" else len(total)
    for start in range(0, len(total), size):
        piece = slice(start, start + size)
        total[piece] += gradient[:, piece].T @ states


def _scaled(values: Tensor, factor: Tensor) -> Tensor:
    """values * factor, rounded once; in pieces, because torch converts its inputs to the wider dtype."""
    scaled = torch.empty_like(values)
    for piece, out in zip(values.split(PIECE_ROWS), scaled.split(PIECE_ROWS), strict=True):
        torch.mul(piece, factor, out=out)
    return scaled


def step_weights(kind: str, decay: float, count: int) -> torch.Tensor:
    """The weights [count] of the losses of `count` steps: decay^k; for MTP divided by their sum (FastMTP, arXiv
    2509.18362, equation 2)."""
    weights = decay ** torch.arange(count)
    return weights / weights.sum() if HEAD_KINDS[kind].normalised_steps else weights
