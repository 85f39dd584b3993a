"""What a draft (a head, n-gram lookup or neither) can draft, and the drafter for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.dspark import DSparkHead
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.drafters.adaptive import AdaptiveDrafter
from toolkit.infer.drafters.block_drafter import BlockDrafter
from toolkit.infer.drafters.draft_rollout import Draws
from toolkit.infer.drafters.drafter import Drafter, NoDrafter
from toolkit.infer.drafters.drafting_head import cache_shape
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.drafters.lookup import MOST_DEPTH, ComposedDrafter, NgramDrafter, NgramLookup, SuffixAutomaton
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.targets.target import Target

Draft = DraftCheckpoint | NgramLookup
DEFAULT_SHAPE = DraftShape.chain(4)


def drafts_at_once(draft: Draft | None) -> int:
    """Returns how many tokens a block drafter drafts at once; 0 for any other draft."""
    return draft.head.config.drafts_at_once if isinstance(draft, DraftCheckpoint) else 0


def shape_for(draft: Draft | None, shape: DraftShape) -> DraftShape:
    """Returns the shape that a budget means to this draft; other shapes as they are."""
    if shape.budget and isinstance(draft, NgramLookup):
        return DraftShape.chain(shape.num_draft_tokens - 1)
    return shape.for_head(drafts_at_once(draft))


def says_confidence(draft: DraftCheckpoint) -> bool:
    """Returns whether the head says how sure a draft is."""
    return isinstance(draft.head, DSparkHead) and draft.head.has_confidence


def default_shape(draft: Draft | None) -> DraftShape:
    """Returns a chain of 4, or of as many tokens as a block drafter drafts at once."""
    return DraftShape.chain(drafts_at_once(draft)) if drafts_at_once(draft) else DEFAULT_SHAPE


def drafted_shapes(draft: Draft, shapes: Sequence[DraftShape]) -> list[DraftShape]:
    """Returns those of `shapes` that the draft can draft: of lookup chains, of a block those no deeper than it."""
    if isinstance(draft, NgramLookup):
        return [one for one in shapes if one.is_chain]
    most = drafts_at_once(draft)
    return [one for one in shapes if not most or one.num_steps <= most]


@dataclass(frozen=True)
class Lookup:
    """Suffix lookup beside a head. corpus: earlier texts, searched beside each request's own."""

    corpus: SuffixAutomaton | None = None


def cached_token_bytes(draft: Draft | None) -> int:
    """Returns the bytes of a token in the head's KV caches; 0 without a head."""
    if not isinstance(draft, DraftCheckpoint):
        return 0
    return draft.head.config.mtp_layers * cache_shape(draft.head, torch.device("cpu")).bytes_per_token


def choose_drafter(
    target: Target,
    draft: Draft | None,
    shape: DraftShape | None,
    pool: PagePool,
    *,
    draws: Draws | None = None,
) -> Drafter:
    """Returns a drafter of `shape` for a head of any kind or n-gram lookup; `NoDrafter` if `draft` is None.

    pool: the pages of the head's cache. draws: tells whether a request's drafts are drawn from the head's distribution;
    None: no request's are.
    """
    if draft is None:
        return NoDrafter()
    assert shape is not None, "a drafter needs a shape"
    if isinstance(draft, NgramLookup):
        return NgramDrafter(draft, shape)
    kind = BlockDrafter if draft.head.config.drafts_at_once else HeadDrafter
    return kind(target, draft, shape, pool, draws=draws)


def with_choices(
    drafter: Drafter, shape: DraftShape, lookup: Lookup | None, device: torch.device, *, adaptive: bool, packed: bool
) -> Drafter:
    """Returns `drafter`, with lookup beside its head, and with its drafts chosen in every round (adaptive).

    packed: forwards compute no padding."""
    if lookup is not None and isinstance(drafter, HeadDrafter):
        drafter = ComposedDrafter(drafter, shape, MOST_DEPTH if adaptive else None, lookup.corpus)
    if not adaptive:
        return drafter
    return AdaptiveDrafter(drafter, shape, packed=packed, first_is_slow=device.type != "cpu")
