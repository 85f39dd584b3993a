"""Launches at an engine's start what its rounds and prompts launch, so that no request waits for a compilation.

Triton compiles a kernel for every variant of its constants. They follow the next power of two of a row's queries, keys
(in one part or several) and tree nodes, and the numbers of drafts at a node. Everything runs on padding rows: one
committed position, on the page that is never read. No request may run meanwhile.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toolkit.infer.attention.metadata import FEW, prompts_metadata, tree_metadata
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

PART_KEYS, MOST_PARTS = 256, 64  # attention splits a row's keys into at most so many parts of at least so many keys


def sizes_up_to(most: int) -> list[int]:
    """1, 2, 3, 5, 9, .., the last one at least `most`: the least numbers with each next power of two."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(1 + (1 << (len(sizes) - 1)))
    return sizes


@torch.inference_mode()
def warm_up(context: RoundContext, state: RoundState, drafter: Drafter, shape: DraftShape | None, chunk: int) -> None:
    """Run prompts of up to `chunk` tokens, trees and rounds of every size that a drafter of `shape` serves."""
    started, pool = time.perf_counter(), context.cache.pool
    shapes: list[DraftShape | None] = [None, *([] if shape is None else [shape])]
    if isinstance(drafter, AdaptiveDrafter):
        shapes = [None, *drafter.chooser.shapes]
    longest = pool.pages_per_row * pool.page_size
    spans = [PART_KEYS << power for power in range(MOST_PARTS.bit_length())]
    spans = [1, *(one for one in spans if one < longest), min(longest, spans[-1])]
    most = max(FEW, *(one.num_draft_tokens for one in shapes if one is not None), 0)
    chunk = min(chunk, context.context_length)
    chunks = [(tokens, span) for tokens in sizes_up_to(chunk) for span in (1, spans[-1])]
    together = 1 if context.states is not None else min(2, len(state.known))
    for tokens, span in [*chunks, *((1, span) for span in spans)]:
        for count in range(1, together + 1):
            _read(context, max(1, span - tokens), [min(tokens, chunk), 1][:count])
    trees = [(nodes, spans[-1]) for nodes in sizes_up_to(max(most, CATCH_UP))]
    for nodes, span in [*trees, *((1, span) for span in spans)]:
        hidden = _read_tree(context, state, nodes, span, target=nodes < 2 * most)
    for count in (1, 2)[: len(state.known)]:
        for one in shapes:
            rows = _padding(state, count)
            run_round(context, rows, partial(_propose, context, shape=one), _greedy)
    _choose(context, hidden, {1, *(one.top_k for one in shapes if one is not None)})
    logger.info("kernels are ready (%.1f s)", time.perf_counter() - started)


def _padding(state: RoundState, count: int) -> RoundRows:
    state.set_rows([], count)
    state.set_tables(0, count)
    return state.rows(count, 1)


def _read(context: RoundContext, start: int, counts: list[int]) -> None:
    """So many tokens of prompts after `start` tokens each, by target and head."""
    at = torch.cat([torch.arange(start, start + count, device=context.cache.shape.device) for count in counts])[None]
    metadata = partial(prompts_metadata, first_row=0, starts=[start] * len(counts), counts=counts)
    states = None if context.states is None else context.states.prompt(0, [start])
    _forward(context, at, metadata, states)
    _head_forward(context, at, metadata)


def _read_tree(context: RoundContext, state: RoundState, nodes: int, span: int, *, target: bool) -> Tensor:
    """A chain of nodes after one token, with the tiles of `span` keys. Returns the target's hidden state [1, 1, H]."""
    rows, device = _padding(state, 1), context.cache.shape.device
    mask = torch.ones(1, nodes, nodes, dtype=torch.bool, device=device).tril()
    depths = torch.arange(nodes, device=device)[None]
    whole = min(1 + nodes + span, rows.table.shape[1] * rows.page_size)
    tree = partial(tree_metadata, table=rows.table, lengths=rows.lengths, span=whole, node_mask=mask)
    at, head = rows.lengths[:, None] + depths, context.head
    windowed = head is not None and head.reader.window is not None
    _head_forward(context, at, partial(tree, depths=depths if windowed else None))
    at = at if target else at[:, :1]
    tree = tree if target else partial(tree, node_mask=mask[:, :1, :1])
    states = None if context.states is None else context.states.nodes(1)
    return _forward(context, at, partial(tree, depths=depths[:, : at.shape[1]]), states)[:, :1]


def _forward(context: RoundContext, positions: Tensor, metadata: Any, states: Any) -> Tensor:
    at = positions.clamp(max=context.context_length - 1)
    return context.forward(torch.zeros_like(at), at, metadata(context.cache), states)


def _head_forward(context: RoundContext, positions: Tensor, metadata: Any) -> None:
    if context.head is None:
        return
    reader, reach = context.head.reader, context.context_length
    at = positions.clamp(max=reach - 1)
    hidden = torch.zeros(*at.shape, reader.head.config.hidden_size, dtype=reader.dtype, device=at.device)
    for stage, cache in enumerate(reader.caches):
        reader.read(stage, torch.zeros_like(at), hidden, at, metadata(cache), reach)
    if reader.writes_alone:
        reader.write(torch.zeros_like(at), hidden, at, metadata(reader.caches[0]), reach)


def _propose(context: RoundContext, rows: RoundRows, shape: DraftShape | None) -> DraftTree:
    """A tree of `shape`; of two rows the second keeps a part of it."""
    head, count = context.head, len(rows.roots)
    if shape is None:
        return root_only(rows.roots)
    if head is not None:
        head.inputs.hold(count, shape.num_steps + 1)
        return head.draft(rows, shape, [shape, DraftShape.chain(1)][:count], DraftSampling(), shape.num_steps + 1)
    drafts = torch.zeros(count, shape.num_draft_tokens - 1, dtype=torch.long, device=rows.roots.device)
    return chain_tree(rows.roots, drafts, [drafts.shape[1]] * count)


def _greedy(logits: Tensor, positions: Tensor, tree: DraftTree, first: int = 0) -> Choices:
    return Choices(greedy(logits), None)


def _choose(context: RoundContext, hidden: Tensor, widths: set[int]) -> None:
    """Tokens from edited logits, which are float32, a drawn one, and the best `widths` drafts at a node."""
    logits, head, device = context.forward.target.logits(hidden), context.head, hidden.device
    greedy(logits.float())
    params = SamplingParams(temperature=1.0, top_p=0.5, seed=0)
    RowDistributions.of([params], device).draw(logits, torch.zeros(1, 1, dtype=torch.long, device=device))
    if head is not None:
        states = torch.zeros(1, 1, head.reader.head.config.hidden_size, dtype=head.reader.dtype, device=device)
        for width in sorted(widths):
            ops_for(device.type).top_log_probs(head.reader.head.logits(0, states), width)
