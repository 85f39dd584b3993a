"""From timed answers to the rows of an engine record, and their table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from toolkit.bench.bootstrap import LEAST_GROUPS, ratio_interval
from toolkit.bench.near_tie import Divergence
from toolkit.bench.table import decimal, equal_text

REFERENCE = "ours-plain"
NULL = "ours-null"
DEFINITIONS = {
    "settings": "what the engine runs with: threads, dtype, compiled or eager, and what else it was told",
    "weight_bits": "bits per weight as the engine holds them, over all parameters of the target",
    "context": "tokens of the longest prompt and its answer",
    "tokens": "tokens written in `seconds`, over all repeats; the same number for every engine of a batch size",
    "seconds": "from the call with token ids to the whole answer: prefill and first token are in it",
    "speedup": "seconds of our plain decoding / seconds, same batch; 95 % bootstrap interval over groups of prompts, "
    f"null below {LEAST_GROUPS} groups; widened by `widened_by`",
    "widened_by": f"{NULL} is plain decoding beside a drafter that no request uses, so its speedup is 1. Where its own "
    "interval lies beside 1, all intervals of its batch are widened on both sides by that factor; null without such an "
    "interval",
    "accept_length": "tokens committed per verify step, bonus included; vllm and llama.cpp count truncated steps too",
    "decode_speedup": "without prefill on both sides, and against `over`, our plain row of the same settings; null for "
    "engines that do not tell prefill apart",
    "decode_speedup_per_accept_length": "the share of what was accepted that became speed",
    "parts": "draft, verify, commit: the rounds' own; prefill: what steps that read a prompt took beside their round; "
    "host: the rest of `seconds`",
    "host_share": "(commit + host) / (seconds - prefill); Python work inside draft and verify is not in it",
    "peak_memory_bytes": "largest resident size of the engine's process up to the end of this batch size",
    "tokens_equal": "all answers equal those of `equals`, our plain row of the same weights, or first part from them "
    "at a near-tie; null: no such row",
}
Judge = Callable[[str, int, Sequence[int], Sequence[int]], Divergence | None]
"""(which plain row, number of the prompt, its answer, another one) -> where they part."""


@dataclass(frozen=True)
class Run:
    """One group of prompts answered once. first: number of its first prompt. reply: the worker's."""

    engine: str
    batch: int
    repeat: int
    first: int
    reply: Mapping[str, Any]


@dataclass(frozen=True)
class Entrant:
    """What a row says of its engine before anything is timed.

    equals: our plain row of the same weights, None where there is none. over: our plain row of the same settings.
    """

    name: str
    shape: str | None
    equals: str | None
    over: str
    version: str | None
    weight_bits: float | None
    settings: str | None = None


def rows_of(
    entrants: Sequence[Entrant], runs: Sequence[Run], prompts: Sequence[Sequence[int]], max_tokens: int, judge: Judge
) -> list[dict[str, Any]]:
    """One row an engine and batch size, in the order of `entrants`. Runs of `REFERENCE` must be there."""
    rows = []
    for batch in sorted({run.batch for run in runs}):
        of = {one.name: [run for run in runs if (run.engine, run.batch) == (one.name, batch)] for one in entrants}
        for entrant in entrants:
            mine = of[entrant.name]
            if not mine:
                continue
            written = _answers(runs, entrant.equals)
            rows.append(
                {
                    "engine": entrant.name,
                    "version": entrant.version,
                    "settings": entrant.settings,
                    "weight_bits": entrant.weight_bits,
                    "shape": entrant.shape,
                    "batch": batch,
                    **_work(mine, prompts, max_tokens),
                    **_speed(mine, of[REFERENCE]),
                    **_decoding(mine, of.get(entrant.over, []), entrant.over),
                    "equals": entrant.equals,
                    **_equality(mine, entrant.equals, written, judge),
                }
            )
    return [row for batch in dict.fromkeys(row["batch"] for row in rows) for row in _widened(rows, batch)]


def _widened(rows: Sequence[dict[str, Any]], batch: int) -> list[dict[str, Any]]:
    """The rows of a batch size, their intervals as wide as the null control asks."""
    mine = [row for row in rows if row["batch"] == batch]
    low, high = next((row["interval"] for row in mine if row["engine"] == NULL), (None, None))
    factor = None if low is None else max(low, 1 / high, 1.0)
    for row in mine:
        row["widened_by"] = factor
        if factor is not None and row["engine"] != REFERENCE and row["interval"][0] is not None:
            row["interval"] = [row["interval"][0] / factor, row["interval"][1] * factor]
    return mine


def _answers(runs: Sequence[Run], engine: str | None) -> dict[int, list[int]]:
    """By number of the prompt: what that engine wrote first."""
    answers: dict[int, list[int]] = {}
    for run in runs:
        if run.engine == engine:
            for place, written in enumerate(run.reply["output_ids"], start=run.first):
                answers.setdefault(place, written)
    return answers


