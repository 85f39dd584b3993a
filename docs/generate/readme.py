"""The table of README.md: the newest record of the first command."""

from __future__ import annotations

from figure import newest_record, place_and_date
from record_tables import shape, with_interval
from tables import table

from toolkit.bench.table import decimal, speedup_text


def demo() -> str:
    """One row for plain decoding and one for each draft."""
    record = newest_record()
    rows = [row for row in record["rows"] if row["task"] == "all"]
    drafted = (
        (
            shape(row),
            with_interval(row["accept_length"], row["interval"], row["prompts"]),
            decimal(row["tokens_per_s"], 1),
            speedup_text(row),
        )
        for row in rows
    )
    plain = ("plain decoding", "", decimal(rows[0]["plain_tokens_per_s"], 1), "")
    caption = f"{rows[0]['prompts']} {record['settings']['prompts']} prompts, greedy; {place_and_date(record)}:"
    return f"{caption}\n\n" + table(("draft", "accept_length", "tokens/s", "over plain"), (plain, *drafted))
