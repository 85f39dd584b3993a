"""One round of speculative decoding, the only definition: eager decoding runs it, a CUDA graph records it.

    propose -> target forward over the tree -> choose -> follow -> keep features -> compact -> advance

It is a function of static buffers: between its first kernel and its last the host reads nothing from the device.
Lengths, pages, tokens and (recorded) sampling settings come from `RoundState`, shapes from the tree. Three things
differ between its users: how the tree is proposed, how tokens are chosen, and the span of keys that attention reads.

Shapes: B rows, N nodes a row, A longest accepted path (root included), H hidden size, W feature width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.infer.attention.metadata import tree_metadata
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.kernels.tree_reference import Followed
from toolkit.infer.request.draft_tree import DraftTree
from toolkit.infer.request.request import Request, VerifyEvent
from toolkit.infer.verify.logprobs import NodeLogprobs
from toolkit.infer.verify.sampler import Choices, NodeSampler
from toolkit.infer.verify.verifiers import nodes_at_once
from toolkit.infer.verify.walk import VerifyResult, follow


@dataclass(frozen=True)
class RoundContext:
    """What all rounds of an engine run on. head: the drafter whose features each round keeps; None: there is none."""

    forward: TargetForward
    cache: KVCache
    head: HeadDrafter | None
    max_context: int


@dataclass(frozen=True)
class RoundOutput:
    """followed: the accepted paths, on the device. choices: the target's token after every node."""

    followed: Followed
    choices: Choices


def run_round(
    context: RoundContext, rows: RoundRows, propose: Callable[[RoundRows], DraftTree], sampler: NodeSampler
) -> RoundOutput:
    """A row of L tokens has the target's keys of L - 1; the last token is the root of its tree."""
    tree = propose(rows)
    hidden = forward_tree(context, rows, tree)
    choices = choose_tokens(context, rows, tree, hidden, sampler)
    followed = follow(tree, choices.tokens)
    committed = (followed.accepted + 1) * rows.real
    if context.head is not None:
        context.head.keep_features(rows, tree, followed, committed)
    if not tree.is_chain:
        compact(context.cache, rows, followed)
    advance(rows, followed, committed)
    return RoundOutput(followed, choices)


def round_numbers(
    context: RoundContext, rows: RoundRows, propose: Callable[[RoundRows], DraftTree], sampler: NodeSampler
) -> Tensor:
    """The round as a graph records it: `Followed.numbers` of its accepted paths."""
    return run_round(context, rows, propose, sampler).followed.numbers


def forward_tree(context: RoundContext, rows: RoundRows, tree: DraftTree) -> Tensor:
    """The target's hidden states at every node, [B, N, H]."""
    # Nodes past the context are never committed; clamping keeps learned position tables in range.
    positions = (rows.lengths[:, None] + tree.depths).clamp(max=context.max_context - 1)
    metadata = tree_metadata(context.cache, rows.table, rows.lengths, rows.span(tree.nodes), tree.mask, tree.depths)
    return context.forward(tree.tokens, positions, metadata)


def choose_tokens(
    context: RoundContext, rows: RoundRows, tree: DraftTree, hidden: Tensor, sampler: NodeSampler
) -> Choices:
    """The target's token after every node, [B, N]; hidden [B, N, H]. Large batches are scored in parts."""
    logits, nodes = context.forward.target.logits, nodes_at_once(*hidden.shape[:2], drawn=tree.proposal is not None)
    positions = (rows.lengths + 1)[:, None] + tree.depths
    if nodes >= tree.nodes:
        return sampler(logits(hidden), positions, tree)
    parts = zip(hidden.split(nodes, dim=1), positions.split(nodes, dim=1), strict=True)
    return Choices.joined([sampler(logits(part), at, tree, i * nodes) for i, (part, at) in enumerate(parts)])


def compact(cache: KVCache, rows: RoundRows, followed: Followed) -> None:
    """Move the target's keys of accepted nodes to the positions they would have in plain decoding.

    Node n of a row lies at length + n; the t-th node of its path belongs at length + t. (Node 0 never moves.)
    """
    at = torch.arange(1, followed.path.shape[1], device=rows.lengths.device)
    path = torch.where(at <= followed.accepted[:, None], followed.path[:, 1:], at)
    begin = rows.lengths[:, None]
    destination, source = (cache.pool.places_in(rows.table, begin + one) for one in (at, path))
    cache.move_entries(destination.flatten(), source.flatten())


def advance(rows: RoundRows, followed: Followed, committed: Tensor) -> None:
    """The rows stand after what was committed, committed [B] tokens; padding stays."""
    rows.roots.copy_(followed.tokens.gather(1, followed.accepted[:, None])[:, 0] * rows.real)
    rows.lengths.add_(committed)


def commit(
    requests: Sequence[Request], result: VerifyResult, logprobs: NodeLogprobs | None, started: float, proposed: float
) -> list[Request]:
    """Append accepted drafts and the target's own token to the answers, cut at stops and limits; log one event each.

    requests: by row. Requests that have ended get nothing: their round was one too many. logprobs: of rows that asked.
    started, proposed: when the round began, and when its trees were drafted (perf_counter).
    Returns the requests that got tokens.
    """
    verified = time.perf_counter()
    rows = [row for row, request in enumerate(requests) if not request.finished]
    counts = [requests[row].append_run(result.path_tokens[row], result.accepted[row]) for row in rows]
    if logprobs is not None:
        logprobs.record(requests, result)
    times = (proposed - started, verified - proposed, time.perf_counter() - verified)
    for row, count in zip(rows, counts, strict=True):
        accepted, offer = result.accepted[row], (result.offered[row], result.depth_offered[row])
        cut = count < accepted + 1
        requests[row].events.append(VerifyEvent(*offer, accepted, count, cut, *times, len(rows)))
    return [requests[row] for row in rows]
