"""Which verifier serves the name that was given, and whether it goes with what drafts."""

from __future__ import annotations

from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.drafters.ngram_drafter import NgramLookup
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.errors import EngineError
from toolkit.infer.verify.verifiers import AUTO, TARGET, VERIFIERS, Verifier


def choose_verifier(name: str, draft: Draft | None, shape: DraftShape | None) -> Verifier:
    """Auto becomes target where nothing can be drawn: without a head, and in trees. Raises EngineError for an unknown
    name and for drafts without a law, DraftShapeError for a tree where only a chain will do."""
    verifier = VERIFIERS.get(name)
    if verifier is None:
        raise EngineError(f'verify="{name}": no such verifier; there are {", ".join(VERIFIERS)}')
    if not verifier.draws_drafts:
        return verifier
    lawless = draft is None or isinstance(draft, NgramLookup)
    if verifier is AUTO and (lawless or (shape is not None and not shape.is_chain)):
        return TARGET
    if lawless:
        came = "no draft head" if draft is None else "n-gram lookup, whose drafts are not drawn from a law"
        raise EngineError(f'verify="{name}" came with {came}; give a draft head, or take verify="target"')
    if shape is not None:
        verifier.check_shape(shape)
    return verifier
