"""States of linear-attention layers (gated delta rule, arXiv 2412.06464): what they keep in place of keys and values.

A layer has two: the last inputs of its convolution, and the recurrent state. Both depend on every earlier token, so a
rejected draft cannot be masked: after a verify step they must be those of the last accepted node. A forward over a
chain therefore leaves the states after each node, and `commit` takes the accepted one:

    node        root   draft 1   draft 2   draft 3         accepted 1: the states after draft 1 stay
    state    S   S0      S1        S2        S3

transformers' layers reach the states through the methods of its caches; `RowStates` has those that they call.

Shapes: R rows of the engine, B rows of a forward, N tokens of each; C channels of the convolution, K its width; Hv
heads of values, Dk and Dv widths of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import DraftShapeError

STATES_PER_ROW = 2  # kept prefixes whose states are kept too; a state is as large as many pages
Stores = dict[int, Tensor]  # by the layer's number in the target


@dataclass(frozen=True)
class StateShape:
    """One layer's states of a row. layer: its number in the target. conv: (C, K). recurrent: (Hv, Dk, Dv)."""

    layer: int
    conv: tuple[int, int]
    conv_dtype: torch.dtype
    recurrent: tuple[int, int, int]
    recurrent_dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of one row, with the states at the end of its last page and those that the prefix cache keeps."""
        conv, recurrent = (torch.Size(size).numel() for size in (self.conv, self.recurrent))
        return (2 + STATES_PER_ROW) * (conv * self.conv_dtype.itemsize + recurrent * self.recurrent_dtype.itemsize)


@dataclass(frozen=True)
class Snapshot:
    """A row's states after `position` tokens: of each layer its convolution's inputs [C, K] and state [Hv, Dk, Dv]."""

    position: int
    conv: dict[int, Tensor]
    recurrent: dict[int, Tensor]


class LinearStates:
    """The states of every row: conv [R, C, K] and recurrent [R, Hv, Dk, Dv] of each layer, by its number.

    The states at the last end of a page that a row has passed are kept too: the prefix cache keeps whole pages. Where
    that end is, the host knows from the results of rounds (`observe`), without a read of its own.
    """

    def __init__(self, shapes: Sequence[StateShape], rows: int, device: torch.device, page_size: int) -> None:
        def zeros(sizes: Callable[[StateShape], tuple[int, ...]], dtype: Callable[[StateShape], torch.dtype]) -> Stores:
            return {one.layer: torch.zeros(rows, *sizes(one), dtype=dtype(one), device=device) for one in shapes}

        self.conv, self._conv_at_page = (zeros(lambda one: one.conv, lambda one: one.conv_dtype) for _ in range(2))
        self.recurrent, self._recurrent_at_page = (
            zeros(lambda one: one.recurrent, lambda one: one.recurrent_dtype) for _ in range(2)
        )
        self._page_size = page_size
        self._page_ends = [0] * rows
        self._nodes: RowStates | None = None  # of the last forward over chains
        self._prompt: RowStates | None = None  # of the last forward over prompts

    @classmethod
    def of_pool(cls, shapes: Sequence[StateShape], pool: PagePool, device: torch.device) -> LinearStates | None:
        """States of the rows of `pool`, which move with its rows; None for a target without such layers."""
        if not shapes:
            return None
        states = cls(shapes, pool.rows, device, pool.page_size)
        pool.attach_rows(states.move_row)
        return states

    def prompt(self, first_row: int, starts: Sequence[int]) -> RowStates:
        """The states of prompts in rows from first_row on; a prompt that starts at position 0 starts with zeros. The
        rows' own states change in `end_prompt` only, so a failed forward can run again."""
        self._prompt = RowStates(self, slice(first_row, first_row + len(starts)), starts=starts)
        return self._prompt

    def end_prompt(self, ends: Sequence[int]) -> None:
        """Keep the states after the tokens of a forward over prompts; ends: of all tokens that each row has now. States
        at the end of a page are kept for the prefix cache too."""
        read, self._prompt = self._prompt, None
        assert read is not None, "no forward over prompts ran"
        for layer in self.conv:
            self.conv[layer][read.rows], self.recurrent[layer][read.rows] = read.inputs[layer], read.after[layer]
        for number, end in enumerate(ends):
            if number in read.fresh:  # the end of a page that another text left in the row
                self._page_ends[read.rows.start + number] = 0
            self._keep_page_end(read.rows.start + number, end)

    def _keep_page_end(self, row: int, end: int) -> None:
        """Note that the row's states are those after `end` tokens."""
        if end % self._page_size == 0:
            for whole, at_page in self._pairs():
                at_page[row] = whole[row]
            self._page_ends[row] = end

    def nodes(self, rows: int) -> RowStates:
        """The states of chains in the first `rows` rows. They change in `commit` only, so a failed round can run
        again."""
        self._nodes = RowStates(self, slice(rows))
        return self._nodes

    def commit(self, lengths: Tensor, accepted: Tensor) -> None:
        """Keep the states after node accepted[b] of each row, accepted [B] int64 on the device. lengths [B]: tokens
        before the round; node n ends lengths[b] + n + 1 tokens."""
        nodes, self._nodes = self._nodes, None
        assert nodes is not None, "no forward over chains ran"
        whole = lengths + accepted + 1
        ends = whole - whole % self._page_size
        passed, at_end = ends > lengths, (ends - lengths - 1).clamp(min=0)
        new: list[tuple[Tensor, Tensor]] = []  # all are computed before one is written: a failure leaves the old ones
        for layer in nodes.after_node:
            for store, at_page, taken in (
                (self.conv, self._conv_at_page, nodes.conv_after),
                (self.recurrent, self._recurrent_at_page, nodes.state_after),
            ):
                kept = at_page[layer][nodes.rows]
                here = passed.view(-1, *[1] * (kept.dim() - 1))
                new.append((store[layer], taken(layer, accepted)))
                new.append((at_page[layer], torch.where(here, taken(layer, at_end).to(kept.dtype), kept)))
        for stored, value in new:
            stored[nodes.rows] = value

    def observe(self, lengths: Sequence[int], accepted: Sequence[int]) -> None:
        """Note where the last `commit` left the rows, once its arguments are known to the host."""
        for row, (length, count) in enumerate(zip(lengths, accepted, strict=True)):
            whole = length + count + 1
            end = whole - whole % self._page_size
            if end > length:
                self._page_ends[row] = end

    def snapshot(self, row: int) -> Snapshot | None:
        """A copy of the states at the end of the row's last page; None before the first one."""
        position = self._page_ends[row]
        if position == 0:
            return None
        conv, recurrent = (
            {layer: store[row].clone() for layer, store in stores.items()}
            for stores in (self._conv_at_page, self._recurrent_at_page)
        )
        return Snapshot(position, conv, recurrent)

    def restore(self, row: int, snapshot: Snapshot) -> None:
        """Start the row after the tokens of a snapshot."""
        for layer in self.conv:
            self.conv[layer][row], self.recurrent[layer][row] = snapshot.conv[layer], snapshot.recurrent[layer]
        self._keep_page_end(row, snapshot.position)

    def move_row(self, destination: int, source: int) -> None:
        for store in (one for pair in self._pairs() for one in pair):
            store[destination] = store[source]
        self._page_ends[destination] = self._page_ends[source]

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The states of each layer, with those at the end of a page."""
        return [
            (one[layer], at_page[layer])
            for one, at_page in ((self.conv, self._conv_at_page), (self.recurrent, self._recurrent_at_page))
            for layer in one
        ]


def check_chains(states: LinearStates | None, shape: DraftShape | None) -> None:
    """Raise DraftShapeError for a tree, which targets with such layers do not support."""
    if states is None:
        return
    if shape is not None and not shape.is_chain:
        raise DraftShapeError(
            f"the draft shape is a {shape.name} ({shape.as_text()}), and the target has linear-attention layers, whose "
            "states follow one chain; give a shape with top_k 1, such as 3,1,4"
        )


class _Cache:
    """The methods of a transformers cache, besides those of linear-attention layers, that a model calls."""

    is_sliding: tuple[bool, ...] = (False,)

    def is_recording_past(self, _layer: int) -> bool:
        """True: the layer calls `update_conv_state` for a single token too."""
        return True

    def update(self, keys: Tensor, values: Tensor, *_layer: Any, **_others: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of an attention layer: the engine's attention keeps them."""
        return keys, values

    def get_seq_length(self, *_layer: Any, **_others: Any) -> int:
        return 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, *_layer: Any) -> tuple[int, int]:
        return query_length, 0


