"""Selects the implementation of each op by device: Triton kernels on a CUDA GPU, else plain torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.heads import decoder_layer as layer_ops
from toolkit.infer.kernels import batch_invariant, paged_reference, reference, sampling_reference, tree_reference
from toolkit.infer.kernels.paged_reference import Pages
from toolkit.infer.kernels.tree_reference import AcceptedPath, Beams, Ranked
from toolkit.log import get_logger

logger = get_logger(__name__)


# q [B, Hq, N, D], k and v [B, Hkv, N, D], addresses of the first row's keys and values in a cache, elements from one
# row to the next, scaling -> [B, N, Hq, D]. The op writes the new keys and values after the rows' earlier nodes.
RowAttention = Callable[[Tensor, Tensor, Tensor, int, int, int, float], Tensor]
# dtype, widths of keys and values, lengths [B], node_mask [B, N, M], whether each node needs the bits of plain decoding
# -> the attention; None: unsupported arguments
ChooseRowAttention = Callable[[torch.dtype, int, int, Tensor, Tensor, bool], RowAttention | None]


@dataclass(frozen=True)
class Ops:
    """One function per op, with the signature of the reference function that defines it.

    paged_width: widest head for which attention reads pages in place; 0: gather pages instead, which is faster.
    row_attention: attention of few new nodes over contiguous cache rows in one call; None: not available.
    """

    argmax: Callable[[Tensor], Tensor]
    top_log_probs: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    write_kv: Callable[[Pages, Tensor, Tensor, Tensor, int], None]
    compact: Callable[..., None]
    attend_causal: Callable[..., Tensor]
    attend_tree: Callable[..., Tensor]
    attend_paths: Callable[..., Tensor]
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    follow_choices: Callable[..., AcceptedPath]
    rms_norm: Callable[[Tensor, Tensor, float, float, bool], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gated: Callable[[Tensor, Tensor], Tensor]
    rotate_joined: Callable[..., tuple[Tensor, Tensor, Tensor]]
    linear: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    gated_linear: Callable[[Tensor, Tensor], Tensor]
    scaled_product: Callable[[Tensor, Tensor, Tensor], Tensor]
    least_kept: Callable[[Tensor, Tensor, Tensor, Tensor, Sequence[int]], Tensor]
    draw: Callable[[Tensor, Tensor], Tensor]
    uniform: Callable[[Tensor, Tensor], Tensor]
    grow_beams: Callable[..., Beams]
    rank_candidates: Callable[..., Ranked]
    paged_width: int
    row_attention: ChooseRowAttention | None = None


OLDEST = (8, 0)  # compute capability of the Triton kernels: their products are in bfloat16 or tf32
_chosen: dict[str, Ops] = {}


def ops_for(device_type: str) -> Ops:
    """Return the ops for "cpu" or "cuda"; the first call chooses and logs them."""
    if device_type not in _chosen:
        _chosen[device_type] = _choose(device_type)
    return _chosen[device_type]


def install(device_type: str, ops: Ops) -> None:
    """Use these ops for a device type from now on."""
    _chosen[device_type] = ops


def _choose(device_type: str) -> Ops:
    if device_type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() < OLDEST:
        logger.info("ops on %s: plain torch, since compute capability is below %d.%d", device_type, *OLDEST)
        return REFERENCE
    if device_type == "cuda" and torch.version.hip is None:
        try:
            chosen = triton_ops()
        except ImportError:
            logger.info("ops on %s: plain torch, since triton is not installed", device_type)
            return REFERENCE
        logger.info("ops on %s: Triton kernels", device_type)
        return chosen
    logger.debug("ops on %s: plain torch", device_type)
    return REFERENCE


REFERENCE = Ops(
    argmax=reference.argmax,
    top_log_probs=reference.top_log_probs,
    write_kv=paged_reference.write_kv,
    compact=paged_reference.compact,
    attend_causal=paged_reference.attend_causal,
    attend_tree=paged_reference.attend_tree,
    attend_paths=batch_invariant.attend_paths,
    product=batch_invariant.product,
    follow_choices=tree_reference.follow_choices,
    rms_norm=reference.rms_norm,
    rotate=layer_ops.rotate,
    gated=layer_ops.gated,
    rotate_joined=paged_reference.rotate_joined,
    linear=reference.linear,
    gated_linear=reference.gated_linear,
    scaled_product=reference.scaled_product,
    least_kept=sampling_reference.least_kept,
    draw=sampling_reference.draw,
    uniform=sampling_reference.uniform,
    grow_beams=tree_reference.grow_beams,
    rank_candidates=tree_reference.rank_candidates,
    paged_width=0,
)


def triton_ops() -> Ops:
    """Return the Triton kernels. Raises ImportError if triton is not installed."""

    def module(name: str) -> Any:
        return importlib.import_module(f"toolkit.infer.kernels.triton.{name}")

    names = (
        "paged_attention",
        "attention_in_order",
        "product",
        "entries",
        "sampling",
        "layer_ops",
        "top_tokens",
        "trees",
    )
    attention, in_order, products, entries, sampling, small, top_tokens, trees = map(module, names)
    return Ops(
        argmax=top_tokens.argmax,
        top_log_probs=top_tokens.top_log_probs,
        write_kv=entries.write_kv,
        compact=entries.compact,
        attend_causal=attention.attend_causal,
        attend_tree=attention.attend_tree,
        attend_paths=in_order.attend_paths,
        product=products.product,
        follow_choices=trees.follow_choices,
        rms_norm=small.rms_norm,
        rotate=small.rotate,
        gated=small.gated,
        rotate_joined=small.rotate_joined,
        linear=small.linear,
        gated_linear=small.gated_linear,
        scaled_product=small.scaled_product,
        least_kept=sampling.least_kept,
        draw=sampling.draw,
        uniform=sampling.uniform,
        grow_beams=trees.grow_beams,
        rank_candidates=trees.rank_candidates,
        paged_width=attention.MAX_WIDTH,
    )


def use_device(device: torch.device) -> None:
    """Make `device` the thread's current device: Triton launches there, not on the device of its tensors."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
