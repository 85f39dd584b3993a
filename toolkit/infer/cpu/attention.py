"""Attention of a few new nodes over rows that lie side by side in a cache, in one call of C++ (attention.cpp).

Torch's operators do the same in a dozen calls, whose overhead is most of what attention costs a decoding step.

Shapes: B rows, N new nodes a row, M nodes a row that are not committed, S positions of a row of the cache, Hq query and
Hkv key heads, D head dim.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from toolkit.infer.cpu.compile_cpp import load_vectorised

SOURCE = Path(__file__).with_suffix(".cpp")
FUNCTIONS = {torch.bfloat16: "toolkit_attend_bfloat16", torch.float32: "toolkit_attend_float32"}
# The tensors, lengths and mask; B, N, M, Hq, Hkv, D, a row of the cache, and the strides of q, k and v; the scaling.
ARGUMENTS = [ctypes.c_void_p] * 8 + [ctypes.c_int64] * 16 + [ctypes.c_double]


@functools.cache
def load_library() -> ctypes.CDLL | None:
    library = load_vectorised(SOURCE)
    if library is not None:
        for name in FUNCTIONS.values():
            getattr(library, name).argtypes, getattr(library, name).restype = ARGUMENTS, None
        library.toolkit_attention_lanes.restype = ctypes.c_int64
    return library


class RowAttention:
    """What one forward's layers share: B rows of which the first lengths [B] positions are committed, node_mask [B, N,
    M] bool of who sees whom (a single node sees itself). A node's result does not depend on the nodes beside it.
    name: of the library's function."""

    def __init__(self, name: str, lengths: Tensor, node_mask: Tensor) -> None:
        self._function = getattr(load_library(), name)
        self._lengths = lengths
        self._sizes = node_mask.shape
        self._mask = None if node_mask.shape[2] == 1 else node_mask.contiguous()
        self._fixed = (self._lengths.data_ptr(), None if self._mask is None else self._mask.data_ptr())

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, keys: int, values: int, row: int, scaling: float) -> Tensor:
        """q [B, Hq, N, D], k and v [B, Hkv, N, D] -> [B, N, Hq, D].

        keys and values: where the first of these rows begins in a cache [.., S, Hkv, D] of q's dtype; row: numbers from
        one row to the next. The new keys and values are written after the rows' earlier nodes.
        """
        rows, heads, new, width = q.shape
        if (rows, new) != self._sizes[:2]:
            raise ValueError(f"the queries are of {rows} rows of {new} nodes; {tuple(self._sizes[:2])} is needed")
        of_q, of_k, of_v = q.stride(), k.stride(), v.stride()
        if of_q[3] != 1 or of_k[3] != 1 or of_v[3] != 1:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            of_q, of_k, of_v = q.stride(), k.stride(), v.stride()
        out = q.new_empty(rows, new, heads, width)
        self._function(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), keys, values, out.data_ptr(), *self._fixed, *self._sizes, heads,
            k.shape[1], width, row, *of_q[:3], *of_k[:3], *of_v[:3], scaling,
        )  # fmt: skip
        return out


def row_attention(
    dtype: torch.dtype, key_width: int, value_width: int, lengths: Tensor, node_mask: Tensor
) -> RowAttention | None:
    """None where this machine or heads so wide have none."""
    library = load_library() if dtype in FUNCTIONS and key_width == value_width else None
    if library is None or key_width % library.toolkit_attention_lanes():
        return None
    return RowAttention(FUNCTIONS[dtype], lengths, node_mask)
