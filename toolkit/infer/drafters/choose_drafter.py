"""Which drafter serves what was given to draft with."""

from __future__ import annotations

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.drafters.draft_sampling import Draws
from toolkit.infer.drafters.drafter import Drafter, NoDrafter
from toolkit.infer.drafters.head_drafter import AutoregressiveDrafter
from toolkit.infer.drafters.ngram_drafter import NgramDrafter, NgramLookup
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.targets.load import Target

Draft = DraftCheckpoint | NgramLookup


def choose_drafter(
    target: Target,
    draft: Draft | None,
    shape: DraftShape | None,
    pool: PagePool,
    *,
    draws: Draws | None = None,
) -> Drafter:
    """A drafter of `shape` for a head of any kind or n-gram lookup; one that drafts nothing for None.

    pool: where a head's cache lies. draws: the requests whose drafts are drawn from a head's law; None: none.
    """
    if draft is None:
        return NoDrafter(target.device)
    assert shape is not None, "a drafter needs a shape"
    if isinstance(draft, NgramLookup):
        return NgramDrafter(draft, shape, target.device)
    return AutoregressiveDrafter(target, draft, shape, pool, draws=draws)
