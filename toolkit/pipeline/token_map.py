"""The token_map stage, maps of any corpora, the repair of a map's list, and the difference of two maps: which target
ids a draft vocabulary keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.bench.report import coverage_figure
from toolkit.pipeline.run import ROLLOUTS, TOKEN_MAP, Run
from toolkit.pipeline.token_counts import count_corpora, count_rollouts
from toolkit.targets.facts import ServedTarget, served_target
from toolkit.targets.load import load_tokenizer
from toolkit.tokenmap.build import build_token_map, coverage, forced_ids_for
from toolkit.tokenmap.counts import Counts, load_counts, parse_corpora
from toolkit.tokenmap.files import write_map_files, write_stage
from toolkit.tokenmap.repair import problems_of, read_ids, repaired
from toolkit.tokenmap.token_map import TokenMap, TokenMapError
from toolkit.weights import atomic_write

# So many ids of each map that the other lacks are shown.
SHOWN_IDS = 10


def token_map_stage(run: Run) -> str:
    """The token map of a run. Returns a headline. Of the target it loads tokenizer and sizes, no weights."""
    chosen, wanted, folder = run.recipe.target, run.recipe.token_map, run.folder
    target = served_target(chosen.model, chosen.revision, (), chat_template=chosen.chat_template)
    return map_rollouts(target, folder / ROLLOUTS, (folder / TOKEN_MAP).parent, wanted.size, wanted.coverage)


def map_rollouts(target: ServedTarget, rollouts: Path, out: Path, size: int | None, share: float | None) -> str:
    """The map of a run: over the response tokens of the training split. Returns a headline."""
    vocab_size = target.facts.vocab_size
    forced = forced_ids_for(target.tokenizer, target.stop_ids, vocab_size)
    about = _about(target.name, (), vocab_size, forced)
    return write_map(Counts((count_rollouts(rollouts, vocab_size),), about), out, size, share)


def counts_of(
    corpora: Sequence[str],
    held_out: Sequence[str],
    tokenizer_name: str,
    out: Path,
    *,
    roles: Sequence[str],
    vocab_size: int | None,
    num_proc: int,
) -> Counts:
    """The counts of corpora, each SPEC[:WEIGHT]. `datasets` caches texts and counts in `out`, which gets no map here.

    roles: whose turns are counted in conversations. vocab_size: rows of the target's output embedding; None: the
    tokenizer's size. Raises `TokenMapError`, `DataError`, `TargetError`.
    """
    tokenizer = load_tokenizer(tokenizer_name)
    size, cache = vocab_size or len(tokenizer), out / "counting"
    counted = count_corpora(parse_corpora(corpora), parse_corpora(held_out), tokenizer, roles, size, cache, num_proc)
    return Counts(counted, _about(tokenizer_name, roles, size, forced_ids_for(tokenizer, (), size)))


def write_map(counts: Counts, out: Path, size: int | None, share: float | None) -> str:
    """Write the map that `size` or `share` (a coverage) asks for, or of all ids. Returns a headline.

    Raises `TokenMapError`."""
    if size is None and share is None:
        size = counts.vocab_size
    # A vocabulary smaller than the size asked for is kept whole.
    wanted = None if size is None else min(size, counts.vocab_size)
    token_map = build_token_map(counts.total(), size=wanted, coverage=share, forced_ids=counts.forced_ids)
    return write_map_folder(token_map, counts, out)


def write_map_folder(token_map: TokenMap, counts: Counts, out: Path) -> str:
    """Write a map in all forms, its counts, and what it covers, as numbers and as a picture. Returns a headline."""
    report = write_stage(out, token_map, counts)
    with atomic_write(out / "coverage.svg") as temporary:
        temporary.write_text(coverage_figure(report), encoding="utf-8")
    covered = f"{100 * report['coverage']:.1f} % of {report['tokens']} tokens"
    headline = f"{report['size']} of {counts.vocab_size} ids cover {covered}"
    if "held_out_tokens" not in report:
        return headline
    return f"{headline}, {100 * report['held_out_coverage']:.1f} % of {report['held_out_tokens']} held out"


def _about(tokenizer: str, roles: Sequence[str], vocab_size: int, forced_ids: Sequence[int]) -> dict[str, Any]:
    return {"tokenizer": tokenizer, "roles": list(roles), "vocab_size": vocab_size, "forced_ids": list(forced_ids)}


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
