"""The token_map stage, and maps of any corpora: which target ids a draft vocabulary keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.bench.report import coverage_figure
from toolkit.pipeline.corpus_counts import count_corpora, count_here
from toolkit.pipeline.corpus_worker import ShardCounter
from toolkit.pipeline.run import ROLLOUTS, TOKEN_MAP, Run
from toolkit.targets.load import load_tokenizer
from toolkit.targets.target import Target
from toolkit.tokenmap.build import build_token_map, forced_ids_for
from toolkit.tokenmap.corpus import Corpus, parse_corpora
from toolkit.tokenmap.counts import Counts
from toolkit.tokenmap.files import write_stage
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import atomic_write


def token_map_stage(run: Run) -> str:
    """The token map of a run. Returns a headline."""
    wanted, folder = run.recipe.token_map, run.folder
    return map_rollouts(run.target, folder / ROLLOUTS, (folder / TOKEN_MAP).parent, wanted.size, wanted.coverage)


def map_rollouts(target: Target, rollouts: Path, out: Path, size: int | None, share: float | None) -> str:
    """The map of a run: over the response tokens of the training split. Returns a headline."""
    counter = ShardCounter(target.name, "", (), target.vocab_size)
    counted = count_here(Corpus(str(rollouts)), counter)
    forced = forced_ids_for(target.tokenizer, target.stop_ids, target.vocab_size)
    return write_map(Counts((counted,), _about(counter, forced)), out, size, share)


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
    """The counts of corpora, each SPEC[:WEIGHT]. What a killed call counted is kept in `out`, which gets no map here.

    roles: whose turns are counted in conversations. vocab_size: rows of the target's output embedding; None: the
    tokenizer's size. Raises `TokenMapError`, `DataError`, `TargetError`.
    """
    tokenizer = load_tokenizer(tokenizer_name)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = "" if backend is None else backend.to_str()
    counter = ShardCounter(tokenizer_name, text, tuple(roles), vocab_size or len(tokenizer))
    counted = count_corpora(parse_corpora(corpora), parse_corpora(held_out), counter, out, num_proc)
    forced = forced_ids_for(tokenizer, (), counter.vocab_size)
    return Counts(tuple(counted), _about(counter, forced))


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


def _about(counter: ShardCounter, forced_ids: Sequence[int]) -> dict[str, Any]:
    return {
        "tokenizer": counter.tokenizer,
        "roles": list(counter.roles),
        "vocab_size": counter.vocab_size,
        "forced_ids": list(forced_ids),
    }
