"""Print the tables of a measurement on the terminal."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolkit.bench.prompts import BUILTIN
from toolkit.bench.rows import (
    ALL,
    HEAD_ALONE,
    best_row,
    head_row,
    headline_row,
    is_faster,
    is_slower,
    lookup_row,
    shape_text,
)
from toolkit.infer.request.draft_tree import ADAPTIVE

WIDTH_WITHOUT_TERMINAL = 122
WIDE = 110  # columns of a terminal that shows the whole table
LENGTH, SPEED, SPEEDUP = "accept_length\n[95 %]", "tokens/s", "speedup over\nplain decoding"
LEFT = ("accepted at\ndepth 1 2 .. (%)", SPEEDUP, "tokens equal")
COLUMNS = (LENGTH, "steps\ndrafted", LEFT[0], SPEED, SPEEDUP, "tokens equal")
NARROW = (LENGTH, SPEED, SPEEDUP)
DEPTHS = 4  # depths of accept_rate in a table; the record has all
NONE = "-"
ENOUGH_STEPS = 30  # with fewer, a bootstrap interval is far too narrow, and may have no width at all
BEST = " (best)"  # by speed; as text, since bold is lost without a terminal


def print_acceptance(record: dict[str, Any], console: Console | None = None) -> None:
    """Print a row for each setting, the tasks of the headline's, and what was found.

    Without a terminal it is plain text of a fixed width.
    """
    console = console or wide_console()
    rows = [row for row in record["rows"] if row["task"] == ALL]
    headline, best = headline_row(record), best_row(record)
    console.print(Text(header_line(record), style="bold"))
    console.print(_table([(shape_name(row), row) for row in rows], "draft", best, console.width))
    by_task = [row for row in record["rows"] if row["task"] != ALL and shape_name(row) == shape_name(headline)]
    if by_task:
        console.print(Text(f"By task, {shape_name(headline)}{forced_text(record, ', ')}", style="bold"))
        tasks = [(f"{row['task']} ({row['prompts']})", row) for row in by_task]
        console.print(_table(tasks, "task (prompts)", None, console.width))
    if any(len(row.get("by_context") or ()) > 1 for row in rows):
        console.print(Text("accept_length [95 %] by tokens before the step", style="bold"))
        console.print(_context_table(rows))
    for line in (
        drafted_line(record),
        verdict_line(record),
        outcome_line(record),
        ceiling_line(record),
    ):
        if line:
            console.print(Text(line))


def _context_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A column for each setting, a row for each class of contexts."""
    table = new_table("tokens", [shape_name(row) for row in rows])
    by_bounds = [{(one["from"], one["below"]): one for one in row["by_context"]} for row in rows]
    for low, high in sorted({bounds for one in by_bounds for bounds in one}):
        bounds = f"under {high}" if low == 0 else f"{low} to {high - 1}" if high else f"from {low}"
        table.add_row(bounds, *(length_text(one[low, high]) if (low, high) in one else NONE for one in by_bounds))
    return table


def wide_console() -> Console:
    """Return the terminal, or where there is none, plain text of a fixed width."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH_WITHOUT_TERMINAL)


def new_table(first: str, columns: Iterable[str], left: Container[str] = ()) -> Table:
    """Return a table with a first column of names. Other columns are flush right, except those in `left`."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def header_line(record: dict[str, Any]) -> str:
    """Return the settings on which the numbers of the tables depend."""
    settings, rows = record["settings"], [row for row in record["rows"] if row["task"] == ALL]
    steps = ", ".join(f"{shape_name(row)} {row['verify_steps']}" for row in rows)
    target = record.get("target") or {}
    weights = f"{target['quantization']} weights, " if target.get("quantization") else ""
    how = "" if settings.get("verify", "target") == "target" else f"verify {settings['verify']}, "
    return (
        f"{target.get('name', 'target')} ({weights}{target.get('dtype', 'dtype not recorded')}), "
        f"{prompts_phrase(record)}, "
        f"{rows[0]['answers']} answers of at most {settings['max_tokens']} tokens; "
        f"temperature {settings['temperature']:g}{forced_text(record, ', ')}, {how}batch {settings['batch']}; "
        f"verify steps: {steps}"
    )


def prompts_phrase(record: dict[str, Any]) -> str:
    """Return the number of prompts and their source."""
    count, source = max(row["prompts"] for row in record["rows"]), record["settings"]["prompts"]
    return f"{count} built-in prompts" if source == BUILTIN else f"{count} prompts of {source}"


