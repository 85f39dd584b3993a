"""`paged_reference` in Triton: attention for prompts, decoding and trees. The kernels are in attention_parts.py.

Shapes: B rows, N queries (new positions) per row, M nodes per row, Hq query heads, Hkv key heads, G = Hq / Hkv, D head
dim of queries and keys, Dv of values.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.runtime import JITFunction

from toolkit.infer.kernels.paged_reference import Pages, Scoring
from toolkit.infer.kernels.triton.attention_parts import LOG2E, causal_parts, merge_parts, tree_parts
from toolkit.infer.kernels.triton.launch import dependent

PART_KEYS = 256  # minimum number of keys per part, if there are enough keys
MAX_PARTS = 64
# By bytes of an element: keys of a tile at most, and elements of its queries or scores, which are fewer in fp32, since
# tf32x3 keeps two parts of every factor in registers.
MAX_BLOCK, MAX_TILE = {2: 64, 4: 32}, {2: 16384, 4: 4096}
KEY_BYTES = 16384  # of a tile's keys (and again of its values) in one stage
MAX_WIDTH = 256  # of a head; a wider head leaves no room for a tile
MIN_TILE = 16  # the minimum of tl.dot on a GPU; Triton's interpreter would accept less
# Triton's interpreter computes wrong results in bf16: convert to fp32 right after every load.
UPCAST = not isinstance(merge_parts, JITFunction)


def attend_causal(q: Tensor, pages: Pages, starts: Tensor, scoring: Scoring) -> Tensor:
    """q [B, Hq, N, D] -> [B, N, Hq, Dv]. Query n of row b has position starts[b] + n; it attends to keys up to it."""
    launch = _Launch(q, pages, scoring)
    parts = launch.part_count(pages.span)
    out, part_out, part_lse = launch.outputs(parts)
    whole = parts == 1
    causal_parts[(launch.programs, launch.tiles, parts)](
        launch.q, pages.keys, pages.values, pages.table, starts, scoring.sinks if whole else None,
        out if whole else part_out, part_lse, *launch.q.stride()[:3], launch.queries, launch.kv_heads,
        pages.table.shape[1], parts, launch.scale, scoring.softcap, scoring.window, whole=whole, **launch.constants,
    )  # fmt: skip
    if not whole:
        launch.merge(part_out, part_lse, parts, out)
    return out


def attend_tree(
    q: Tensor, pages: Pages, lengths: Tensor, mask: Tensor, depths: Tensor | None, scoring: Scoring
) -> Tensor:
    """q [B, Hq, N, D] of the newest N of M nodes -> [B, N, Hq, Dv]; lengths [B], mask [B, N, M], depths [B, M]."""
    assert scoring.window is None or depths is not None, "a window needs the nodes' depths"
    nodes = mask.shape[2]
    assert mask.stride(2) == 1 or nodes == 1
    launch = _Launch(q, pages, scoring)
    parts = 1 + launch.part_count(pages.span - nodes, beside=1)
    out, part_out, part_lse = launch.outputs(parts)
    tree_parts[(launch.programs, launch.tiles, parts)](
        launch.q, pages.keys, pages.values, pages.table, lengths, mask.view(torch.uint8), depths, part_out,
        part_lse, *launch.q.stride()[:3], *mask.stride()[:2], 0 if depths is None else depths.stride(0),
        launch.queries, nodes, launch.kv_heads, pages.table.shape[1], parts, launch.scale, scoring.softcap,
        scoring.window, **launch.constants,
    )  # fmt: skip
    launch.merge(part_out, part_lse, parts, out)
    return out


class _Launch:
    """Launch parameters of one layer's attention: tiles of the N * G queries of a key head, for all rows and heads."""

    def __init__(self, q: Tensor, pages: Pages, scoring: Scoring) -> None:
        self.q = q if q.stride(-1) == 1 else q.contiguous()
        rows, heads, self.queries, width = q.shape
        _, self.kv_heads, value_width = pages.values.shape
        self._scoring, self._groups, self._value_width = scoring, heads // self.kv_heads, value_width
        self._shape = (rows, self.queries, heads, value_width)
        wide, self._value_wide = (max(MIN_TILE, triton.next_power_of_2(one)) for one in (width, value_width))
        assert max(wide, self._value_wide) <= MAX_WIDTH, f"heads of {width} and {value_width} leave no room for a tile"
        size, widest, folded = q.element_size(), max(wide, self._value_wide), self.queries * self._groups
        block = max(MIN_TILE, min(MAX_BLOCK[size], KEY_BYTES // (widest * size)))
        largest = MAX_TILE[size] // max(widest, block)
        tile = max(MIN_TILE, min(triton.next_power_of_2(folded), largest))
        self.tiles, self.programs = triton.cdiv(folded, tile), rows * self.kv_heads
        self.scale = scoring.scaling * LOG2E.value if scoring.softcap is None else scoring.scaling / scoring.softcap
        self.constants = {
            "page_size": pages.page_size, "groups": self._groups, "width": width, "value_width": value_width,
            "wide": wide, "value_wide": self._value_wide, "rows": tile, "block": block, "upcast": UPCAST,
            **dependent(q), "num_warps": 8 if tile == largest else 4,
            "num_stages": min(4, 2 * KEY_BYTES // (block * widest * size)),
        }  # fmt: skip

    def part_count(self, keys: int, beside: int = 0) -> int:
        """Number of parts of `keys` keys that gives all multiprocessors work; `beside`: parts used for other keys."""
        if self._scoring.window is not None:
            keys = min(keys, self._scoring.window + self.queries)
        wanted = triton.cdiv(2 * _processors(self.q.device), self.tiles * self.programs)
        return max(1, min(wanted, triton.cdiv(keys, PART_KEYS), MAX_PARTS - beside))

    def outputs(self, parts: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Allocate the output [B, N, Hq, Dv] and, for several parts, buffers of the parts and their log-sum-exps."""
        device = self.q.device
        out = torch.empty(self._shape, dtype=self.q.dtype, device=device)
        if parts == 1:
            return out, None, None
        shape = (self.programs, self.queries * self._groups, parts)
        part_out = torch.empty((*shape, self._value_width), dtype=torch.float32, device=device)
        return out, part_out, torch.empty(shape, dtype=torch.float32, device=device)

    def merge(self, part_out: Tensor | None, part_lse: Tensor | None, parts: int, out: Tensor) -> None:
        merge_parts[(self.programs * self.queries * self._groups,)](
            part_out, part_lse, self._scoring.sinks, out, self.queries, self.kv_heads, parts, groups=self._groups,
            value_width=self._value_width, value_wide=self._value_wide, parts_wide=triton.next_power_of_2(parts),
            **dependent(self.q),
        )  # fmt: skip


@cache
def _processors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; an H200's number for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
