"""Repair the list of a token map, and describe the difference of two maps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from toolkit.pipeline.token_map import write_map_folder
from toolkit.targets.load import load_tokenizer
from toolkit.tokenmap.build import coverage, forced_ids_for
from toolkit.tokenmap.counts import Counts, load_counts
from toolkit.tokenmap.files import write_map_files
from toolkit.tokenmap.repair import problems_of, read_ids, repaired
from toolkit.tokenmap.token_map import TokenMap, TokenMapError

# So many ids of each map that the other lacks are shown.
SHOWN_IDS = 10


def repair_map(
    path: Path, tokenizer_name: str | None, vocab_size: int | None, out: Path, counts_path: Path | None
) -> tuple[list[str], TokenMap]:
    """Write the repaired map of a list to `out`; with counts, also what it covers. Returns the problems and the map.

    tokenizer_name: whose special ids the map must have; None: that of the counts.
    Raises `TokenMapError`, `TargetError`.
    """
    ids = read_ids(path)
    counts = None if counts_path is None else load_counts(counts_path)
    name = tokenizer_name or (counts.about["tokenizer"] if counts else None)
    if name is None:
        raise TokenMapError(f"the special ids that {path} must have are not known; give --tokenizer MODEL or --counts")
    tokenizer = load_tokenizer(name)
    size = counts.vocab_size if counts else vocab_size or len(tokenizer)
    forced = forced_ids_for(tokenizer, (), size)
    found = problems_of(ids, size, forced)
    token_map = repaired(ids, size, forced, None if counts is None else counts.total())
    if counts is None:
        write_map_files(out, token_map)
    else:
        write_map_folder(token_map, counts, out)
    return found, token_map


def describe_difference(a: Path, b: Path, tokenizer_name: str | None, counts_path: Path | None) -> str:
    """Return the sizes of two maps, what they share, and ids that only one has: the most frequent ones with counts.

    The text of ids comes from the named tokenizer, else from that of the counts. Raises `TokenMapError`.
    """
    counts = None if counts_path is None else load_counts(counts_path)
    name = tokenizer_name or (counts.about["tokenizer"] if counts else None)
    tokenizer = None if name is None else load_tokenizer(name)
    maps = {"A": read_ids(a), "B": read_ids(b)}
    lines = []
    for (letter, ids), path in zip(maps.items(), (a, b), strict=True):
        lines += [f"{letter}  {path}: {ids.numel():,} ids", *(f"   {one}" for one in problems_of(ids))]
    sets = {letter: set(ids.tolist()) for letter, ids in maps.items()}
    common = sets["A"] & sets["B"]
    alone = {letter: own - common for letter, own in sets.items()}
    lines.append(
        f"\nin both {len(common):,}; only in A {len(alone['A']):,}; only in B {len(alone['B']):,}"
        + ("; the maps are equal" if not alone["A"] and not alone["B"] else "")
    )
    if counts is not None:
        lines += _coverages(sets, counts)
    total = None if counts is None else counts.total()
    for letter, own in alone.items():
        lines += _only_in(letter, own, total, tokenizer)
    return "\n".join(lines)


def _coverages(sets: dict[str, set[int]], counts: Counts) -> Iterator[str]:
    for what, counted in (("counted", counts.total()), ("held-out", counts.held_out_counts())):
        if counted is not None:
            inside = {
                letter: torch.tensor([one for one in sorted(ids) if 0 <= one < counts.vocab_size], dtype=torch.int64)
                for letter, ids in sets.items()
            }
            shares = ", ".join(f"{letter} {100 * coverage(counted, ids):.2f} %" for letter, ids in inside.items())
            yield f"covered of {int(counted.sum()):,} {what} tokens: {shares}"


def _only_in(letter: str, ids: set[int], counts: torch.Tensor | None, tokenizer: Any) -> Iterator[str]:
    if not ids:
        return

    def count(one: int) -> int:
        return int(counts[one]) if counts is not None and 0 <= one < counts.numel() else 0

    shown = sorted(ids, key=lambda one: (-count(one), one))[:SHOWN_IDS]
    order = "the lowest ids" if counts is None else "the most frequent"
    yield f"\nonly in {letter}, {order} ({len(shown)} of {len(ids):,}):"
    for one in shown:
        number = "" if counts is None else f"  {count(one):>12,}"
        yield f"  {one:>8}{number}" + ("" if tokenizer is None else f"  {tokenizer.decode([one])!r}")