def verdict_line(record: dict[str, Any]) -> str:
    """Return one sentence: whether speculative decoding wrote the tokens of plain decoding."""
    rows = [row for row in record["rows"] if row["task"] == ALL]
    if forced_text(record):
        shallow = sum(row["shallow_steps"] for row in rows)
        note = f" In {count_of(shallow, 'step')} the draft was too shallow for it." if shallow else ""
        return f"Drafts were accepted by chance ({forced_text(record)}): only times mean anything, no token.{note}"
    if any(row["near_ties"] is None for row in rows):
        return "Tokens were not compared with plain decoding's."
    wrong = [f"{shape_name(row)}: {row['unequal']} of {row['answers']}" for row in rows if row["unequal"]]
    if wrong:
        return f"NOT LOSSLESS: answers differ from plain decoding's beyond rounding ({'; '.join(wrong)})."
    ties = sum(row["near_ties"] for row in rows)
    not_judged = sum(row.get("not_judged", 0) for row in rows)
    answers = sum(row["answers"] for row in rows)
    over = "" if len(rows) == 1 else f" in {len(rows)} settings"
    if ties == not_judged == 0:
        return f"All {answers} speculative answers{over} equal plain decoding's, token by token."
    dtype = (record.get("target") or {}).get("dtype", "this dtype")
    if not_judged:
        equal = answers - not_judged
        return (
            f"{equal} of {answers} speculative answers{over} equal plain decoding's; {not_judged} "
            f"differ, by rounding or not: sampled answers in {dtype} are no test. Measure in float32 for an exact one."
        )
    return (
        f"{answers - ties} of {answers} speculative answers{over} equal plain decoding's; {ties} first differ from it "
        f"at a near-tie, a choice within the rounding of {dtype}. Measure in float32 for an exact test."
    )


def drafted_line(record: dict[str, Any]) -> str:
    """Return one sentence on what accept_length leaves out; empty if every step drafted."""
    rows = [row for row in record["rows"] if row["task"] == ALL]
    if all(row.get("drafted_share") in (None, 1.0) for row in rows):
        return ""
    most = next((row for row in rows if row["shape"] == ADAPTIVE), None)
    if most is None:
        return "accept_length counts the steps that drafted; the others decoded plainly."
    looked_up = most["method"] != "ngram" and record["settings"].get("lookup", False) is not False  # None: by default
    beside = ", and lookup up to 15 tokens where the text repeats itself" if looked_up else ""
    limit = f" Adaptive drafting drafts at most a {fixed_name(most)}{beside}."
    return f"accept_length counts the steps that drafted; the others decoded plainly.{limit}"


def outcome_line(record: dict[str, Any]) -> str:
    """Return what a user gets, in plain sentences: how fast `toolkit serve` is as it starts, against plain decoding."""
    headline, best, beside = headline_row(record), head_row(record), lookup_row(record)
    if headline["speedup"] is None or best["speedup"] is None:
        return ""
    serve = "as `toolkit serve` starts,"
    name = f"Adaptive drafting, {serve}" if headline["shape"] == ADAPTIVE else f"Drafting a {shape_name(headline)}"
    name = name if beside is None else "The head alone"
    speeds = f"{headline['tokens_per_s']:.1f} tokens/s where plain decoding writes {headline['plain_tokens_per_s']:.1f}"
    first = f"{name} writes {speeds}: {headline['speedup']:.2f}x"
    if beside is not None:
        first += f"; with lookup beside it, {serve} {beside['tokens_per_s']:.1f}: {beside['speedup']:.2f}x"
    first += "."
    if forced_text(record):
        return first
    if not is_faster(best):
        if beside is not None and is_faster(beside):
            return f"{first} The gain is lookup's, which needs no head (--draft ngram)."
        others = "a trained head" if headline["method"] == "ngram" else "n-gram lookup (--draft ngram), longer training"
        return f"{first} No setting is faster than plain decoding here. What may help: {others}, or another machine."
    if beside is not None and round(headline["speedup"], 2) > round(beside["speedup"], 2):
        first += " Lookup costs time here (--no-lookup)."
    if round(best["speedup"], 2) > max(round(one["speedup"], 2) for one in (headline, beside) if one):
        first += f" Drafting a {shape_name(best)} in every step (--shape {shape_text(best)}) is faster here: "
        first += f"{best['speedup']:.2f}x."
    return first


def ceiling_line(record: dict[str, Any]) -> str:
    """Return what perfect drafts would gain, so that a user sees whether the head or the engine limits the speed."""
    ceiling = record.get("ceiling")
    if not ceiling or ceiling["speedup"] is None or ceiling["accept_length"] is None:
        return ""
    gained = f"{ceiling['accept_length']:.2f} tokens a step, {ceiling['tokens_per_s']:.1f} tokens/s"
    drafts = count_of(ceiling["drafts"], "token")
    return f"The engine's ceiling: perfect drafts of {drafts} would give {gained}: {times(ceiling['speedup'])}."


