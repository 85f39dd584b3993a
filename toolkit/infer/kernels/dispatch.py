"""Selects the implementation of each op by device: Triton kernels on a CUDA GPU, else plain torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from toolkit.heads import decoder_layer as layer_ops
from toolkit.infer.kernels import batch_invariant, paged_reference, reference, tree_reference
from toolkit.infer.kernels.paged_reference import Pages, Scoring
from toolkit.infer.kernels.tree_reference import AcceptedPath, Beams
from toolkit.infer.request.draft_tree import DraftTree
from toolkit.log import get_logger

logger = get_logger(__name__)


# q [B, Hq, N, D], k and v [B, Hkv, N, D], a layer's keys and values [E, Hkv, D], scaling -> [B, N, Hq, D]. It writes
# the new keys and values after the rows' earlier nodes.
RowAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
# pages of any layer, lengths [B], node_mask [B, N, M], whether each node needs the bits of plain decoding -> the
# attention of all layers; None: unsupported arguments
ChooseRowAttention = Callable[[Pages, Tensor, Tensor, bool], RowAttention | None]


@dataclass(frozen=True)
class Ops:
    """One function per op, with the signature of the reference function that defines it.

    paged_width: widest head for which attention reads pages in place; 0: gather pages instead, which is faster.
    row_attention: attention of few new nodes in one call; None: not available.
    decoder_layer: a layer, its place in the cache and its attention's scoring -> its forward by native calls; None: not
    available. head_layer: the same for a draft head's layer. head_norm: `heads.decoder_layer.rms_norm` in native code.
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
    least_kept: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    draw: Callable[[Tensor, Tensor], Tensor]
    uniform: Callable[[Tensor, Tensor], Tensor]
    grow_beams: Callable[..., Beams]
    rank_candidates: Callable[..., DraftTree]
    paged_width: int
    row_attention: ChooseRowAttention | None = None
    decoder_layer: Callable[[Any, int, Scoring], Callable[..., Tensor] | None] | None = None
    head_layer: Callable[[Any], Callable[..., Tensor] | None] | None = None
    head_norm: Callable[[Tensor, Tensor, float], Tensor] | None = None

    @property
    def has_kernels(self) -> bool:
        """Whether the device has kernels of our own for all ops."""
        return self.paged_width > 0


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


# Where each op is defined: its reference, and the module of triton/ that has the kernel.
DEFINED: dict[str, tuple[ModuleType, str]] = {
    "argmax": (reference, "top_tokens"),
    "top_log_probs": (reference, "top_tokens"),
    "write_kv": (paged_reference, "entries"),
    "compact": (paged_reference, "entries"),
    "attend_causal": (paged_reference, "paged_attention"),
    "attend_tree": (paged_reference, "paged_attention"),
    "attend_paths": (batch_invariant, "attention_in_order"),
    "product": (batch_invariant, "product"),
    "follow_choices": (tree_reference, "trees"),
    "rms_norm": (reference, "layer_ops"),
    "rotate": (layer_ops, "layer_ops"),
    "gated": (layer_ops, "layer_ops"),
    "rotate_joined": (paged_reference, "layer_ops"),
    "linear": (reference, "layer_ops"),
    "gated_linear": (reference, "layer_ops"),
    "scaled_product": (reference, "layer_ops"),
    "least_kept": (reference, "sampling"),
    "draw": (reference, "sampling"),
    "uniform": (reference, "sampling"),
    "grow_beams": (tree_reference, "trees"),
    "rank_candidates": (tree_reference, "trees"),
}
REFERENCE = Ops(**{name: getattr(module, name) for name, (module, _) in DEFINED.items()}, paged_width=0)


def triton_ops() -> Ops:
    """Return the Triton kernels. Raises ImportError if triton is not installed."""

    def module(name: str) -> Any:
        return importlib.import_module(f"toolkit.infer.kernels.triton.{name}")

    kernels = {name: getattr(module(place), name) for name, (_, place) in DEFINED.items()}
    return Ops(**kernels, paged_width=module("paged_attention").MAX_WIDTH)


def use_device(device: torch.device) -> None:
    """Make `device` the thread's current device: Triton launches there, not on the device of its tensors."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
