"""What the importers of heads with an output matrix share: names, the token map, and checks of the auxiliary layers.

Shapes: D draft vocabulary, V target vocabulary, A auxiliary layers, Ht target hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from toolkit.checkpoint.errors import DraftDirError
from toolkit.checkpoint.resolution import Resolver
from toolkit.targets.facts import TargetFacts
from toolkit.tokenmap.token_map import TokenMap, as_ids
from toolkit.weights import WeightsError

BY_DRAFT_ID = ("lm_head.weight", "markov_head.markov_w2.weight")  # [D, ..]: a row for each draft id
Tensors = dict[str, torch.Tensor]


def renamed(
    stored: Mapping[str, torch.Tensor], our_name: Callable[[str], str], dropped: Collection[str], resolver: Resolver
) -> Tensors:
    """The tensors under our names, without those that belong to the target, `dropped`."""
    tensors: Tensors = {}
    for theirs, value in stored.items():
        ours = our_name(theirs)
        if ours in tensors:
            raise WeightsError(f"its weights hold {ours} twice, once as {theirs}; each is needed once")
        if ours in dropped:
            resolver.note(theirs, "left out", "the target's own, or computed from the config; no part of the head")
        else:
            tensors[ours] = value
    return tensors


def target_width(config: Mapping[str, Any], shapes: Mapping[str, Any]) -> int:
    """The target's hidden size. Raises `DraftDirError` where the head's is another."""
    width: int = config.get("target_hidden_size") or shapes["hidden_size"]
    if width != shapes["hidden_size"]:
        raise DraftDirError(
            f"config.json: the head is {shapes['hidden_size']} wide and its target {width}; such a head needs "
            "a token embedding of its own, which is not supported"
        )
    return width


def read_token_map(config: Mapping[str, Any], vocab_size: int, tensors: Tensors, resolver: Resolver) -> TokenMap:
    """d2t and t2d, taken out of `tensors`; without d2t the whole vocabulary. Without lm_head the target's scores it."""
    matrix = tensors.get("lm_head.weight")
    rows = vocab_size if matrix is None else matrix.shape[0]
    size = config.get("draft_vocab_size")
    if size is None:
        size = rows
        resolver.note("draft_vocab_size", size, "not in the config: the rows of the output matrix")
    if size != rows and matrix is None:
        raise WeightsError(
            f"missing: lm_head.weight. The draft vocabulary has {size} of {vocab_size} ids, and the target's output "
            "matrix scores all of them"
        )
    if size != rows:
        raise WeightsError(f"wrong shape: lm_head.weight has {rows} rows, draft_vocab_size is {size}")
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if t2d is not None and t2d.numel() != vocab_size:
        raise WeightsError(f"wrong shape: t2d is over {t2d.numel()} ids, vocab_size is {vocab_size}")
    if d2t is None:
        if size != vocab_size:
            raise WeightsError(
                f"missing: d2t. The draft vocabulary has {size} of {vocab_size} ids, and nothing says which"
            )
        resolver.note("d2t", "identity", "absent, and the draft vocabulary is the whole one")
        return TokenMap.identity(vocab_size)
    if d2t.numel() != size:
        raise WeightsError(f"wrong shape: d2t has {d2t.numel()} entries, the draft vocabulary {size}")
    ids = as_ids(d2t) + torch.arange(size)
    if (ids[1:] < ids[:-1]).any():
        order = ids.argsort()
        for name in [name for name in BY_DRAFT_ID if name in tensors]:
            tensors[name] = tensors[name][order.to(tensors[name].device)]
        resolver.note("d2t", "sorted", "its ids are not ascending: the rows of the output matrix were sorted with them")
    token_map = TokenMap.from_ids(ids, vocab_size)
    if t2d is None:
        empty = size < vocab_size and not d2t.any()
        rule = f"absent; d2t is all zero: ids 0..{size - 1}, or it was never filled; accept_length will show"
        resolver.note("t2d", "from d2t", rule if empty else "absent; d2t says the same", warning=empty)
    elif not torch.equal(token_map.t2d, t2d.bool()):
        raise WeightsError("d2t and t2d do not describe the same draft vocabulary; export the head again")
    return token_map


def check_aux_layers(ids: tuple[int, ...], tensors: Tensors, target_hidden: int, facts: TargetFacts | None) -> None:
    """Raises `DraftDirError` for ids that no target, or not this one, has; `WeightsError` where `fc` reads others."""
    if list(ids) != sorted(set(ids)) or not ids or ids[0] < 0:
        raise DraftDirError(f"aux_layer_ids {list(ids)}: ascending, distinct ids are needed")
    if facts is not None and ids[-1] > facts.n_layers:
        raise DraftDirError(f"aux_layer_ids {list(ids)}: the target {facts.name} has {facts.n_layers} layers")
    width = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors else len(ids) * target_hidden
    if width != len(ids) * target_hidden:
        raise WeightsError(
            f"wrong shape: fc.weight reads {width} values, {len(ids)} auxiliary layers of {target_hidden} are "
            f"{len(ids) * target_hidden}; aux_layer_ids {list(ids)} or target_hidden_size is not the head's"
        )
