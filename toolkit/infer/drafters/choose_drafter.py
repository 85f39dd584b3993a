"""Choose the drafter for a draft head, n-gram lookup or neither."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.drafters.adaptive_drafter import AdaptiveDrafter
from toolkit.infer.drafters.block_drafter import BlockDrafter
from toolkit.infer.drafters.composed_drafter import MOST_DEPTH, ComposedDrafter
from toolkit.infer.drafters.draft_sampling import Draws
from toolkit.infer.drafters.drafter import Drafter, NoDrafter
from toolkit.infer.drafters.drafting_head import cache_shape
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.drafters.lookup import SuffixAutomaton
from toolkit.infer.drafters.ngram_drafter import NgramDrafter, NgramLookup
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.targets.target import Target

Draft = DraftCheckpoint | NgramLookup


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
        return NgramDrafter(draft, shape, target.device)
    kind = BlockDrafter if draft.head.config.drafts_at_once else HeadDrafter
    return kind(target, draft, shape, pool, draws=draws)


def with_choices(
    drafter: Drafter, shape: DraftShape, lookup: Lookup | None, device: torch.device, *, adaptive: bool
) -> Drafter:
    """Returns `drafter`, with lookup beside its head, and with its shape chosen in every round (adaptive)."""
    if lookup is not None and isinstance(drafter, HeadDrafter):
        drafter = ComposedDrafter(drafter, shape, MOST_DEPTH if adaptive else None, lookup.corpus)
    return AdaptiveDrafter(drafter, shape, first_is_slow=device.type != "cpu") if adaptive else drafter
