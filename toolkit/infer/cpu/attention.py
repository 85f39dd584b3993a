"""Attention of a few new nodes per row over the pages of a cache, in one call of C++ (attention.cpp).

PyTorch needs a dozen calls for the same. In a decoding step their overhead is most of the cost of attention.

Shapes: B rows, N new nodes per row, M uncommitted nodes per row, E entries of the cache, P pages of a table, Hq query
heads, Hkv key heads, D head dim.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from toolkit.infer.cpu.compile_cpp import load_cpp
from toolkit.infer.kernels.paged_reference import Pages

SOURCE = Path(__file__).with_suffix(".cpp")
FUNCTIONS = {torch.bfloat16: "toolkit_attend_bfloat16", torch.float32: "toolkit_attend_float32"}
# Addresses of the tensors, lengths, table, mask; B, N, M, Hq, Hkv, D, all strides; whether tiles may be used; scaling.
ARGUMENTS = [ctypes.c_void_p] * 9 + [ctypes.c_int64] * 17 + [ctypes.c_double]


@functools.cache
def load_library() -> ctypes.CDLL | None:
    library = load_cpp(SOURCE)
    if library is not None:
        for name in FUNCTIONS.values():
            getattr(library, name).argtypes, getattr(library, name).restype = ARGUMENTS, None
        library.toolkit_attention_lanes.restype = library.toolkit_attention_page.restype = ctypes.c_int64
    return library


class Rows(ctypes.Structure):
    """What all layers of a forward have in common, for decoder_layer.cpp."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("lengths", "table", "mask")] + [
        (name, ctypes.c_int64) for name in ("rows", "new", "nodes", "table_row", "tiles")
    ]


class RowAttention:
    """Arguments that all layers of one forward have in common. A node's result does not depend on the other nodes.

    name: the library's function. table [B, P] int64: page tables, whose last dimension is contiguous. lengths [B]: the
    committed positions of each row. node_mask [B, N, M] bool: the uncommitted nodes that each new node sees (with M =
    1, the node itself). in_order: a node of a tree gets the bits of the same token in plain decoding. The tiles of AMX
    add keys in pairs of cache positions, so they are not used then.
    """

    def __init__(self, name: str, table: Tensor, lengths: Tensor, node_mask: Tensor, in_order: bool) -> None:
        self._tiles = int(not in_order)
        self._function = getattr(load_library(), name)
        self._table, self._lengths = table, lengths
        self._sizes = node_mask.shape
        self._mask = None if node_mask.shape[2] == 1 else node_mask.contiguous()
        self._fixed = (lengths.data_ptr(), table.data_ptr(), None if self._mask is None else self._mask.data_ptr())
        self.rows = Rows(*self._fixed, *self._sizes, table.stride(0), self._tiles)

    def check(self, rows: int, new: int) -> None:
        """Raise ValueError if B or N differs from that of node_mask."""
        if (rows, new) != self._sizes[:2]:
            raise ValueError(f"the queries are of {rows} rows of {new} nodes; {tuple(self._sizes[:2])} is needed")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """q [B, Hq, N, D], k and v [B, Hkv, N, D], keys and values [E, Hkv, D], all of one dtype -> [B, N, Hq, D].

        keys and values: a layer's cache. The new keys and values are written after the earlier nodes of their rows.
        Raises ValueError if B or N differs from that of node_mask.
        """
        rows, heads, new, width = q.shape
        self.check(rows, new)
        of_q, of_k, of_v = q.stride(), k.stride(), v.stride()
        if of_q[3] != 1 or of_k[3] != 1 or of_v[3] != 1:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            of_q, of_k, of_v = q.stride(), k.stride(), v.stride()
        out = q.new_empty(rows, new, heads, width)
        self._function(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), *self._fixed,
            *self._sizes, heads, k.shape[1], width, self._table.stride(0), *of_q[:3], *of_k[:3], *of_v[:3], self._tiles,
            scaling,
        )  # fmt: skip
        return out


def row_attention(pages: Pages, lengths: Tensor, node_mask: Tensor, in_order: bool = False) -> RowAttention | None:
    """Returns the attention of all layers of a cache with such `pages`, those of one layer; None if the CPU, the dtype,
    the head width or the page size is not supported.
    """
    width, dtype = pages.keys.shape[2], pages.keys.dtype
    library = load_library() if dtype in FUNCTIONS and width == pages.values.shape[2] else None
    if library is None or width % library.toolkit_attention_lanes():
        return None
    if pages.page_size != library.toolkit_attention_page():
        return None
    return RowAttention(FUNCTIONS[dtype], pages.table, lengths, node_mask, in_order)
