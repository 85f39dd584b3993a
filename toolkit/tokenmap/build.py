"""From counts to a token map: EAGLE-3's rule, with the ids that must be there forced in.

EAGLE-3 (arXiv 2503.01840) counts the ids of the training answers, takes the N most common, sorts them ascending and
stores offsets; FR-Spec (arXiv 2502.14856) ranks the same way on any corpus.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from toolkit.tokenmap.counts import rank_ids
from toolkit.tokenmap.token_map import TokenMap, TokenMapError


def build_token_map(
    counts: torch.Tensor,
    *,
    size: int | None = None,
    coverage: float | None = None,
    forced_ids: Sequence[int] = (),
) -> TokenMap:
    """The map of the `size` most common ids of `counts` [V], or of the fewest that cover the share `coverage`.

    Forced ids are kept whatever their count; ties go to the lower id, so unused rows are filled with the lowest unused
    ids. Raises `TokenMapError` unless exactly one of size and coverage is given, in range, with room for the forced.
    """
    order = rank_ids(counts, forced_ids)
    if (size is None) == (coverage is None):
        raise TokenMapError(f"size {size} and coverage {coverage} came; exactly one of them is needed")
    forced = len(set(forced_ids))
    if size is None:
        assert coverage is not None, "checked above"
        size = max(_size_for(counts[order], coverage), forced)
    if not 1 <= size <= counts.numel():
        raise TokenMapError(
            f"a draft vocabulary of {size} came; 1 to {counts.numel()} (the target's vocabulary) is needed"
        )
    if forced > size:
        raise TokenMapError(f"{forced} ids are forced in, a size of {size} has no room for them; raise the size")
    return TokenMap.from_ids(order[:size], counts.numel())


def forced_ids_for(tokenizer: Any, stop_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Ids every map must keep: the tokenizer's special tokens and the ids that end an answer, ascending.

    A corpus of plain text never holds them, and a head that cannot draft the end of a turn loses a step an answer.
    """
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    ids = special | set(tokenizer.all_special_ids) | set(stop_ids)
    return tuple(sorted(token for token in ids if 0 <= token < vocab_size))


def _size_for(ranked_counts: torch.Tensor, share: float) -> int:
    """The shortest prefix of the ranked counts that holds the share of their sum."""
    if not 0.0 < share <= 1.0:
        raise TokenMapError(f"coverage {share} came; a share above 0 and at most 1 is needed, such as 0.95")
    total = int(ranked_counts.sum())
    if total == 0:
        raise TokenMapError("no tokens were counted, so a coverage share means nothing; count a corpus or give a size")
    # The small slack keeps 0.7 * 10 (= 7.000000000000001 in floats of some shares) from asking for one token more.
    needed = math.ceil(share * total - 1e-9 * total)
    return int(torch.searchsorted(ranked_counts.cumsum(0), torch.tensor(needed))) + 1
