"""The token_map stage: which target ids a draft vocabulary keeps, counted over rollouts or any text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from toolkit.pipeline.run import ROLLOUTS, TOKEN_MAP, Run
from toolkit.targets.load import load_tokenizer
from toolkit.targets.target import Target
from toolkit.tokenmap.build import build_token_map, count_tokens, forced_ids_for
from toolkit.tokenmap.corpus import corpus_ids, rollout_responses
from toolkit.tokenmap.files import write_stage


def token_map_stage(run: Run) -> str:
    """The token map of a run. Returns a headline."""
    wanted, folder = run.recipe.token_map, run.folder
    return map_rollouts(run.target, folder / ROLLOUTS, (folder / TOKEN_MAP).parent, wanted.size, wanted.coverage)


def map_rollouts(target: Target, rollouts: Path, out: Path, size: int | None, coverage: float | None) -> str:
    """The map of a run: over the response tokens of the training split. Returns a headline."""
    return _build(
        rollout_responses(rollouts),
        target.tokenizer,
        target.vocab_size,
        target.stop_ids,
        out,
        size,
        coverage,
        {"rollouts": rollouts.name, "split": "train"},
        held_out=rollout_responses(rollouts, split="held_out"),
    )


def map_corpus(
    tokenizer_name: str,
    out: Path,
    size: int | None,
    coverage: float | None,
    *,
    rollouts: Path | None = None,
    text: Sequence[str] = (),
    roles: Sequence[str] = (),
    vocab_size: int | None = None,
) -> str:
    """The map of any corpus: the response tokens of all `rollouts`, else the files `text`. Returns a headline.

    roles: whose turns are counted in files of conversations. vocab_size: rows of the target's output embedding; None:
    the tokenizer's size.
    """
    tokenizer = load_tokenizer(tokenizer_name)
    if rollouts is not None:
        sequences: Iterable[Sequence[int]] = rollout_responses(rollouts, split=None)
        corpus: dict[str, Any] = {"rollouts": str(rollouts), "split": None}
    else:
        sequences = corpus_ids(text, lambda one: tokenizer(one, add_special_tokens=False)["input_ids"], roles=roles)
        corpus = {"text": text, "roles": roles}
    corpus["tokenizer"] = tokenizer_name
    return _build(sequences, tokenizer, vocab_size or len(tokenizer), (), out, size, coverage, corpus)


def _build(
    sequences: Iterable[Sequence[int]],
    tokenizer: Any,
    vocab_size: int,
    stop_ids: Iterable[int],
    out: Path,
    size: int | None,
    coverage: float | None,
    corpus: dict[str, Any],
    held_out: Iterable[Sequence[int]] | None = None,
) -> str:
    counts = count_tokens(sequences, vocab_size)
    forced = forced_ids_for(tokenizer, stop_ids, vocab_size)
    # A vocabulary smaller than the size asked for is kept whole.
    wanted = None if size is None else min(size, vocab_size)
    token_map = build_token_map(counts, size=wanted, coverage=coverage, forced_ids=forced)
    unseen = None if held_out is None else count_tokens(held_out, vocab_size)
    report = write_stage(out, token_map, counts, forced_ids=forced, corpus=corpus, held_out=unseen)
    covered = f"{100 * report['coverage']:.1f} % of {report['tokens']} tokens"
    headline = f"{report['size']} of {vocab_size} ids cover {covered}"
    if unseen is None or not report["held_out_tokens"]:
        return headline
    return f"{headline}, {100 * report['held_out_coverage']:.1f} % of {report['held_out_tokens']} held out"