def forced_text(record: dict[str, Any], lead: str = "") -> str:
    """Return `lead` and "forced accept_length 2.60", which marks every table of such a record; empty for others."""
    forced = record["settings"].get("forced_accept_length")
    return "" if forced is None else f"{lead}forced accept_length {forced:.2f}"


def shape_name(row: dict[str, Any]) -> str:
    """Return the row's `mode_name`, with its lookup if that was measured on and off, and " (forced)" if acceptance
    was."""
    return (
        mode_name(row)
        + (" with lookup" if row.get("lookup") else "")
        + ("" if row.get("forced_accept_length") is None else " (forced)")
    )


def mode_name(row: dict[str, Any]) -> str:
    """Return "adaptive", "adaptive, no lookup", "chain 4" or "tree 4x4/16", as `Mode.name`."""
    if row["shape"] == ADAPTIVE:
        return HEAD_ALONE if row.get("lookup") is False else ADAPTIVE
    return fixed_name(row)


def fixed_name(row: dict[str, Any]) -> str:
    """Return "chain 4" or "tree 4x4/16"; of adaptive drafting the largest shape."""
    if row["top_k"] == 1:
        return f"chain {row['num_steps']}"
    return f"tree {row['num_steps']}x{row['top_k']}/{row['num_draft_tokens']}"


def equal_text(row: dict[str, Any]) -> str:
    """Return the result of the comparison with plain decoding's tokens in a few words."""
    if row["near_ties"] is None:
        return NONE
    if row["unequal"]:
        return f"NO ({row['unequal']})"
    others, answers = row["near_ties"] + row.get("not_judged", 0), row["answers"]
    return f"{answers - others} of {answers}" if others else f"all {answers}"


def decimal(value: float | None, digits: int = 2) -> str:
    """Format a rounded number, or a dash for None."""
    return NONE if value is None else f"{value:.{digits}f}"


def length_text(row: dict[str, Any]) -> str:
    """Format accept_length with its interval, or with the number of steps if those are too few for an interval."""
    if row["verify_steps"] < ENOUGH_STEPS:
        return f"{decimal(row['accept_length'])} ({count_of(row['verify_steps'], 'step')})"
    low, high = row["interval"]
    between = "" if low is None else f" [{low:.2f}, {high:.2f}]"
    return decimal(row["accept_length"]) + between


def count_of(number: int, thing: str) -> str:
    """Return "1 step", "2 steps"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def rates_text(rates: Sequence[float | None]) -> str:
    """Format rates by depth, in percent: those of the first DEPTHS depths, since lookup drafts long chains."""
    texts = [NONE if rate is None else f"{100 * rate:.0f}" for rate in rates[:DEPTHS]]
    return " ".join([*texts, *(["…"] if len(rates) > DEPTHS else [])]) or NONE


def share_text(share: float | None) -> str:
    """Format a share in percent."""
    return NONE if share is None else f"{100 * share:.0f} %"


def speedup_text(row: dict[str, Any]) -> str:
    """Format the speedup; a setting that loses to plain decoding is marked."""
    return times(row["speedup"]) + (", slower" if is_slower(row) else "")


def times(speedup: float | None) -> str:
    """Format a speedup."""
    return NONE if speedup is None else f"{speedup:.2f}x"


def _table(rows: Sequence[tuple[str, dict[str, Any]]], first: str, best: dict[str, Any] | None, width: int) -> Table:
    """best: the row to mark; None for tasks. Below WIDE columns only the most important columns are shown."""
    cells: dict[str, list[str]] = {name: [] for name in COLUMNS if width >= WIDE or name in NARROW}
    table = new_table(first, cells, LEFT)
    if best is not None and best["plain_tokens_per_s"] is not None:
        plain = {SPEED: decimal(best["plain_tokens_per_s"], 1)}
        table.add_row("plain decoding", *(plain.get(name, NONE) for name in cells))
    for name, row in rows:
        is_best = row is best and len(rows) > 1 and not is_slower(row)
        texts = {
            LENGTH: length_text(row),
            "steps\ndrafted": share_text(row.get("drafted_share")),
            "accepted at\ndepth 1 2 .. (%)": rates_text(row["accept_rate"]),
            SPEED: decimal(row["tokens_per_s"], 1),
            # A task of a few prompts is no setting to choose, and noise.
            SPEEDUP: times(row["speedup"]) if best is None else speedup_text(row),
            "tokens equal": equal_text(row),
        }
        style = "bold" if is_best else None
        table.add_row(f"{name}{BEST}" if is_best else name, *(texts[column] for column in cells), style=style)
    return table
