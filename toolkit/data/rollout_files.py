"""The files of a rollouts stage: the rows of earlier runs, and the statistics of all rows."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.data.conversations import Conversation
from toolkit.data.generation import UNANSWERED
from toolkit.jsonl import DataError, cut_torn_line, read_rows
from toolkit.log import get_logger
from toolkit.weights import atomic_write, read_json, write_json

logger = get_logger(__name__)

REMEDY = "write to another file, or move this one away"


@dataclass(frozen=True)
class RolloutPaths:
    """The three files of a stage, named after the first: x.jsonl, x_skipped.jsonl, x_stats.json."""

    rows: Path

    @property
    def skipped(self) -> Path:
        return self.rows.with_name(f"{self.rows.stem}_skipped.jsonl")

    @property
    def stats(self) -> Path:
        return self.rows.with_name(f"{self.rows.stem}_stats.json")


def held_out_ids(ids: Iterable[str], share: float) -> frozenset[str]:
    """Return the ids that are held out from training: those whose hash, in [0, 1), is below `share`.

    The choice of an id does not depend on the other ids. If the hashes of two or more ids select none, the id with the
    smallest hash is held out, so that training on few prompts can still forecast. A share of 0 holds out none.
    """
    draws = {one: int.from_bytes(hashlib.sha256(f"split {one}".encode()).digest()[:8], "big") / 2**64 for one in ids}
    found = frozenset(one for one, draw in draws.items() if draw < share)
    if found or share == 0 or len(draws) < 2:
        return found
    return frozenset([min(draws, key=lambda one: draws[one])])


def split_name(identity: str, held_out: Collection[str]) -> str:
    """Return the value of `split` in a row."""
    return "held_out" if identity in held_out else "train"


@dataclass
class Tally:
    """Counts over all rows, including earlier runs; `written_tokens` and `seconds` count this run only."""

    counts: Counter[str] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    shortened: Counter[str] = field(default_factory=Counter)
    written_tokens: int = 0
    seconds: float = 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one row of the rollouts file."""
        turns = sum(message["role"] == "assistant" for message in row["messages"])
        self.counts["rollouts"] += 1
        self.counts["turns"] += turns
        self.counts["unmarked_turns"] += turns - len(row["response_spans"])
        self.counts["tokens"] += len(row["input_ids"])
        self.counts["response_tokens"] += sum(end - start for start, end in row["response_spans"])
        self.splits[row["split"]] += 1
        self.finish_reasons[row["finish_reason"]] += 1
        if "shortened" in row:
            self.shortened[row["shortened"]] += 1

    @property
    def ended(self) -> int:
        """Finished conversations, including skipped ones."""
        return self.counts["rollouts"] + self.skipped.total()


def read_finished(
    paths: RolloutPaths,
    asked: Callable[[str], Conversation | None],
    held_out: Collection[str],
    provenance: Callable[[str], Mapping[str, Any]],
) -> tuple[set[str], Tally]:
    """Return the ids finished in earlier runs, and their tally; an incomplete last line is removed.

    Conversations that a server left UNANSWERED are not finished: another may answer them. `asked` maps an id to its
    prompt (None: unknown id), `provenance` to its settings. Raises `DataError` for a row of other prompts or settings,
    since the file would mix two sets of rollouts.
    """
    done: set[str] = set()
    tally = Tally()
    for path in (paths.rows, paths.skipped):
        if cut_torn_line(path):
            logger.warning(f"{path}: removed an incomplete last line")
        if path == paths.skipped:
            drop_unanswered(path, "reason")
        for number, row in read_rows(path) if path.exists() else ():
            where = f"{path}:{number}"
            one = asked(row.get("id", ""))
            if one is None or row["id"] in done:
                raise DataError(f"{where}: id {row.get('id')!r} is not among the prompts, or is repeated; {REMEDY}")
            done.add(row["id"])
            if path == paths.skipped:
                tally.skipped[row["reason"]] += 1
                continue
            wanted = {"deterministic": None, **provenance(row["id"]), "split": split_name(row["id"], held_out)}
            _check_row(row, where, wanted, one)
            tally.add(row)
    return done, tally


def drop_unanswered(path: Path, key: str) -> None:
    """Remove the rows whose `key` is among UNANSWERED, atomically: their requests are asked again."""
    rows = [row for _, row in read_rows(path)] if path.exists() else []
    kept = [row for row in rows if row[key] not in UNANSWERED]
    if len(kept) == len(rows):
        return
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as handle:
        handle.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
    logger.info(f"{path}: {len(rows) - len(kept)} with {key} {' or '.join(UNANSWERED)} are asked again")


def _check_row(row: Mapping[str, Any], where: str, wanted: Mapping[str, Any], asked: Conversation) -> None:
    found = {**row["provenance"], "split": row["split"]}
    differs = [
        f"{key} was {found.get(key)!r}, now {value!r}" for key, value in wanted.items() if found.get(key) != value
    ]
    if differs:
        raise DataError(f"{where}: written with other settings ({'; '.join(differs)}); {REMEDY}")
    before = [message for message in row["messages"] if message["role"] != "assistant"]
    if before != list(asked.messages)[: len(before)]:
        raise DataError(f"{where}: {row['id']!r} answers other user messages than the prompts have now; {REMEDY}")


def write_stats(
    paths: RolloutPaths,
    tally: Tally,
    total: int,
    provenance: Mapping[str, Any],
    held_out: float,
    *,
    may_be_empty: bool = False,
) -> dict[str, Any]:
    """Write and return the statistics; warn about skipped rollouts. Raises `DataError` when no row was written."""
    rollouts = tally.counts["rollouts"]
    if not rollouts and not may_be_empty:
        raise DataError(
            f"none of {total} conversations became a rollout (skipped: {dict(tally.skipped) or 'none'}); "
            "give shorter prompts, another target, or servers that return token ids (no_round_trip) or have room for "
            "these prompts (refused)"
        )
    if tally.skipped or tally.shortened:
        logger.warning(
            f"{paths.rows}: of {total} conversations {tally.skipped.total()} were skipped {dict(tally.skipped)}, "
            f"{tally.shortened.total()} shortened {dict(tally.shortened)}"
        )
    if held_out > 0 and not tally.splits["held_out"]:
        logger.warning(f"{paths.rows}: none of {rollouts} rollouts is held out at a share of {held_out}")
    last_run = {
        "tokens": tally.written_tokens,
        "seconds": round(tally.seconds, 3),
        "tokens_per_s": round(tally.written_tokens / tally.seconds, 3) if tally.seconds > 0 else None,
    }
    if not tally.written_tokens and paths.stats.exists():
        last_run = read_json(paths.stats)["last_run"]
    stats = {
        "conversations": total,
        **{name: tally.counts[name] for name in ("rollouts", "turns", "unmarked_turns", "tokens", "response_tokens")},
        "splits": {name: tally.splits[name] for name in ("train", "held_out")},
        "finish_reasons": {name: tally.finish_reasons[name] for name in ("stop", "length")},
        "skipped": dict(tally.skipped),
        "shortened": dict(tally.shortened),
        "last_run": last_run,
        "provenance": dict(provenance),
    }
    write_json(paths.stats, stats)
    return stats
