"""Launches at an engine's start what its rounds and prompts may launch, so that no request waits for a compilation.

Triton compiles a kernel for every variant of its arguments: dtypes, constants (tiles, numbers of parts), and whether a
pointer or number is a multiple of 16. Numbers that differ from round to round do not make variants (`do_not_specialize`
of the kernels), so those that are left are few:

    attention    a tile for every power of two of a row's queries; its keys in one part, or in several that are merged,
                 by powers of two
    trees        sizes of a row's nodes and candidates, by powers of two
    tokens       the number of drafts at a node, times the number of parts of the vocabulary

Everything runs on padding rows: one committed position, on the page that is never read. No request may run meanwhile.

Shapes: B rows, N tokens or nodes a row, H hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from toolkit.infer.attention.metadata import FEW, AttentionMetadata, prompt_metadata, tree_metadata
from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.cache.linear_states import RowStates
from toolkit.infer.cache.round_state import RoundRows, RoundState
from toolkit.infer.drafters.adaptive import AdaptiveDrafter
from toolkit.infer.drafters.draft_rollout import DraftSampling
from toolkit.infer.drafters.drafter import Drafter
from toolkit.infer.drafters.head_drafter import CATCH_UP
from toolkit.infer.engine.round import RoundContext, run_round
from toolkit.infer.kernels.dispatch import ops_for
from toolkit.infer.request.draft_tree import DraftShape, DraftTree, chain_tree, root_only
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.verify.sampler import Choices, greedy
from toolkit.infer.verify.token_distribution import RowDistributions
from toolkit.log import get_logger

logger = get_logger(__name__)

Metadata = Callable[[KVCache], AttentionMetadata]
PART_KEYS, MOST_PARTS = 256, 64  # attention splits a row's keys into at most so many parts of at least so many keys
_done: WeakKeyDictionary[nn.Module, set[tuple]] = WeakKeyDictionary()  # launched before, by the target's model


def sizes_up_to(most: int) -> list[int]:
    """1, 2, 3, 5, 9, .., the last one at least `most`: the least numbers with each next power of two."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(1 + (1 << (len(sizes) - 1)))
    return sizes


