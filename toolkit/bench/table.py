"""Print the tables of a measurement on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolkit.bench.answers import ADAPTIVE
from toolkit.bench.prompts import BUILTIN
from toolkit.bench.rows import ALL, best_row

WIDTH_WITHOUT_TERMINAL = 118
NONE = "-"
BEST = " (best)"  # by speed; as text, since bold is lost without a terminal


def print_acceptance(record: dict[str, Any], console: Console | None = None) -> None:
    """Print one row per shape, then the tasks of the best shape; plain text of a fixed width without a terminal."""
    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDTH_WITHOUT_TERMINAL)
    rows = [row for row in record["rows"] if row["task"] == ALL]
    best = best_row(record)
    console.print(Text(header_line(record), style="bold"))
    console.print(_table([(shape_name(row), row) for row in rows], "draft", best))
    by_task = [row for row in record["rows"] if row["task"] != ALL and shape_name(row) == shape_name(best)]
    if by_task:
        console.print(Text(f"By task, {shape_name(best)}", style="bold"))
        console.print(_table([(f"{row['task']} ({row['prompts']})", row) for row in by_task], "task (prompts)", None))
    console.print(Text(verdict_line(record)))


def header_line(record: dict[str, Any]) -> str:
    """Return the settings on which the numbers of the tables depend."""
    settings, rows = record["settings"], [row for row in record["rows"] if row["task"] == ALL]
    steps = " / ".join(f"{row['verify_steps']}" for row in rows)
    target = record.get("target") or {}
    weights = f"{target['quantization']} weights, " if target.get("quantization") else ""
    how = "" if settings.get("verify", "target") == "target" else f"verify {settings['verify']}, "
    return (
        f"{target.get('name', 'target')} ({weights}{target.get('dtype', 'dtype not recorded')}), "
        f"{prompts_phrase(record)}, "
        f"{rows[0]['answers']} answers of at most {settings['max_tokens']} tokens; "
        f"temperature {settings['temperature']:g}, {how}batch {settings['batch']}, verify steps {steps}"
    )


def prompts_phrase(record: dict[str, Any]) -> str:
    """Return the number of prompts and their source."""
    count, source = max(row["prompts"] for row in record["rows"]), record["settings"]["prompts"]
    return f"{count} built-in prompts" if source == BUILTIN else f"{count} prompts of {source}"


def verdict_line(record: dict[str, Any]) -> str:
    """Return one sentence: whether speculative decoding wrote the tokens of plain decoding."""
    rows = [row for row in record["rows"] if row["task"] == ALL]
    if any(row["tokens_equal"] is None for row in rows):
        return "Tokens were not compared with plain decoding's."
    wrong = [f"{shape_name(row)}: {row['unequal']} of {row['answers']}" for row in rows if not row["tokens_equal"]]
    if wrong:
        return f"NOT LOSSLESS: answers differ from plain decoding's beyond rounding ({'; '.join(wrong)})."
    ties = sum(row["near_ties"] for row in rows)
    answers = sum(row["answers"] for row in rows)
    over = "" if len(rows) == 1 else f" of {len(rows)} draft shapes"
    if ties == 0:
        return f"All {answers} speculative answers{over} equal plain decoding's, token by token."
    dtype = (record.get("target") or {}).get("dtype", "this dtype")
    return (
        f"{answers - ties} of {answers} speculative answers{over} equal plain decoding's; {ties} first differ from it "
        f"at a near-tie, a choice within the rounding of {dtype}. Measure in float32 for an exact test."
    )


def shape_name(row: dict[str, Any]) -> str:
    """Return "adaptive", "chain 4" or "tree 4x4/16", like `Mode.name`."""
    if row["shape"] == ADAPTIVE:
        return ADAPTIVE
    if row["shape"] == "chain":
        return f"chain {row['num_steps']}"
    return f"tree {row['num_steps']}x{row['top_k']}/{row['num_draft_tokens']}"


def equal_text(row: dict[str, Any]) -> str:
    """Return the result of the comparison with plain decoding's tokens in a few words."""
    if row["tokens_equal"] is None:
        return NONE
    if not row["tokens_equal"]:
        return f"NO ({row['unequal']})"
    ties = row["near_ties"]
    return f"yes ({ties} near-tie{'s' if ties > 1 else ''})" if ties else "yes"


def decimal(value: float | None, digits: int = 2) -> str:
    """Format a rounded number, or a dash for None."""
    return NONE if value is None else f"{value:.{digits}f}"


def length_text(row: dict[str, Any]) -> str:
    """Format accept_length with its interval."""
    low, high = row["interval"]
    between = "" if low is None else f" [{low:.2f}, {high:.2f}]"
    return decimal(row["accept_length"]) + between


def rates_text(rates: Sequence[float | None]) -> str:
    """Format rates by depth, in percent."""
    return " ".join(NONE if rate is None else f"{100 * rate:.0f}" for rate in rates) or NONE


def _table(rows: Sequence[tuple[str, dict[str, Any]]], first: str, best: dict[str, Any] | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    table.add_column("accept_length\n[95 %]", justify="right", no_wrap=True)
    table.add_column("accepted at depth\n1 2 3 .. (%, conditional)", justify="left")
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("plain\ntokens/s", justify="right", no_wrap=True)
    table.add_column("speedup", justify="right", no_wrap=True)
    table.add_column("tokens equal", justify="left")
    for name, row in rows:
        speedup = NONE if row["speedup"] is None else f"{row['speedup']:.2f}x"
        is_best = row is best and len(rows) > 1
        table.add_row(
            f"{name}{BEST}" if is_best else name,
            length_text(row),
            rates_text(row["accept_rate"]),
            decimal(row["tokens_per_s"], 1),
            decimal(row["plain_tokens_per_s"], 1),
            speedup,
            equal_text(row),
            style="bold" if is_best else None,
        )
    return table