class RowStates(_Cache):
    """The states of a forward's rows, with the methods of a transformers cache that its layers call.

    starts: of prompts, the tokens that each row has read; None: the rows hold chains, whose states are kept after each
    node. fresh: numbers of the rows that start at token 0. inputs [B, C, K + N] (prompts: [B, C, K], the last ones): of
    each layer's convolution. after [B, Hv, Dk, Dv]: the states after a prompt's tokens. after_node: N such states,
    after each node.
    """

    def __init__(self, states: LinearStates, rows: slice, starts: Sequence[int] | None = None) -> None:
        self.rows, self.by_node = rows, starts is None
        self._states, self.fresh = states, [row for row, start in enumerate(starts or ()) if start == 0]
        self.inputs: dict[int, Tensor] = {}
        self.after: dict[int, Tensor] = {}
        self.after_node: dict[int, list[Tensor]] = {}
        self.running: list[Tensor] = []  # states after the nodes of the layer that runs now

    def _begin(self, store: Tensor) -> Tensor:
        """The rows' states before the forward."""
        held = store[self.rows]
        if not self.fresh:
            return held
        held = held.clone()
        held[self.fresh] = 0
        return held

    def state_after(self, layer: int, node: Tensor) -> Tensor:
        """The recurrent state [B, Hv, Dk, Dv] after node[b] of each row, node [B]."""
        return torch.stack(self.after_node[layer])[node, torch.arange(len(node), device=node.device)]

    def conv_after(self, layer: int, node: Tensor) -> Tensor:
        """The inputs [B, C, K] of the convolution up to node[b] of each row."""
        inputs, width = self.inputs[layer], self._states.conv[layer].shape[2]
        at = node[:, None] + 1 + torch.arange(width, device=node.device)
        return inputs.gather(2, at[:, None].expand(-1, inputs.shape[1], -1))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._begin(self._states.conv[layer_idx])

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._begin(self._states.recurrent[layer_idx])

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, **_others: Any) -> Tensor:
        """The inputs [B, C, N] of the convolution, after those that the rows hold: [B, C, K + N]."""
        held = self._begin(self._states.conv[layer_idx])
        whole = torch.cat((held.to(conv_states.dtype), conv_states), dim=-1)
        self.inputs[layer_idx] = whole if self.by_node else whole[..., -held.shape[2] :]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **_others: Any) -> Tensor:
        """The state [B, Hv, Dk, Dv] after the last token."""
        if self.by_node:
            self.after_node[layer_idx], self.running = self.running or [recurrent_states], []
        else:
            self.after[layer_idx] = recurrent_states
        return recurrent_states


class StateProbe(_Cache):
    """Takes the place of `RowStates` in a first forward and records the shapes of the states."""

    def __init__(self) -> None:
        self._conv: dict[int, tuple[tuple[int, int], torch.dtype]] = {}
        self.shapes: list[StateShape] = []

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, conv_kernel_size: int, **_others: Any) -> Tensor:
        self._conv[layer_idx] = (conv_states.shape[1], conv_kernel_size), conv_states.dtype
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **_others: Any) -> Tensor:
        _, heads, key_dim, value_dim = recurrent_states.shape
        sizes = (heads, key_dim, value_dim)
        self.shapes.append(StateShape(layer_idx, *self._conv[layer_idx], sizes, recurrent_states.dtype))
        return recurrent_states
