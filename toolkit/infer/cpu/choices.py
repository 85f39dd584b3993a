"""Choices from logits and draft trees on a CPU, each op in one call of C++ (cpu_choices.cpp): those of `reference` and
`tree_reference`.

Shapes: B rows, N nodes a row (root included), A = the tree's depth + 1, C candidates a row in level order, V scores.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from toolkit.infer.cpu.compile_cpp import load_vectorised
from toolkit.infer.kernels import reference
from toolkit.infer.kernels.tree_reference import Followed, Ranked

SOURCE = Path(__file__).with_suffix(".cpp")
DTYPES = (torch.float32, torch.bfloat16)  # of logits that are read as they are
# The functions' arguments: p an address, n a number.
ARGUMENTS = {
    "toolkit_argmax_float32": "pnnp",
    "toolkit_argmax_bfloat16": "pnnp",
    "toolkit_top_log_probs_float32": "pnnnpp",
    "toolkit_top_log_probs_bfloat16": "pnnnpp",
    "toolkit_rank_candidates": "ppppppnnnppppp",
    "toolkit_follow_choices": "pppppnnnp",
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """None, and the log says why, where this machine has none."""
    found = load_vectorised(SOURCE)
    if found is not None:
        for name, kinds in ARGUMENTS.items():
            function = getattr(found, name)
            function.argtypes = [ctypes.c_void_p if kind == "p" else ctypes.c_int64 for kind in kinds]
            function.restype = None
    return found


def argmax(logits: Tensor) -> Tensor:
    """logits [..., V] -> the most probable token [...], the lowest id among equals."""
    if logits.dtype not in DTYPES:
        return reference.argmax(logits)
    logits, size = logits.contiguous(), logits.shape[-1]
    ids = torch.empty(logits.shape[:-1], dtype=torch.long)
    function = getattr(_loaded(), name_for("toolkit_argmax", logits.dtype))
    function(logits.data_ptr(), ids.numel(), size, ids.data_ptr())
    return ids


def top_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """logits [..., V] -> the k best log-probabilities and their ids, [..., k]."""
    logits = (logits if logits.dtype in DTYPES else logits.float()).contiguous()
    size = logits.shape[-1]
    assert k <= size, f"the {k} best of {size}"
    scores = torch.empty(*logits.shape[:-1], k, dtype=torch.float)
    ids = torch.empty(scores.shape, dtype=torch.long)
    function = getattr(_loaded(), name_for("toolkit_top_log_probs", logits.dtype))
    function(logits.data_ptr(), logits.numel() // size, size, k, scores.data_ptr(), ids.data_ptr())
    return scores, ids


def name_for(function: str, dtype: torch.dtype) -> str:
    """Of a function of the library that reads logits of `dtype`, one of DTYPES."""
    return f"{function}_{str(dtype).removeprefix('torch.')}"


def rank_candidates(
    roots: Tensor,
    tokens: Tensor,
    parents: Tensor,
    levels: Tensor,
    scores: Tensor,
    nodes: Sequence[int],
    deepest: int,
) -> Ranked:
    """roots [B], tokens, parents, scores [B, C], levels [C]; row b keeps nodes[b] - 1 candidates -> its tree."""
    rows, found = tokens.shape
    count = min(max(nodes) - 1, found)
    limits = None if min(nodes) == max(nodes) else torch.tensor(nodes)
    size = (rows, count + 1)
    node_tokens, node_parents, depths = (torch.empty(size, dtype=torch.long) for _ in range(3))
    mask, valid = torch.empty(*size, count + 1, dtype=torch.bool), torch.empty(size, dtype=torch.bool)
    ranked = Ranked(node_tokens, node_parents, depths, mask, valid)
    given = [one.contiguous() for one in (roots, tokens, parents, levels, scores)]
    _loaded().toolkit_rank_candidates(
        *(one.data_ptr() for one in given), _address(limits), rows, found, count, *(one.data_ptr() for one in ranked)
    )
    return ranked


def follow_choices(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    mask: Tensor,
    valid: Tensor,
    choices: Tensor,
    longest: int,
    is_chain: bool = False,
) -> Followed:
    """tokens, parents, depths, choices [B, N] int64, valid [B, N] bool -> paths of `longest` nodes."""
    rows, nodes = tokens.shape
    followed = Followed.empty(rows, longest, tokens.device)
    of_tree = (None, None) if is_chain else (parents.contiguous(), depths.contiguous())
    given = (tokens.contiguous(), *of_tree, valid.contiguous(), choices.contiguous())
    _loaded().toolkit_follow_choices(*map(_address, given), rows, nodes, longest, followed.numbers.data_ptr())
    return followed


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _loaded() -> ctypes.CDLL:
    found = library()
    assert found is not None, "choose.py has looked"
    return found
