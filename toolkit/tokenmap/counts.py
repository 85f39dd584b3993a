"""Token counts, and the share of them that a smaller vocabulary covers. Shapes: V = target vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from toolkit.tokenmap.token_map import TokenMapError

CHUNK = 1 << 20


def count_tokens(sequences: Iterable[Sequence[int] | torch.Tensor], vocab_size: int) -> torch.Tensor:
    """Return counts [V] int64 of the ids in all sequences; memory does not grow with the corpus.

    Raises `TokenMapError` for an id outside [0, vocab_size), which means that another tokenizer wrote it.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    waiting: list[int] = []
    for sequence in sequences:
        waiting.extend(sequence.tolist() if isinstance(sequence, torch.Tensor) else sequence)
        if len(waiting) >= CHUNK:
            counts += _bincount(waiting, vocab_size)
            waiting = []
    return counts + _bincount(waiting, vocab_size)


def coverage(counts: torch.Tensor, ids: torch.Tensor) -> float:
    """Return the share of all counted tokens whose id is among `ids` (unique); 0.0 when nothing was counted."""
    total = int(counts.sum())
    return int(counts[ids].sum()) / total if total else 0.0


def coverage_table(
    counts: torch.Tensor,
    sizes: Iterable[int],
    forced_ids: Sequence[int] = (),
    held_out: torch.Tensor | None = None,
) -> list[dict[str, int | float]]:
    """Return one row per vocabulary size, ascending: the share covered, and how many of the kept ids occur.

    `held_out` [V]: counts of text that is not ranked; each row then has the share of it that is covered, too.
    Raises `TokenMapError` when a size is below the number of forced ids or above V.
    """
    order = rank_ids(counts, forced_ids)
    ranked = counts[order]
    covered = ranked.cumsum(0)
    occurring = (ranked > 0).cumsum(0)
    total = max(int(counts.sum()), 1)
    unseen = None if held_out is None else held_out[order].cumsum(0)
    rows: list[dict[str, int | float]] = []
    for size in sorted(set(sizes)):
        if not max(len(set(forced_ids)), 1) <= size <= counts.numel():
            raise TokenMapError(
                f"size is {size}; expected {max(len(set(forced_ids)), 1)} (forced ids) to {counts.numel()}"
            )
        rows.append({"size": size, "coverage": int(covered[size - 1]) / total, "distinct": int(occurring[size - 1])})
        if unseen is not None:
            rows[-1]["held_out_coverage"] = int(unseen[size - 1]) / max(int(unseen[-1]), 1)
    return rows


def rank_ids(counts: torch.Tensor, forced_ids: Sequence[int] = ()) -> torch.Tensor:
    """Return all ids [V]: forced ids first, then by descending count, ties by ascending id.

    Any prefix that holds the forced ids is a draft vocabulary.
    """
    _check_counts(counts)
    forced = torch.tensor(sorted(set(forced_ids)), dtype=torch.int64)
    if forced.numel() and (forced[0] < 0 or forced[-1] >= counts.numel()):
        raise TokenMapError(f"forced ids {forced.tolist()} are not all in the target vocabulary [0, {counts.numel()})")
    by_count = torch.sort(counts, descending=True, stable=True).indices
    is_forced = torch.zeros(counts.numel(), dtype=torch.bool)
    is_forced[forced] = True
    return torch.cat([forced, by_count[~is_forced[by_count]]])


def _check_counts(counts: torch.Tensor) -> None:
    if counts.dim() != 1 or counts.is_floating_point() or counts.numel() == 0:
        raise TokenMapError(
            f"counts are {counts.dtype} of shape {tuple(counts.shape)}; expected integers of shape [vocab]"
        )
    if (counts < 0).any():
        raise TokenMapError("counts are negative for some ids; expected how often each id occurs")


def _bincount(ids: list[int], vocab_size: int) -> torch.Tensor:
    tensor = torch.tensor(ids, dtype=torch.int64)
    if tensor.numel() and (int(tensor.min()) < 0 or int(tensor.max()) >= vocab_size):
        raise TokenMapError(
            f"ids range from {int(tensor.min())} to {int(tensor.max())}, but the target's vocabulary is "
            f"[0, {vocab_size}); count with the target's own tokenizer"
        )
    return torch.bincount(tensor, minlength=vocab_size)
