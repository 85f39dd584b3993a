"""Which drafter serves what was given to draft with, and which verifier goes with it."""

from __future__ import annotations

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.drafters.draft_sampling import Draws
from toolkit.infer.drafters.drafter import Drafter, NoDrafter
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.drafters.ngram_drafter import NgramDrafter, NgramLookup
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.errors import EngineError
from toolkit.infer.verify.verifiers import AUTO, TARGET, VERIFIERS, Verifier
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

    pool: where a head's cache lies. draws: requests whose drafts are drawn from the head's distribution; None: none.
    """
    if draft is None:
        return NoDrafter()
    assert shape is not None, "a drafter needs a shape"
    if isinstance(draft, NgramLookup):
        return NgramDrafter(draft, shape, target.device)
    return HeadDrafter(target, draft, shape, pool, draws=draws)


def choose_verifier(name: str, draft: Draft | None, shape: DraftShape | None) -> Verifier:
    """The verifier of that name; "auto" becomes "target" where drafts cannot be drawn: without a head, and in trees.

    Raises EngineError for an unknown name and for drafts without a distribution, DraftShapeError for a tree where only
    a chain will do.
    """
    verifier = VERIFIERS.get(name)
    if verifier is None:
        raise EngineError(f'verify="{name}": no such verifier; there are {", ".join(VERIFIERS)}')
    if not verifier.draws_drafts:
        return verifier
    not_drawn = draft is None or isinstance(draft, NgramLookup)
    if verifier is AUTO and (not_drawn or (shape is not None and not shape.is_chain)):
        return TARGET
    if not_drawn:
        came = "no draft head" if draft is None else "n-gram lookup, whose drafts are not drawn from a distribution"
        raise EngineError(f'verify="{name}" came with {came}; give a draft head, or take verify="target"')
    if shape is not None:
        verifier.check_shape(shape)
    return verifier
