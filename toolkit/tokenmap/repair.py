"""Read the ids of any token map, find what is wrong with them, and repair them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from toolkit.errors import TokenMapError
from toolkit.tokenmap.build import rank_ids
from toolkit.tokenmap.files import read_freq_list
from toolkit.tokenmap.token_map import TokenMap, some
from toolkit.weights import load_tensors

FILE_NAMES = ("token_map.safetensors", "model.safetensors")


def read_ids(path: str | Path) -> torch.Tensor:
    """Read the ids [D] of a freq_N.pt as they stand in it, or of a .safetensors file with d2t.

    A folder is one that `toolkit build-token-map` wrote, or a draft directory. Raises `TokenMapError`, `WeightsError`.
    """
    path = Path(path)
    if path.is_dir():
        file = next((path / name for name in FILE_NAMES if (path / name).is_file()), None)
        if file is None:
            raise TokenMapError(f"{path} has no {' and no '.join(FILE_NAMES)}; give a token map's file or folder")
        path = file
    if not path.is_file():
        raise TokenMapError(f"{path} does not exist; give a freq_N.pt, a token_map.safetensors or a draft directory")
    if path.suffix != ".safetensors":
        return read_freq_list(path)
    d2t = load_tensors(path).get("d2t")
    if d2t is None:
        raise TokenMapError(f"{path} has no d2t: this head drafts all ids of its target")
    return d2t.long() + torch.arange(d2t.numel())


def problems_of(ids: torch.Tensor, vocab_size: int | None = None, forced_ids: Sequence[int] = ()) -> list[str]:
    """Return what is wrong with the ids [D] of a file: duplicates, order, ids outside the vocabulary or missing.

    vocab_size: None if it is not known.
    """
    found = []
    unique, times = ids.unique(return_counts=True)
    if unique.numel() < ids.numel():
        repeated = unique[times > 1]
        found.append(f"{ids.numel() - unique.numel()} duplicates: {some(repeated)}; sampling is then not exact")
    if (ids[1:] < ids[:-1]).any():
        found.append("ids are not ascending, so they cannot be stored as d2t")
    outside = unique[(unique < 0) | (unique >= (vocab_size or torch.iinfo(torch.int64).max))]
    if outside.numel():
        found.append(f"{outside.numel()} ids are outside the vocabulary [0, {vocab_size or 'V'}): {some(outside)}")
    missing = torch.tensor(sorted(set(forced_ids) - set(unique.tolist())), dtype=torch.int64)
    if missing.numel():
        found.append(f"{missing.numel()} special ids are missing, so they are never drafted: {some(missing)}")
    return found


def repaired(
    ids: torch.Tensor, vocab_size: int, forced_ids: Sequence[int], counts: torch.Tensor | None = None
) -> TokenMap:
    """Return the map of the valid ids in `ids` [D] and of the forced ids.

    With `counts` [V] the map keeps its size D: the most frequent other ids replace those that were dropped, and the
    least frequent of `ids` make room for forced ones. Without counts no valid id is given up.
    Raises `TokenMapError` when half of the list or more is outside the vocabulary.
    """
    valid = ids[(ids >= 0) & (ids < vocab_size)].tolist()
    if 2 * len(valid) <= ids.numel():
        raise TokenMapError(
            f"only {len(valid)} of the list's {ids.numel()} ids are in the vocabulary [0, {vocab_size}): it is of "
            "another tokenizer, whose ids mean other texts here; build a map for this target from texts"
        )
    forced, own = set(forced_ids), set(valid)
    if counts is None:
        return TokenMap.from_ids(forced | own, vocab_size)
    ranked = sorted(rank_ids(counts, forced_ids).tolist(), key=lambda one: (one not in forced, one not in own))
    return TokenMap.from_ids(ranked[: max(ids.numel(), len(forced))], vocab_size)
