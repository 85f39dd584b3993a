"""The figure and the table of README, by the newest record of the demo recipe: tokens/s with and without drafts."""

from __future__ import annotations

from html import escape
from pathlib import Path

from measurements import FIRST_COMMAND, RESULTS, Record, records_of
from record_tables import Row, with_interval
from tables import table

from toolkit.bench.rows import is_slower, lookup_row, shape_text
from toolkit.bench.table import decimal, speedup_text, times

WIDTH, HEIGHT = 640, 360
LEFT, TOP, FLOOR = 40, 122, 290  # of the bars, in pixels
INK, FAINT, PLAIN, FASTER, SLOWER = "#1f2328", "#57606a", "#8c959f", "#1a7f37", "#bc4c00"


def svg(results: Path = RESULTS) -> str:
    """The figure, on a white panel of its own, so that it is legible on any page. Raises FileNotFoundError."""
    return _draw(newest_record(results))


def demo() -> str:
    """The table: one row for plain decoding and one for each draft."""
    record = newest_record()
    rows = [row for row in record["rows"] if row["task"] == "all"]
    drafted = (
        (
            "head alone" if row["shape"] != "adaptive" or row.get("lookup") is False else "head and lookup",
            f"{row['shape']} `{shape_text(row)}`".replace("adaptive", "adaptive, at most"),
            with_interval(row["accept_length"], row["interval"], row["prompts"]),
            decimal(row["tokens_per_s"], 1),
            speedup_text(row),
        )
        for row in rows
    )
    plain = ("nothing: plain decoding", "", "", decimal(rows[0]["plain_tokens_per_s"], 1), "")
    caption = f"{rows[0]['prompts']} {record['settings']['prompts']} prompts, greedy; {place_and_date(record)}:"
    header = ("what drafts", "draft shape", "accept_length", "tokens/s", "over plain decoding")
    return f"{caption}\n\n" + table(header, (plain, *drafted))


def newest_record(results: Path = RESULTS) -> Record:
    """The newest record of the first command, its row of adaptive drafting with lookup last. Raises
    FileNotFoundError."""
    newest = next((record for _, record in records_of(FIRST_COMMAND, results)), None)
    if newest is None:
        raise FileNotFoundError(
            f"{results} has no record of the demo recipe; run it and copy its acceptance record there"
        )
    if (beside := lookup_row(newest)) is not None:
        newest = {**newest, "rows": [*(row for row in newest["rows"] if row is not beside), beside | {"lookup": True}]}
    return newest


def place_and_date(record: Record) -> str:
    """The machine, its instruction flags, and the day."""
    hardware = record["hardware"]
    where = f"{hardware['cpu']}, {hardware['cores']} cores, {' '.join(hardware.get('cpu_flags') or ())}".rstrip(", ")
    return f"{where}; {record['date'][:10]}"


def _draw(record: Record) -> str:
    rows = [row for row in record["rows"] if row["task"] == "all"]
    plain = rows[0]["plain_tokens_per_s"]
    bars = [("plain decoding", plain, (), PLAIN), *(_bar(row) for row in rows)]
    unit = (FLOOR - TOP) / max(speed for _, speed, _, _ in bars)
    step = (WIDTH - 2 * LEFT) / len(bars)
    settings = record["settings"]
    parts = [
        _text(LEFT, 36, "Tokens per second of the demo recipe", INK, 20, "start", "600"),
        _text(LEFT, 58, place_and_date(record), FAINT, 12, "start"),
        _text(
            LEFT,
            76,
            f"{rows[0]['prompts']} {settings['prompts']} prompts, greedy, {_target(record)}",
            FAINT,
            12,
            "start",
        ),
    ]
    level = FLOOR - unit * plain
    for place, (name, speed, notes, colour) in enumerate(bars):
        middle, top = LEFT + step * (place + 0.5), FLOOR - unit * speed
        width = min(110.0, 0.62 * step)
        parts.append(
            f'<rect x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{FLOOR - top:.1f}" rx="3" '
            f'fill="{colour}"/>'
        )
        parts.append(_text(middle, FLOOR - 10, decimal(speed, 1), "#ffffff", 16, "middle", "600"))
        for line, note in enumerate(reversed(notes)):
            parts.append(_text(middle, min(top, level) - 8 - 16 * line, note, INK, 12))
        parts.append(_text(middle, FLOOR + 20, name, INK, 13))
    parts.append(f'<path d="M{LEFT} {level:.1f}H{WIDTH - LEFT}" stroke="{INK}" stroke-dasharray="4 4" opacity="0.5"/>')
    footnote = "accept_length: tokens committed per verify step; adaptive: of drafted steps alone"
    parts.append(_text(LEFT, HEIGHT - 22, footnote, FAINT, 12, "start"))
    body = "\n".join(f"  {part}" for part in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, Helvetica, Arial, sans-serif" role="img">\n'
        f'  <rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff" stroke="#d0d7de"/>\n{body}\n</svg>\n'
    )


def _bar(row: Row) -> tuple[str, float, tuple[str, ...], str]:
    name = {False: "head alone", True: "with lookup"}.get(row.get("lookup"), row["shape"])
    if row["shape"] != "adaptive":
        name += f" {shape_text(row)}"
    notes = (
        f"accept_length {decimal(row['accept_length'])}",
        f"{times(row['speedup'])} plain" + ", slower" * is_slower(row),
    )
    return name, row["tokens_per_s"], notes, SLOWER if is_slower(row) else FASTER


def _target(record: Record) -> str:
    return f"{record['target']['name']} in {record['target']['dtype']}"


def _text(x: float, y: float, text: str, colour: str, size: int, anchor: str = "middle", weight: str = "400") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )
