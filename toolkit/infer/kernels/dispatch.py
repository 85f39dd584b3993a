"""Which implementation of each op a device gets: Triton kernels on a GPU, else plain torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from toolkit.infer.kernels import paged_reference, reference, tree_reference
from toolkit.infer.kernels.tree_reference import Followed, Ranked
from toolkit.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class Ops:
    """One function an op, all with the signature of the reference that defines it.

    paged_width: attention reads pages where they lie for heads up to this width; 0: it is better to gather them.
    """

    argmax: Callable[[Tensor], Tensor]
    top_log_probs: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    attend_causal: Callable[..., Tensor]
    attend_tree: Callable[..., Tensor]
    follow_choices: Callable[..., Followed]
    rank_candidates: Callable[..., Ranked]
    paged_width: int


@cache
def ops_for(device_type: str) -> Ops:
    """The ops for "cpu" or "cuda"; chosen once, and logged."""
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
    attend_causal=paged_reference.attend_causal,
    attend_tree=paged_reference.attend_tree,
    follow_choices=tree_reference.follow_choices,
    rank_candidates=tree_reference.rank_candidates,
    paged_width=0,
)


def triton_ops() -> Ops:
    """The Triton kernels. Raises ImportError where triton is not installed."""

    def module(name: str) -> Any:
        return importlib.import_module(f"toolkit.infer.kernels.{name}")

    attention, trees = module("triton.paged_attention"), module("triton.trees")
    return Ops(
        argmax=module("triton.argmax").argmax,
        top_log_probs=module("triton.top_log_probs").top_log_probs,
        write_kv=module("triton.write_kv").write_kv,
        attend_causal=attention.attend_causal,
        attend_tree=attention.attend_tree,
        follow_choices=trees.follow_choices,
        rank_candidates=trees.rank_candidates,
        paged_width=attention.MAX_WIDTH,
    )


def use_device(device: torch.device) -> None:
    """Triton launches on the thread's current device, whatever the device of its tensors."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
