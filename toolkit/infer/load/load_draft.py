"""From what a user types after --draft and --token-map to something to draft with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from toolkit.checkpoint.draft_dir import DraftCheckpoint, check_draft_matches
from toolkit.checkpoint.open_head import open_head
from toolkit.infer.cpu.blocked_product import takes
from toolkit.infer.cpu.packed_linear import pack_linears
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.drafters.ngram_drafter import NgramLookup
from toolkit.log import get_logger
from toolkit.targets.load import Target
from toolkit.targets.quantize import DRAFT_QUANTIZATIONS, quantize_head
from toolkit.tokenmap.build import forced_ids_for
from toolkit.tokenmap.files import load_freq_list
from toolkit.tokenmap.token_map import TokenMap

logger = get_logger(__name__)

NGRAM = "ngram"


class OpenError(ValueError):
    """What was typed does not name an engine; the message says what to type."""


def open_draft(name: str | Path, target: str | None = None, revision: str | None = None) -> Draft:
    """ "ngram" (a folder of that name is ./ngram), else a head by directory or hub id, for that target.

    Raises DraftDirError, WeightsError, TokenMapError, TargetError.
    """
    return NgramLookup() if str(name) == NGRAM else open_head(name, target=target, revision=revision)


def check_token_map_goes_with(draft: Draft | None, path: str | Path) -> None:
    """Raise `OpenError` unless the head scores tokens by the target's own output matrix."""
    if isinstance(draft, DraftCheckpoint) and draft.kind != "eagle3":
        return
    if draft is None:
        why = "there is no draft head to use it"
    elif isinstance(draft, DraftCheckpoint):
        why = f"an eagle3 head has an output matrix of its own, over the {draft.token_map.size} ids it was trained with"
    else:
        why = "n-gram lookup scores no tokens"
    raise OpenError(
        f"--token-map {path}: {why}; leave it out (it chooses rows of the target's output matrix, for heads that share "
        "it: eagle2, mtp)"
    )


def fit_draft(draft: Draft, target: Target, token_map: str | Path | None = None) -> Draft:
    """`draft` on the target's device and in its dtype; with a `token_map` file it drafts only the ids in it.

    The file is a plain list of ids (freq_N.pt, as SGLang's --speculative-token-map reads it). Ids of special tokens and
    ends of turns that it lacks are added: FR-Spec's published maps lack them, and a head that cannot draft the end of a
    turn loses a step an answer. The answers do not depend on the map: what it lacks is never drafted, and the target
    still writes it. Raises TokenMapError for duplicates and ids out of range, OpenError, DraftDirError.
    """
    if token_map is not None:
        check_token_map_goes_with(draft, token_map)
    if not isinstance(draft, DraftCheckpoint):
        return draft
    check_draft_matches(draft, target)
    draft.head.to(device=target.device, dtype=target.dtype)
    if token_map is None:
        return draft
    given = load_freq_list(token_map, target.vocab_size)
    forced = forced_ids_for(target.tokenizer, target.stop_ids, target.vocab_size)
    missing = sorted(set(forced) - set(given.ids.tolist()))
    if missing:
        logger.info("%s lacks %d ids of special tokens and ends of turns; they are added", token_map, len(missing))
        given = TokenMap.from_ids(given.ids.tolist() + missing, target.vocab_size)
    logger.info("drafting with %d of the target's %d ids", given.size, target.vocab_size)
    return replace(draft, token_map=given)


def pack(target: Target, draft: Draft | None, draft_quantization: str = "auto") -> None:
    """Both for decoding on a CPU, see `Target.pack`; `draft` is fitted.

    draft_quantization: "int8" for a head of a byte a weight, "none", or "auto": int8 where the target is quantised, or
    our own products multiply the head. (They multiply int8 weights as exactly as others, and a draft step mostly reads
    weights: the demo's head drafts as well, in four fifths of the time.) Raises TargetError for a head that cannot be.
    """
    target.pack()
    if not isinstance(draft, DraftCheckpoint):
        return
    if draft_quantization == "int8" or (
        draft_quantization == "auto" and (target.quantization is not None or _multiplied_by_ours(draft.head))
    ):
        quantize_head(draft.head)
        logger.info("the draft head has int8 weights; --draft-quantization none keeps it whole")
    elif target.device.type == "cpu":
        pack_linears(draft.head)


def _multiplied_by_ours(head: nn.Module) -> bool:
    linears = [module for module in head.modules() if isinstance(module, nn.Linear)]
    return all(one.weight.device.type == "cpu" and takes(one.weight) for one in linears)


def check_draft_quantization(wanted: str, draft: Draft | None, device: torch.device | str, *, divided: bool) -> None:
    """Raise `OpenError` for an unknown one, and for int8 without a head, on a GPU, or divided among processes."""
    if wanted not in DRAFT_QUANTIZATIONS:
        raise OpenError(f"draft quantization {wanted!r} came; one of {', '.join(DRAFT_QUANTIZATIONS)} is needed")
    if wanted == "int8" and not isinstance(draft, DraftCheckpoint):
        raise OpenError("--draft-quantization int8 came without a draft head; give --draft, or leave it out")
    if wanted == "int8" and torch.device(device).type != "cpu":
        raise OpenError(
            f"--draft-quantization int8 came with a head on {device}; it is for the CPU: leave it out, or give "
            "--device cpu"
        )
    if wanted == "int8" and divided:
        raise OpenError("--draft-quantization int8 is for one process; leave it out, or --tensor-parallel-size at 1")
