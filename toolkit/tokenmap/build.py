"""Build a token map from counts of tokens, and say how much of them it covers.

Shapes: V = target vocabulary.

EAGLE-3 (arXiv 2503.01840) counts the ids of the training answers, keeps the N most frequent, sorts them ascending and
stores offsets. FR-Spec (arXiv 2502.14856) ranks ids the same way on any corpus. Both rules are extended by forced ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from toolkit.tokenmap.token_map import TokenMap, TokenMapError, some


def build_token_map(
    counts: torch.Tensor,
    *,
    size: int | None = None,
    coverage: float | None = None,
    forced_ids: Sequence[int] = (),
) -> TokenMap:
    """Build the map of the `size` most frequent ids in `counts` [V], or of the fewest ids that reach `coverage`.

    Forced ids are kept whatever their count. Ties go to the lower id, so ids that never occur fill the map in ascending
    order. Raises `TokenMapError` unless size or coverage is in range and the forced ids fit into the size.
    """
    order = rank_ids(counts, forced_ids)
    forced = len(set(forced_ids))
    if size is None:
        assert coverage is not None, "either a size or a coverage is given"
        size = max(_size_for(counts[order], coverage), forced)
    if not 1 <= size <= counts.numel():
        raise TokenMapError(
            f"draft vocabulary size is {size}; expected 1 to {counts.numel()} (the target's vocabulary size)"
        )
    if forced > size:
        raise TokenMapError(f"{forced} forced ids do not fit into a map of size {size}; raise the size")
    return TokenMap.from_ids(order[:size], counts.numel())


def forced_ids_for(tokenizer: Any, stop_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Return the ids that every map must keep, ascending: the tokenizer's special tokens and the stop ids.

    Plain text never contains them, and a head that cannot draft the end of a turn loses one verify step per answer.
    """
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    ids = special | set(tokenizer.all_special_ids) | set(stop_ids)
    return tuple(sorted(token for token in ids if 0 <= token < vocab_size))


def _size_for(ranked_counts: torch.Tensor, share: float) -> int:
    """Return the length of the shortest prefix of the ranked counts that holds the share of their sum."""
    if not 0.0 < share <= 1.0:
        raise TokenMapError(f"coverage is {share}; expected a share above 0 and at most 1, such as 0.95")
    total = int(ranked_counts.sum())
    if total == 0:
        raise TokenMapError("no tokens were counted, so coverage is undefined; count a corpus or give a size")
    # The slack absorbs float rounding: a product such as 7.000000000000001 must not require one more token.
    needed = math.ceil(share * total - 1e-9 * total)
    return int(torch.searchsorted(ranked_counts.cumsum(0), torch.tensor(needed))) + 1


def coverage(counts: torch.Tensor, ids: torch.Tensor) -> float:
    """Return the share of all counted tokens whose id is among `ids` (unique); 0.0 when nothing was counted."""
    total = int(counts.sum())
    return int(counts[ids].sum()) / total if total else 0.0


def rank_ids(counts: torch.Tensor, forced_ids: Sequence[int] = ()) -> torch.Tensor:
    """Return all ids [V]: forced ids first, then by descending count, ties by ascending id."""
    forced = torch.tensor(sorted(set(forced_ids)), dtype=torch.int64)
    if forced.numel() and (forced[0] < 0 or forced[-1] >= counts.numel()):
        raise TokenMapError(f"forced ids {forced.tolist()} are not all in the target vocabulary [0, {counts.numel()})")
    by_count = torch.sort(counts, descending=True, stable=True).indices
    is_forced = torch.zeros(counts.numel(), dtype=torch.bool)
    is_forced[forced] = True
    return torch.cat([forced, by_count[~is_forced[by_count]]])


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
