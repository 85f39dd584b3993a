"""Token maps on disk: SGLang's list, d2t and t2d as other projects read them, and the folder of the token-map stage."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.tokenmap.build import coverage, rank_ids
from toolkit.tokenmap.counts import COUNTS, Counts, Part, save_counts
from toolkit.tokenmap.token_map import TokenMap, TokenMapError, as_ids
from toolkit.weights import WeightsError, atomic_write, load_tensors, save_tensors, write_json

SMALLEST_ROW = 256
FILE_NAMES = ("token_map.safetensors", "model.safetensors")  # of a folder of ours, of a draft directory


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
        return as_ids(torch.load(path, weights_only=True))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise TokenMapError(
            f"{path} cannot be read as a token map ({reason}); expected a file that torch.save wrote from a list of ids"
        ) from error


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


def save_token_map(path: str | Path, token_map: TokenMap) -> None:
    """Write `d2t` [D] int64 and `t2d` [V] bool as safetensors, as in EAGLE-3 checkpoints."""
    save_tensors(path, {"d2t": token_map.d2t, "t2d": token_map.t2d})


def load_token_map(path: str | Path) -> TokenMap:
    """Read a token_map.safetensors. Raises `TokenMapError` when a tensor is missing or d2t and t2d disagree."""
    try:
        tensors = load_tensors(path)
        token_map = TokenMap.from_d2t(tensors["d2t"], tensors["t2d"].numel())
    except (WeightsError, TokenMapError, KeyError) as error:
        raise TokenMapError(f"{path} is no token map: {error}; expected the tensors d2t and t2d of one") from error
    if not torch.equal(token_map.t2d, tensors["t2d"].bool()):
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
    total, held_out, forced = counts.total(), counts.total(held_out=True), counts.forced_ids
    corpora: dict[tuple[str, bool], list[Part]] = {}
    for one in counts.parts:
        corpora.setdefault((one.spec, one.held_out), []).append(one)
    ranked = {spec: _sum(parts) for (spec, is_held_out), parts in corpora.items() if not is_held_out}
    order = rank_ids(total, forced)

    def row(size: int) -> dict[str, Any]:
        ids = order[:size]
        found: dict[str, Any] = {"size": size, "coverage": coverage(total, ids)}
        found["distinct"] = int((total[ids] > 0).sum())
        if held_out.any():
            found["held_out_coverage"] = coverage(held_out, ids)
        if len(ranked) > 1:
            found["by_corpus"] = {spec: coverage(one, ids) for spec, one in ranked.items()}
        return found

    powers = [1 << bits for bits in range(SMALLEST_ROW.bit_length() - 1, total.numel().bit_length())]
    sizes = {size for size in (*powers, token_map.size, total.numel()) if len(forced) <= size <= total.numel()}
    report = {
        "size": token_map.size,
        "vocab_size": token_map.vocab_size,
        "coverage": coverage(total, token_map.ids),
        "tokens": int(total.sum()),
        "distinct": int((total > 0).sum()),
        "sha256": token_map.sha256,
        "forced_ids": forced,
        "corpus": {"tokenizer": counts.about["tokenizer"], "corpora": list(ranked)},
        "corpora": [_of_corpus(parts, token_map) for parts in corpora.values()],
        "rows": [row(size) for size in sorted(sizes)],
    }
    if held_out.any():
        report["held_out_coverage"] = coverage(held_out, token_map.ids)
        report["held_out_tokens"] = int(held_out.sum())
    return report


def _of_corpus(parts: Sequence[Part], token_map: TokenMap) -> dict[str, Any]:
    tasks = [{"task": one.task, **_covered([one], token_map)} for one in parts if one.task]
    return {
        "spec": parts[0].spec,
        "weight": parts[0].weight,
        "held_out": parts[0].held_out,
        **_covered(parts, token_map),
        "tasks": sorted(tasks, key=lambda one: (-one["tokens"], one["task"])),
    }


def _covered(parts: Sequence[Part], token_map: TokenMap) -> dict[str, Any]:
    counts = _sum(parts)
    return {"tokens": int(counts.sum()), "coverage": coverage(counts, token_map.ids)}


def _sum(parts: Sequence[Part]) -> torch.Tensor:
    return torch.stack([one.counts for one in parts]).sum(0)