class FirstLaunches:
    """The launches of one engine. chunk: most tokens of a prompt that are read at once."""

    def __init__(self, context: RoundContext, state: RoundState, chunk: int) -> None:
        self._context, self._state = context, state
        self._device = context.cache.shape.device
        self._target = context.forward.target
        longest = context.cache.pool.pages_per_row * context.cache.pool.page_size
        self._chunk = min(chunk, context.context_length)
        # Positions read, with all numbers of parts up to a power of two; no more than fit into a row.
        spans = [PART_KEYS << power for power in range(MOST_PARTS.bit_length())]
        self._spans = [1, *(one for one in spans if one < longest), min(longest, spans[-1])]

    @torch.inference_mode()
    def run(self, drafter: Drafter, shape: DraftShape | None) -> None:
        """Launch everything for a drafter of `shape` (None: plain decoding), once in a process for each target."""
        shapes: list[DraftShape | None] = [None]
        if isinstance(drafter, AdaptiveDrafter):
            shapes += drafter.chooser.shapes
        elif shape is not None:
            shapes.append(shape)
        head = self._context.head
        key = (None if head is None else type(head.module), self._state.table.shape, *shapes, self._chunk)
        if key in _done.setdefault(self._target.model, set()):
            return
        started = time.perf_counter()
        self._read_prompts()
        self._read_trees(max(FEW, *(one.num_draft_tokens for one in shapes if one is not None), 0))
        for count in (1, 2)[: len(self._state.known)]:
            for shape in shapes:
                self._round(shape, count)
        self._choose_tokens({1, *(one.top_k for one in shapes if one is not None)})
        _done[self._target.model].add(key)
        logger.info("kernels are ready (%.1f s)", time.perf_counter() - started)

    # -- attention -----------------------------------------------------------------------------------------------------

    def _read_prompts(self) -> None:
        """Chunks of prompts after earlier ones: every size after few and after many keys, one token after all spans."""
        sizes = [(tokens, span) for tokens in sizes_up_to(self._chunk) for span in (self._spans[0], self._spans[-1])]
        for tokens, span in [*sizes, *((1, span) for span in self._spans)]:
            start = max(1, span - tokens)
            states, at = self._context.states, torch.arange(start, start + tokens, device=self._device)[None]
            prompt = partial(prompt_metadata, first_row=0, starts=[start], tokens=tokens)
            self._read(at, prompt, None if states is None else states.prompt(0, [start]))
            self._read_by_head(at, prompt)

    def _read_trees(self, most: int) -> None:
        """Nodes after a row's keys: every size of a tree (a head: of what it reads at once), and one node of all spans.

        most: nodes of the largest tree.
        """
        self._state.set_rows([], 1)
        self._state.set_tables(0, 1)
        rows, states = self._state.rows(1, 1), self._context.states
        sizes = [(nodes, self._spans[-1]) for nodes in sizes_up_to(max(most, CATCH_UP))]
        for nodes, span in [*sizes, *((1, span) for span in self._spans)]:
            mask = torch.ones(1, nodes, nodes, dtype=torch.bool, device=self._device).tril()
            depths = torch.arange(nodes, device=self._device)[None]
            whole = min(1 + nodes + span, rows.table.shape[1] * rows.page_size)
            tree = partial(tree_metadata, table=rows.table, lengths=rows.lengths, span=whole, node_mask=mask)
            at = rows.lengths[:, None] + depths
            if nodes < 2 * most:
                self._read(at, partial(tree, depths=depths), None if states is None else states.nodes(1))
            self._read_by_head(at, partial(tree, depths=depths if self._head_has_window else None))

    def _read(self, positions: Tensor, metadata: Metadata, states: RowStates | None) -> None:
        """Run the target over tokens at positions [1, N]."""
        context, at = self._context, positions.clamp(max=self._context.context_length - 1)
        self._hidden = context.forward(torch.zeros_like(at), at, metadata(context.cache), states)[:, :1]

    def _read_by_head(self, positions: Tensor, metadata: Metadata) -> None:
        if self._context.head is None:
            return
        reader, reach = self._context.head.reader, self._context.context_length
        at = positions.clamp(max=reach - 1)
        hidden = torch.zeros(*at.shape, reader.head.config.hidden_size, dtype=reader.dtype, device=self._device)
        for stage, cache in enumerate(reader.caches):
            reader.read(stage, torch.zeros_like(at), hidden, at, metadata(cache), reach)

    @property
    def _head_has_window(self) -> bool:
        """Whether the head's attention takes the depths of nodes."""
        return self._context.head is not None and self._context.head.reader.window is not None

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _round(self, shape: DraftShape | None, count: int) -> None:
        """A greedy round of `count` padding rows; of two, the second keeps a part of the shape."""
        self._state.set_rows([], count)
        self._state.set_tables(0, count)
        rows = self._state.rows(count, 1)
        run_round(self._context, rows, lambda rows: self._propose(rows, shape), _greedy)

    def _propose(self, rows: RoundRows, shape: DraftShape | None) -> DraftTree:
        head, count = self._context.head, len(rows.roots)
        if shape is None:
            return root_only(rows.roots)
        if head is not None:
            unread = shape.num_steps + 1
            head.inputs.hold(count, unread)
            return head.draft(rows, shape, [shape, DraftShape.chain(1)][:count], DraftSampling(), unread)
        drafts = torch.zeros(count, shape.num_draft_tokens - 1, dtype=torch.long, device=self._device)
        return chain_tree(rows.roots, drafts, [drafts.shape[1]] * count)

    def _choose_tokens(self, widths: set[int]) -> None:
        """Tokens from edited logits, which are float32, a drawn one, and the best `widths` drafts at a node."""
        target, head = self._target, self._context.head
        logits = target.logits(self._hidden)
        greedy(logits.float())
        params = SamplingParams(temperature=1.0, top_p=0.5, seed=0)
        RowDistributions.of([params], self._device).draw(
            logits, torch.zeros(1, 1, dtype=torch.long, device=self._device)
        )
        if head is None:
            return
        states = torch.zeros(1, 1, head.reader.head.config.hidden_size, dtype=head.reader.dtype, device=self._device)
        for width in sorted(widths):
            ops_for(self._device.type).top_log_probs(head.reader.head.logits(0, states), width)


def _greedy(logits: Tensor, positions: Tensor, tree: DraftTree, first: int = 0) -> Choices:
    return Choices(greedy(logits), None)