def _work(mine: Sequence[Run], prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
    once = [run for run in mine if run.repeat == 0]
    places = [run.first + i for run in once for i in range(len(run.reply["output_ids"]))]
    peaks = [run.reply["peak_memory_bytes"] for run in mine]
    return {
        "prompts": len(places),
        "repeats": 1 + max(run.repeat for run in mine),
        "context": max(len(prompts[place]) for place in places) + max_tokens,
        "tokens": sum(len(written) for run in mine for written in run.reply["output_ids"]),
        "peak_memory_bytes": None if None in peaks else max(peaks),
    }


def _speed(mine: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    seconds = sum(run.reply["seconds"] for run in mine)
    tokens = sum(len(written) for run in mine for written in run.reply["output_ids"])
    speedup = sum(run.reply["seconds"] for run in plain) / seconds
    interval = ratio_interval(_by_group(plain), _by_group(mine), least_units=LEAST_GROUPS)
    return {
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "speedup": speedup,
        "interval": [None, None] if interval is None else list(interval),
        **_parts(mine, seconds),
    }


def _decoding(mine: Sequence[Run], plain: Sequence[Run], over: str) -> dict[str, Any]:
    """Without prefill, against plain decoding of the same settings."""
    length, decode = _accept_length(mine), _decode_speedup(mine, plain)
    return {
        "accept_length": length,
        "over": over,
        "decode_speedup": decode,
        "decode_speedup_per_accept_length": None if length is None or decode is None else decode / length,
    }


def _by_group(runs: Sequence[Run]) -> list[float]:
    """Seconds of each group of prompts over its repeats, in the order of the prompts."""
    seconds: dict[int, float] = {}
    for run in runs:
        seconds[run.first] = seconds.get(run.first, 0.0) + run.reply["seconds"]
    return [seconds[first] for first in sorted(seconds)]


def _accept_length(mine: Sequence[Run]) -> float | None:
    steps = sum(run.reply.get("verify_steps", 0) for run in mine)
    return 1 + sum(run.reply["accepted"] for run in mine) / steps if steps else None


def _decode_speedup(mine: Sequence[Run], plain: Sequence[Run]) -> float | None:
    if "parts" not in mine[0].reply or not plain:
        return None
    ours, theirs = (sum(run.reply["seconds"] - run.reply["parts"]["prefill"] for run in runs) for runs in (mine, plain))
    return theirs / ours


def _parts(mine: Sequence[Run], seconds: float) -> dict[str, Any]:
    """Seconds by part, which sum up to `seconds`; none for an engine that does not tell them."""
    if "parts" not in mine[0].reply:
        return {"parts": {}, "host_share": None}
    parts = {name: sum(run.reply["parts"][name] for run in mine) for name in mine[0].reply["parts"]}
    parts["host"] = seconds - sum(parts.values())
    decoding = seconds - parts["prefill"]
    return {"parts": parts, "host_share": (parts["commit"] + parts["host"]) / decoding}


def _equality(
    mine: Sequence[Run], reference: str | None, written: Mapping[int, Sequence[int]], judge: Judge
) -> dict[str, Any]:
    if reference is None or not written:
        return dict.fromkeys(("tokens_equal", "identical", "near_ties", "unequal"))
    parted = [
        judge(reference, place, written[place], answer)
        for run in mine
        if run.repeat == 0
        for place, answer in enumerate(run.reply["output_ids"], start=run.first)
    ]
    near = [found.near_tie for found in parted if found is not None]
    found = {"tokens_equal": all(near), "identical": len(parted) - len(near)}
    return {**found, "near_ties": near.count(True), "unequal": near.count(False)}


def engine_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """The rows on the terminal, batch size by batch size, the fastest of each in bold."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("engine", no_wrap=True)
    for column in (
        "batch",
        "bits/weight",
        "tokens/s",
        "speedup [95 %]",
        "decode",
        "accept_length",
        "host",
        "MB",
        "tokens equal",
    ):
        table.add_column(column, justify="right")
    best = {row["batch"]: max(one["tokens_per_s"] for one in rows if one["batch"] == row["batch"]) for row in rows}
    for row in rows:
        low, high = row["interval"]
        peak, host = row["peak_memory_bytes"], row["host_share"]
        table.add_row(
            row["engine"] if row["shape"] is None else f"{row['engine']} {row['shape']}",
            str(row["batch"]),
            decimal(row["weight_bits"], 1),
            decimal(row["tokens_per_s"], 1),
            decimal(row["speedup"]) + ("" if low is None else f" [{low:.2f}, {high:.2f}]"),
            decimal(row["decode_speedup"]),
            decimal(row["accept_length"]),
            "-" if host is None else f"{100 * host:.1f} %",
            "-" if peak is None else f"{peak / 1e6:.0f}",
            equal_text({"answers": row["prompts"], **row}),  # only the first repeat is compared
            style="bold" if row["tokens_per_s"] == best[row["batch"]] else None,
        )
    return table
