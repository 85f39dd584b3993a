"""The token_map stage, maps of any corpora, the repair of a map's list, and the difference of two maps: which target
ids a draft vocabulary keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from toolkit.bench.report import coverage_figure
from toolkit.pipeline.run import ROLLOUTS, TOKEN_MAP, Run
from toolkit.pipeline.token_counts import count_corpora, count_rollouts
from toolkit.targets.facts import ServedTarget, served_target
from toolkit.targets.load import load_tokenizer
from toolkit.tokenmap.build import build_token_map, coverage, forced_ids_for, problems_of, repaired
from toolkit.tokenmap.counts import Counts, Part, load_counts, parse_corpora
from toolkit.tokenmap.files import read_ids, write_map_files, write_stage
from toolkit.tokenmap.token_map import TokenMap, TokenMapError
from toolkit.weights import atomic_write

SHOWN_IDS = 10  # of each map that the other lacks


def token_map_stage(run: Run) -> str:
    """The token map of a run. Returns a headline. Of the target it loads tokenizer and sizes, no weights."""
    chosen, wanted, folder = run.recipe.target, run.recipe.token_map, run.folder
    target = served_target(chosen.model, chosen.revision, (), chat_template=chosen.chat_template)
    return map_rollouts(target, folder / ROLLOUTS, (folder / TOKEN_MAP).parent, wanted.size, wanted.coverage)


def map_rollouts(target: ServedTarget, rollouts: Path, out: Path, size: int | None, share: float | None) -> str:
    """The map of a run: over the response tokens of the training split. Returns a headline."""
    vocab_size = target.facts.vocab_size
    parts = count_rollouts(rollouts, vocab_size)
    return write_map(_counts(parts, target.name, target.tokenizer, target.stop_ids, vocab_size), out, size, share)


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
    """The counts of corpora, each SPEC[:WEIGHT]. `datasets` caches texts and ids in `out`, which gets no map here.

    roles: whose turns are counted in conversations. vocab_size: rows of the target's output embedding; None: the
    tokenizer's size. Raises `TokenMapError`, `DataError`, `TargetError`.
    """
    tokenizer = load_tokenizer(tokenizer_name)
    size, cache = vocab_size or len(tokenizer), out / "counting"
    parts = count_corpora(parse_corpora(corpora), parse_corpora(held_out), tokenizer, roles, size, cache, num_proc)
    return _counts(parts, tokenizer_name, tokenizer, (), size)


def _counts(parts: Sequence[Part], name: str, tokenizer: Any, stop_ids: Iterable[int], vocab_size: int) -> Counts:
    forced = forced_ids_for(tokenizer, stop_ids, vocab_size)
    return Counts(tuple(parts), {"tokenizer": name, "vocab_size": vocab_size, "forced_ids": list(forced)})


def write_map(counts: Counts, out: Path, size: int | None, share: float | None) -> str:
    """Write the map that `size` or `share` (a coverage) asks for. Returns a headline. Raises `TokenMapError`."""
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


def repair_map(
    path: Path, tokenizer_name: str | None, out: Path, counts_path: Path | None
) -> tuple[list[str], TokenMap]:
    """Write the repaired map of a list to `out`; with counts, also what it covers. Returns the problems and the map.

    tokenizer_name: whose special ids the map must have; None: that of the counts.
    Raises `TokenMapError`, `TargetError`.
    """
    ids = read_ids(path)
    counts = None if counts_path is None else load_counts(counts_path)
    tokenizer = _tokenizer_of(tokenizer_name, counts)
    if tokenizer is None:
        raise TokenMapError(f"the special ids that {path} must have are not known; give --tokenizer MODEL or --counts")
    size = counts.vocab_size if counts else len(tokenizer)
    forced = forced_ids_for(tokenizer, (), size)
    token_map = repaired(ids, size, forced, None if counts is None else counts.total())
    if counts is None:
        write_map_files(out, token_map)
    else:
        write_map_folder(token_map, counts, out)
    return problems_of(ids, size, forced), token_map


def describe_difference(a: Path, b: Path, tokenizer_name: str | None, counts_path: Path | None) -> str:
    """Return the sizes of two maps, what they share, and ids that only one has: the most frequent ones with counts.

    The text of ids comes from the named tokenizer, else from that of the counts. Raises `TokenMapError`.
    """
    counts = None if counts_path is None else load_counts(counts_path)
    tokenizer = _tokenizer_of(tokenizer_name, counts)
    maps = {"A": read_ids(a), "B": read_ids(b)}
    lines = []
    for (letter, ids), path in zip(maps.items(), (a, b), strict=True):
        lines += [f"{letter}  {path}: {ids.numel():,} ids", *(f"   {one}" for one in problems_of(ids))]
    sets = {letter: set(ids.tolist()) for letter, ids in maps.items()}
    common = sets["A"] & sets["B"]
    alone = {letter: own - common for letter, own in sets.items()}
    equal = "" if alone["A"] or alone["B"] else "; the maps are equal"
    lines.append(f"\nin both {len(common):,}; only in A {len(alone['A']):,}; only in B {len(alone['B']):,}{equal}")
    often: dict[int, int] = {}
    if counts is not None:
        often = dict(enumerate(counts.total().tolist()))
        inside = {letter: ids[(ids >= 0) & (ids < counts.vocab_size)].unique() for letter, ids in maps.items()}
        for what, counted in (("counted", counts.total()), ("held-out", counts.total(held_out=True))):
            shares = ", ".join(f"{letter} {100 * coverage(counted, ids):.2f} %" for letter, ids in inside.items())
            lines += [f"covered of {int(counted.sum()):,} {what} tokens: {shares}"] if counted.any() else []
    for letter, own in alone.items():
        shown = sorted(own, key=lambda one: (-often.get(one, 0), one))[:SHOWN_IDS]
        lines += [f"\nonly in {letter} ({len(shown)} of {len(own):,}):"] if own else []
        for one in shown:
            number = f"  {often.get(one, 0):>12,}" if often else ""
            lines.append(f"  {one:>8}{number}" + ("" if tokenizer is None else f"  {tokenizer.decode([one])!r}"))
    return "\n".join(lines)


def _tokenizer_of(name: str | None, counts: Counts | None) -> Any:
    """The named tokenizer, else that of the counts, else None."""
    name = name or (counts.about["tokenizer"] if counts else None)
    return None if name is None else load_tokenizer(name)
