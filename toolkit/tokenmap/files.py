"""Token maps on disk: SGLang's list file, the d2t/t2d tensors, and the output folder of the token-map stage."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.tokenmap.build import coverage, coverage_table
from toolkit.tokenmap.token_map import TokenMap, TokenMapError
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
        return TokenMap.from_ids(loaded, vocab_size)
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


def write_stage(
    directory: str | Path,
    token_map: TokenMap,
    counts: torch.Tensor,
    *,
    forced_ids: Sequence[int] = (),
    corpus: dict[str, Any] | None = None,
    held_out: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Write freq_N.pt, token_map.safetensors, counts.safetensors and coverage.json; return the content of the last.

    coverage.json holds rows {size, coverage, distinct} for powers of two and for the map's size, the map's coverage,
    the forced ids and `corpus`, a description of what was counted. `held_out` [V] holds counts of text that was not
    ranked; the rows and the map then have its share as held_out_coverage, an upper bound for drafts on unseen text.
    """
    directory = Path(directory)
    forced = sorted(set(forced_ids))
    powers = [1 << bits for bits in range(SMALLEST_ROW.bit_length() - 1, counts.numel().bit_length())]
    sizes = [size for size in [*powers, token_map.size, counts.numel()] if len(forced) <= size <= counts.numel()]
    report = {
        "size": token_map.size,
        "vocab_size": token_map.vocab_size,
        "coverage": coverage(counts, token_map.ids),
        "tokens": int(counts.sum()),
        "distinct": int((counts > 0).sum()),
        "sha256": token_map.sha256,
        "forced_ids": forced,
        "corpus": corpus or {},
        "rows": coverage_table(counts, sizes, forced, held_out),
    }
    if held_out is not None:
        report["held_out_coverage"] = coverage(held_out, token_map.ids)
        report["held_out_tokens"] = int(held_out.sum())
    save_freq_list(directory / f"freq_{token_map.size}.pt", token_map)
    save_token_map(directory / "token_map.safetensors", token_map)
    save_tensors(directory / "counts.safetensors", {"counts": counts})
    write_json(directory / "coverage.json", report)
    return report
