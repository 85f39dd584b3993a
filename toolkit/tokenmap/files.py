"""Token maps on disk: SGLang's list file, our tensors, and the folder a token-map stage leaves behind."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.tokenmap.counts import coverage, coverage_table
from toolkit.tokenmap.token_map import TokenMap, TokenMapError
from toolkit.weights import WeightsError, atomic_write, load_tensors, save_tensors, write_json

SMALLEST_ROW = 256


def save_freq_list(path: str | Path, token_map: TokenMap) -> None:
    """Write the ids as SGLang reads them (`--speculative-token-map`): torch.save of a plain ascending list of int."""
    with atomic_write(path) as temporary:
        torch.save(token_map.ids.tolist(), temporary)


def load_freq_list(path: str | Path, vocab_size: int) -> TokenMap:
    """Read a freq_N.pt (list of int or 1-D integer tensor, any order).

    Raises `TokenMapError` on duplicates (the published FR-Spec builder writes them), ids out of range, other formats.
    """
    try:
        loaded = torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise TokenMapError(
            f"{path} cannot be read as a token map ({reason}); a torch.save of a plain list of ids is needed"
        ) from error
    if isinstance(loaded, list) and not all(type(token) is int for token in loaded):
        raise TokenMapError(f"{path} holds a list of other things than whole numbers; a plain list of ids is needed")
    if not isinstance(loaded, (list, torch.Tensor)):
        raise TokenMapError(f"{path} holds a {type(loaded).__name__}; a plain list of ids is needed")
    try:
        return TokenMap.from_ids(loaded, vocab_size)
    except TokenMapError as error:
        raise TokenMapError(f"{path}: {error}") from error


def save_token_map(path: str | Path, token_map: TokenMap) -> None:
    """Write `d2t` [D] int64 and `t2d` [V] bool as safetensors, the pair EAGLE-3 checkpoints carry."""
    save_tensors(path, {"d2t": token_map.d2t, "t2d": token_map.t2d})


def load_token_map(path: str | Path) -> TokenMap:
    """Read a token_map.safetensors. Raises `TokenMapError` when a tensor is absent or d2t and t2d disagree."""
    try:
        tensors = load_tensors(path)
    except WeightsError as error:
        raise TokenMapError(str(error)) from error
    if set(tensors) != {"d2t", "t2d"}:
        raise TokenMapError(f"{path} holds {', '.join(sorted(tensors)) or 'nothing'}; d2t and t2d are needed")
    if tensors["t2d"].dtype != torch.bool or tensors["t2d"].dim() != 1:
        raise TokenMapError(
            f"{path}: t2d came as {tensors['t2d'].dtype} {tuple(tensors['t2d'].shape)}; bool [V] is needed"
        )
    try:
        token_map = TokenMap.from_d2t(tensors["d2t"], tensors["t2d"].numel())
    except TokenMapError as error:
        raise TokenMapError(f"{path}: {error}") from error
    if not torch.equal(token_map.t2d, tensors["t2d"]):
        raise TokenMapError(f"{path}: d2t and t2d name different ids; build the map again")
    return token_map


def load_counts(path: str | Path) -> torch.Tensor:
    """Counts [V] int64 of a counts.safetensors."""
    tensors = load_tensors(path)
    if set(tensors) != {"counts"}:
        raise TokenMapError(f"{path} holds {', '.join(sorted(tensors)) or 'nothing'}; counts is needed")
    return tensors["counts"]


def write_stage(
    directory: str | Path,
    token_map: TokenMap,
    counts: torch.Tensor,
    *,
    forced_ids: Sequence[int] = (),
    corpus: dict[str, Any] | None = None,
    held_out: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Write freq_N.pt, token_map.safetensors, counts.safetensors and coverage.json; give the last one's content back.

    coverage.json holds rows {size, coverage, distinct} at powers of two and at the map's size, the map's own coverage,
    the forced ids and `corpus`, a description of what was counted. With `held_out` [V], counts of text that was not
    ranked, rows and map also say how much of that they cover (held_out_coverage): what a draft can hope for.
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
