"""Two acceptance records side by side: the differences of accept_length and of speed, paired by prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from toolkit.bench.bootstrap import LEAST_GROUPS, RESAMPLES, resampled_interval
from toolkit.bench.records import RecordError, read_record
from toolkit.bench.rows import ALL
from toolkit.bench.table import (
    ENOUGH_STEPS,
    NONE,
    decimal,
    fixed_name,
    forced_text,
    mode_name,
    new_table,
    prompts_phrase,
    shape_name,
    times,
    wide_console,
)
from toolkit.infer.request.draft_tree import ADAPTIVE, PLAIN

Record = dict[str, Any]
Units = list[tuple[float, ...]]
TARGET = ("name", "revision", "fingerprint", "dtype", "quantization")
SAME = ("max_tokens", "temperature", "seed", "forced_accept_length", "forced_accept_rate")
INTERVALS = (
    f"Intervals: paired bootstrap over prompts, all turns of a prompt together, {RESAMPLES} resamples; of speeds over "
    f"at least {LEAST_GROUPS} groups of prompts that were decoded together."
)
SHOWN = ("verify", "deterministic", "torch_compile", "token_map")  # settings that may differ and are then shown
MACHINE = ("cpu", "cpu_flags", "cores", "torch_threads", "gpus")


def compare_records(first: str | Path, second: str | Path, console: Console | None = None) -> None:
    """Print accept_length and speed of the settings that both records measured, with intervals of the differences.

    Raises `RecordError` for records of other prompts, another target or other settings of the answers, for records
    without data by prompt and for those without a common setting; `WeightsError`, FileNotFoundError.
    """
    a, b = (read_record(path, "acceptance") for path in (first, second))
    _check_comparable(a, b, first, second)
    console = console or wide_console()
    settings = a["settings"]
    title = (
        f"{a['target']['name']} ({a['target']['dtype']}), {prompts_phrase(a)}, answers of at most "
        f"{settings['max_tokens']} tokens, temperature {settings['temperature']:g}{forced_text(a, ', ')}"
    )
    console.print(Text(title, style="bold"))
    for name, path, record in (("A", first, a), ("B", second, b)):
        head = (record.get("draft") or {}).get("path") or "no head"
        console.print(Text(f"{name}: {path} ({head}, {record['date'][:10]}, commit {str(record['commit'])[:7]})"))
    untimed = _differing(MACHINE, a["hardware"], b["hardware"]) + _differing(["batch"], settings, b["settings"])
    lengths = new_table("accept_length,\nby draft", ("verify\nsteps A", "\nB", "\nA", "\nB", "\nB - A [95 %]"))
    speeds = new_table("speed,\nby draft", ("tokens/s\nA", "\nB", "speedup\nA", "\nB", "\nB / A [95 %]"))
    for name, rows in _pairs(a, b).items():
        steps = [str(row["verify_steps"]) for row in rows]
        lengths.add_row(name, *steps, *(decimal(row["accept_length"]) for row in rows), _difference(*rows, a, b))
        found = [decimal(row["tokens_per_s"], 1) for row in rows] + [times(row["speedup"]) for row in rows]
        speeds.add_row(name, *found, _speed_ratio(*rows, a, b))
    console.print(lengths)
    if not untimed:
        console.print(speeds)
    others = _differing(SHOWN, settings, b["settings"]) + _differing(
        sorted(a["versions"]), a["versions"], b["versions"]
    )
    for line in (
        *_left_out(a, b),
        f"Speeds are not compared, since they differ in {'; '.join(untimed)}." if untimed else "",
        f"They also differ in {'; '.join(others)}." if others else "",
        INTERVALS,
    ):
        if line:
            console.print(Text(line))


def _check_comparable(a: Record, b: Record, first: str | Path, second: str | Path) -> None:
    """Raise `RecordError` with everything that differs, if the two records cannot be compared."""
    for record, name in ((a, first), (b, second)):
        if "answers" not in record or "times" not in record:
            raise RecordError(f"{name} has no data by prompt, which a comparison needs; measure again")
    different = [f"target {one}" for one in _differing(TARGET, a["target"], b["target"])]
    different += _differing(SAME, a["settings"], b["settings"])
    if a["settings"]["prompts_sha256"] != b["settings"]["prompts_sha256"]:
        different.append(f"prompts {prompts_phrase(a)} and {prompts_phrase(b)}, not the same texts")
    if different:
        raise RecordError(
            f"{first} and {second} cannot be compared, since they differ in {'; '.join(different)}: measure both "
            "with the same target, prompts and settings"
        )
    if not _pairs(a, b):
        raise RecordError(f"{first} and {second} have no draft shape in common: {'; '.join(_left_out(a, b))}")


def _differing(names: Iterable[str], ours: Record, theirs: Record) -> list[str]:
    """Return "name X and Y" for each of the values that differ."""
    different = (name for name in names if ours.get(name) != theirs.get(name))
    return [f"{name} {_value(ours.get(name))} and {_value(theirs.get(name))}" for name in different]


def _value(value: Any) -> str:
    return "none" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _settings_of(record: Record) -> dict[str, Record]:
    """Return the rows over all prompts by name. Adaptive drafting with another limit has another name."""
    rows = [row for row in record["rows"] if row["task"] == ALL]
    return {
        f"{mode_name(row)} up to {fixed_name(row)}" if row["shape"] == ADAPTIVE else shape_name(row): row
        for row in rows
    }


def _pairs(a: Record, b: Record) -> dict[str, tuple[Record, Record]]:
    ours, theirs = _settings_of(a), _settings_of(b)
    return {name: (row, theirs[name]) for name, row in ours.items() if name in theirs}


def _left_out(a: Record, b: Record) -> list[str]:
    ours, theirs = _settings_of(a), _settings_of(b)
    sides = (("A", ours.keys() - theirs.keys()), ("B", theirs.keys() - ours.keys()))
    return [f"Only {which} has {', '.join(sorted(names))}." for which, names in sides if names]


def _difference(ours: Record, theirs: Record, a: Record, b: Record) -> str:
    """Return the difference of accept_length, with its interval if both have enough verify steps."""
    if ours["accept_length"] is None or theirs["accept_length"] is None:
        return NONE
    difference = f"{theirs['accept_length'] - ours['accept_length']:+.2f}"
    units = paired(*(_counts_by_prompt(record, mode_name(ours)) for record in (a, b)))
    if min(ours["verify_steps"], theirs["verify_steps"]) < ENOUGH_STEPS or len(units) < 2:
        return difference
    low, high = resampled_interval(
        units, lambda steps_a, tokens_a, steps_b, tokens_b: tokens_b / steps_b - tokens_a / steps_a
    )
    return f"{difference} [{low:+.2f}, {high:+.2f}]"


def _speed_ratio(ours: Record, theirs: Record, a: Record, b: Record) -> str:
    """Return the ratio of the speedups over plain decoding, with its interval if there are enough groups."""
    if ours["speedup"] is None or theirs["speedup"] is None:
        return NONE
    ratio = f"{theirs['speedup'] / ours['speedup']:.2f}x"
    units = paired(*(_times_by_group(record, mode) for record in (a, b) for mode in (mode_name(ours), PLAIN)))
    if len(units) < LEAST_GROUPS:
        return ratio
    low, high = resampled_interval(units, _speedup_ratio)
    return f"{ratio} [{low:.2f}, {high:.2f}]"


def _speedup_ratio(*sums: Any) -> Any:
    """Return the speedup of B over that of A. sums: seconds and tokens of drafting and of plain decoding in A, then in
    B."""
    a, plain_a, b, plain_b = (sums[at + 1] / sums[at] for at in range(0, 8, 2))
    return b / plain_b / (a / plain_a)


def paired(*sides: Mapping[Any, tuple[float, float]]) -> Units:
    """Return the numbers of all sides for each unit whose first number is positive in all of them."""
    units = [unit for unit in sides[0] if all(side.get(unit, (0, 0))[0] > 0 for side in sides)]
    return [tuple(number for side in sides for number in side[unit]) for unit in units]


def _counts_by_prompt(record: Record, mode: str) -> dict[str, tuple[float, float]]:
    """Return counted verify steps and their committed tokens by question_id."""
    return _sums(record["answers"], mode, lambda one: (
        one["question_id"], one["verify_steps"], one["verify_steps"] + one["accepted"]
    ))  # fmt: skip


def _times_by_group(record: Record, mode: str) -> dict[tuple[str, ...], tuple[float, float]]:
    """Return decode seconds and decode tokens by group of prompts."""
    return _sums(record["times"], mode, lambda one: (tuple(one["question_ids"]), one["decode_s"], one["decode_tokens"]))


def _sums(
    entries: Iterable[Record], mode: str, read: Callable[[Record], tuple[Any, float, float]]
) -> dict[Any, tuple[float, float]]:
    found: dict[Any, tuple[float, float]] = {}
    for entry in entries:
        if entry["shape"] == mode:
            unit, first, second = read(entry)
            before = found.get(unit, (0, 0))
            found[unit] = (before[0] + first, before[1] + second)
    return found
