"""Choose the drafter and the verifier for a draft head, n-gram lookup or neither."""

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
from toolkit.targets.target import Target

Draft = DraftCheckpoint | NgramLookup


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
    return HeadDrafter(target, draft, shape, pool, draws=draws)


def choose_verifier(name: str, draft: Draft | None, shape: DraftShape | None) -> Verifier:
    """Returns the verifier of this name; "auto" becomes "target" without a head and for trees.

    Raises EngineError for an unknown name or if the verifier needs drawn drafts and there is no head. Raises
    DraftShapeError if the verifier needs a chain and `shape` is a tree.
    """
    verifier = VERIFIERS.get(name)
    if verifier is None:
        raise EngineError(f'verify is "{name}"; one of {", ".join(VERIFIERS)} is needed')
    if not verifier.draws_drafts:
        return verifier
    not_drawn = draft is None or isinstance(draft, NgramLookup)
    if verifier is AUTO and (not_drawn or (shape is not None and not shape.is_chain)):
        return TARGET
    if not_drawn:
        given = "no draft head is given" if draft is None else "n-gram lookup is given"
        raise EngineError(f'verify="{name}" needs a draft head, but {given}; give a draft head, or set verify="target"')
    if shape is not None:
        verifier.check_shape(shape)
    return verifier
