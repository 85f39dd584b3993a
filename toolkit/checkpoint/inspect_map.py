"""A report on the file of a token map."""

from __future__ import annotations

from pathlib import Path

from toolkit.checkpoint.inspect_head import Report
from toolkit.targets.facts import target_facts
from toolkit.targets.load import load_tokenizer
from toolkit.tokenmap.build import forced_ids_for
from toolkit.tokenmap.repair import problems_of, read_ids
from toolkit.tokenmap.token_map import TokenMap, TokenMapError


def is_map_file(path: str) -> bool:
    """Whether a path is a file with a token map: a list, or d2t and t2d."""
    return Path(path).is_file() and Path(path).suffix in (".pt", ".safetensors")


def inspect_map(path: str, target: str | None = None) -> Report:
    """A report of the ids in a file; with a `target`, checked against its vocabulary and special ids.

    Raises `TokenMapError` for a file of another kind, `TargetError`.
    """
    ids = read_ids(path)
    report = Report(f"{path}: token map", compared=target is not None)
    report.rows = [("ids", f"{ids.numel():,}")]
    if ids.numel():
        report.rows.append(("range", f"{int(ids.min()):,} to {int(ids.max()):,}"))
    vocab_size = int(ids.max()) + 1 if ids.numel() else 1
    forced: tuple[int, ...] = ()
    if target is not None:
        vocab_size = target_facts(target).vocab_size
        forced = forced_ids_for(load_tokenizer(target), (), vocab_size)
        report.rows.append(("compared with", f"{target} ({vocab_size:,} ids)"))
    report.wrong = problems_of(ids, vocab_size, forced)
    try:
        TokenMap.from_ids(ids, vocab_size)
    except TokenMapError as error:
        report.usable = False
        report.wrong = report.wrong or [str(error)]
    if report.wrong:
        report.wrong.append("`toolkit build-token-map --repair` writes a map without these")
    return report
