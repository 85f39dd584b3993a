"""The figure and the table of README, by the newest record of the demo recipe: tokens/s with and without drafts."""

from __future__ import annotations

from html import escape

from measurements import FIRST_COMMAND, Record, records_of
from record_tables import Row, accept_length, rounded
from tables import table

from toolkit.bench.rows import is_slower, lookup_row, shape_text
from toolkit.bench.table import decimal, speedup_text, times

WIDTH, HEIGHT = 640, 360
LEFT, TOP, FLOOR = 40, 122, 290  # of the bars, in pixels
INK, FAINT, PLAIN, FASTER, SLOWER = "#1f2328", "#57606a", "#8c959f", "#1a7f37", "#bc4c00"


def newest() -> tuple[Record, list[Row], str]:
    """The newest record of the first command, its rows over all prompts, that of adaptive drafting with lookup last,
    and its machine with instruction flags, and day."""
    _, record = records_of(FIRST_COMMAND)[0]
    rows, beside = [row for row in record["rows"] if row["task"] == "all"], lookup_row(record)
    if beside is not None:
        rows = [*(row for row in rows if row is not beside), beside | {"lookup": True}]
    hardware = record["hardware"]
    where = f"{hardware['cpu']}, {hardware['cores']} cores, {' '.join(hardware.get('cpu_flags') or ())}".rstrip(", ")
    return record, rows, f"{where}; {record['date'][:10]}"


def demo() -> str:
    """The table: one row for plain decoding and one for each draft."""
    record, rows, where = newest()
    speed, plain = rounded("tokens_per_s", 1), decimal(rows[0]["plain_tokens_per_s"], 1)
    drafted = [
        (
            "head alone" if row["shape"] != "adaptive" or row.get("lookup") is False else "head and lookup",
            f"{row['shape']} `{shape_text(row)}`".replace("adaptive", "adaptive, at most"),
            accept_length(row),
            speed(row),
            speedup_text(row),
        )
        for row in rows
    ]
    header = ("what drafts", "draft shape", "accept_length", "tokens/s", "over plain decoding")
    caption = f"{rows[0]['prompts']} {record['settings']['prompts']} prompts, greedy; {where}:"
    return f"{caption}\n\n" + table(header, [("nothing: plain decoding", "", "", plain, ""), *drafted])


def svg() -> str:
    """The figure, on a white panel of its own, so that it is legible on any page."""
    record, rows, where = newest()
    plain = rows[0]["plain_tokens_per_s"]
    unit = (FLOOR - TOP) / max(plain, *(row["tokens_per_s"] for row in rows))
    step, level = (WIDTH - 2 * LEFT) / (1 + len(rows)), FLOOR - unit * plain
    prompts, target = f"{rows[0]['prompts']} {record['settings']['prompts']} prompts", record["target"]
    parts = [
        _text(LEFT, 36, "Tokens per second of the demo recipe", INK, 20, "start", "600"),
        _text(LEFT, 58, where, FAINT, 12, "start"),
        _text(LEFT, 76, f"{prompts}, greedy, {target['name']} in {target['dtype']}", FAINT, 12, "start"),
    ]
    for place, row in enumerate([None, *rows]):
        speed = plain if row is None else row["tokens_per_s"]
        middle, top, width = LEFT + step * (place + 0.5), FLOOR - unit * speed, min(110.0, 0.62 * step)
        colour = PLAIN if row is None else SLOWER if is_slower(row) else FASTER
        parts.append(
            f'<rect x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{FLOOR - top:.1f}" rx="3" '
            f'fill="{colour}"/>'
        )
        parts.append(_text(middle, FLOOR - 10, decimal(speed, 1), "#ffffff", 16, "middle", "600"))
        if row is not None:
            gain = f"{times(row['speedup'])} plain" + ", slower" * is_slower(row)
            for line, note in enumerate((gain, f"accept_length {decimal(row['accept_length'])}")):
                parts.append(_text(middle, min(top, level) - 8 - 16 * line, note, INK, 12))
        parts.append(_text(middle, FLOOR + 20, "plain decoding" if row is None else _name(row), INK, 13))
    parts.append(f'<path d="M{LEFT} {level:.1f}H{WIDTH - LEFT}" stroke="{INK}" stroke-dasharray="4 4" opacity="0.5"/>')
    footnote = "accept_length: tokens committed per verify step; adaptive: of drafted steps alone"
    parts.append(_text(LEFT, HEIGHT - 22, footnote, FAINT, 12, "start"))
    body = "\n".join(f"  {part}" for part in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, Helvetica, Arial, sans-serif" role="img">\n'
        f'  <rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff" stroke="#d0d7de"/>\n{body}\n</svg>\n'
    )


def _name(row: Row) -> str:
    name = {False: "head alone", True: "with lookup"}.get(row.get("lookup"), row["shape"])
    return name if row["shape"] == "adaptive" else f"{name} {shape_text(row)}"


def _text(x: float, y: float, text: str, colour: str, size: int, anchor: str = "middle", weight: str = "400") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )
