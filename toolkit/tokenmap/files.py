"""Token maps on disk: SGLang's list, d2t and t2d as other projects read them, and the folder of the token-map stage."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.tokenmap.build import coverage, coverage_table
from toolkit.tokenmap.counts import COUNTS, CorpusCounts, Counts, save_counts
from toolkit.tokenmap.token_map import TokenMap, TokenMapError, as_ids
from toolkit.weights import WeightsError, atomic_write, load_tensors, save_tensors, write_json

SMALLEST_ROW = 256


def save_freq_list(path: str | Path, token_map: TokenMap) -> None:
    """Write the ids as SGLang reads them (`--speculative-token-map`): `torch.save` of an ascending list of int."""
    with atomic_write(path) as temporary:
        torch.save(token_map.ids.tolist(), temporary)


def load_freq_list(path: str | Path, vocab_size: int) -> TokenMap:
    """Read a freq_N.pt: a list of int or a 1-D integer tensor, in any order.

    Raises `TokenMapError` for duplicates (the published FR-Spec builder writes them), ids out of range and other
    formats.
    """
    ids = read_freq_list(path)
    try:
        return TokenMap.from_ids(ids, vocab_size)
    except TokenMapError as error:
        raise TokenMapError(f"{path}: {error}") from error


def read_freq_list(path: str | Path) -> torch.Tensor:
    """Read the ids [D] int64 of a freq_N.pt as they are, duplicates too. Raises `TokenMapError` for other formats."""
    try:
        loaded = torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise TokenMapError(
            f"{path} cannot be read as a token map ({reason}); expected a file that torch.save wrote from a list of ids"
        ) from error
    if isinstance(loaded, list) and not all(type(token) is int for token in loaded):
        raise TokenMapError(f"{path} holds a list whose entries are not all integers; expected a plain list of ids")
    if not isinstance(loaded, (list, torch.Tensor)):
        raise TokenMapError(f"{path} holds a {type(loaded).__name__}; expected a plain list of ids")
    try:
        return as_ids(loaded)
    except TokenMapError as error:
        raise TokenMapError(f"{path}: {error}") from error


def save_token_map(path: str | Path, token_map: TokenMap) -> None:
    """Write `d2t` [D] int64 and `t2d` [V] bool as safetensors, as in EAGLE-3 checkpoints."""
    save_tensors(path, {"d2t": token_map.d2t, "t2d": token_map.t2d})


def load_token_map(path: str | Path) -> TokenMap:
    """Read a token_map.safetensors. Raises `TokenMapError` when a tensor is missing or d2t and t2d disagree."""
    try:
        tensors = load_tensors(path)
    except WeightsError as error:
        raise TokenMapError(str(error)) from error
    if set(tensors) != {"d2t", "t2d"}:
        raise TokenMapError(f"{path} holds {', '.join(sorted(tensors)) or 'no tensors'}; expected d2t and t2d")
    if tensors["t2d"].dtype != torch.bool or tensors["t2d"].dim() != 1:
        raise TokenMapError(
            f"{path}: t2d is {tensors['t2d'].dtype} of shape {tuple(tensors['t2d'].shape)}; expected bool [V]"
        )
    try:
        token_map = TokenMap.from_d2t(tensors["d2t"], tensors["t2d"].numel())
    except TokenMapError as error:
        raise TokenMapError(f"{path}: {error}") from error
    if not torch.equal(token_map.t2d, tensors["t2d"]):
        raise TokenMapError(f"{path}: d2t and t2d keep different ids; build the map again")
    return token_map


def write_stage(directory: str | Path, token_map: TokenMap, counts: Counts) -> dict[str, Any]:
    """Write the map's files, counts.safetensors and coverage.json; return the content of the last."""
    report = coverage_report(token_map, counts)
    write_map_files(directory, token_map)
    save_counts(Path(directory) / COUNTS, counts)
    write_json(Path(directory) / "coverage.json", report)
    return report


def write_map_files(directory: str | Path, token_map: TokenMap) -> None:
    """Write a map as each project reads it.

    freq_N.pt is SGLang's and vLLM's list; token_map.safetensors has d2t and t2d as in EAGLE-3 checkpoints; cache.pt is
    what EAGLE's trainer reads (and SpecForge's, under another name); d2t.npy and t2d.npy are speculators'.
    """
    directory = Path(directory)
    save_freq_list(directory / f"freq_{token_map.size}.pt", token_map)
    save_token_map(directory / "token_map.safetensors", token_map)
    with atomic_write(directory / "cache.pt") as temporary:
        torch.save({"d2t": token_map.d2t, "t2d": token_map.t2d}, temporary)
    for name in ("d2t", "t2d"):
        with atomic_write(directory / f"{name}.npy") as temporary, temporary.open("wb") as file:
            np.save(file, getattr(token_map, name).numpy())


def coverage_report(token_map: TokenMap, counts: Counts) -> dict[str, Any]:
    """Return what the map covers: of all counted text, of held-out text, of each corpus and each of its tasks.

    rows: {size, coverage, distinct} for powers of two and for the map's size, with held_out_coverage and by_corpus
    where there is held-out text, or more than one corpus. Held-out coverage bounds drafts on unseen text.
    """
    total, held_out = counts.total(), counts.held_out_counts()
    forced = counts.forced_ids
    ranked = {one.corpus.spec: one.ranked_counts() for one in counts.corpora if not one.held_out}
    powers = [1 << bits for bits in range(SMALLEST_ROW.bit_length() - 1, total.numel().bit_length())]
    sizes = [size for size in [*powers, token_map.size, total.numel()] if len(forced) <= size <= total.numel()]
    report = {
        "size": token_map.size,
        "vocab_size": token_map.vocab_size,
        "coverage": coverage(total, token_map.ids),
        "tokens": int(total.sum()),
        "distinct": int((total > 0).sum()),
        "sha256": token_map.sha256,
        "forced_ids": forced,
        "corpus": {"tokenizer": counts.about["tokenizer"], "corpora": [str(one.corpus) for one in counts.corpora]},
        "corpora": [_of_corpus(one, token_map) for one in counts.corpora],
        "rows": coverage_table(total, sizes, forced, held_out, ranked if len(ranked) > 1 else None),
    }
    if held_out is not None:
        report["held_out_coverage"] = coverage(held_out, token_map.ids)
        report["held_out_tokens"] = int(held_out.sum())
    return report


def _of_corpus(one: CorpusCounts, token_map: TokenMap) -> dict[str, Any]:
    shown = one.held_out_counts() if one.held_out else one.ranked_counts()
    entry = {
        "spec": one.corpus.spec,
        "weight": one.corpus.weight,
        "held_out": one.held_out,
        "documents": one.documents,
        **_covered(shown, token_map),
        "tasks": [{"task": task, **_covered(own, token_map)} for task, own in one.by_task().items()],
    }
    held_out = one.held_out_counts()
    if not one.held_out and held_out.any():
        entry["held_out_tokens"], entry["held_out_coverage"] = int(held_out.sum()), coverage(held_out, token_map.ids)
    return entry


def _covered(counts: torch.Tensor, token_map: TokenMap) -> dict[str, Any]:
    return {"tokens": int(counts.sum()), "coverage": coverage(counts, token_map.ids)}
