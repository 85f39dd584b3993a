"""The token-map benchmark on a small text: what is compared with what. No times."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.bench.records import read_record

LINES = ["the quick brown fox\n", "\n", "jumps over the lazy dog é\n", "  and rivers\n"]


@pytest.mark.process
@pytest.mark.slow
def test_rows_of_all_variants(script, tiny_target_directory, tmp_path: Path) -> None:
    """The tokenizer alone must encode the very tokens that are counted, and the kill must leave something counted."""
    source, out = tmp_path / "source.txt", tmp_path / "record.json"
    source.write_text("".join(LINES * 40), encoding="utf-8")
    size = ["--bytes", "100000", "--size", "64", "--num-proc", "2"]
    target = ["--tokenizer", str(tiny_target_directory)]
    assert script("token_map").main(["--text", str(source), *size, *target, "--out", str(out)]) == 0
    rows = {row["variant"]: row for row in read_record(out, "token_map")["rows"]}
    assert list(rows) == ["tokenizer", "toolkit", "toolkit-again", "toolkit-resumed", "toolkit-weighted"]
    whole = [rows[name] for name in list(rows)[:4]]
    assert len({row["tokens"] for row in whole}) == 1 and whole[0]["tokens"] > 10_000
    assert rows["toolkit-resumed"]["kept_shards"] == 1 and rows["toolkit-resumed"]["equal"]
    assert rows["toolkit-weighted"]["equal"]


def test_the_generated_text_is_the_source_repeated(script, tmp_path: Path) -> None:
    """A character that is cut in its middle would be no text."""
    source, path = tmp_path / "source.txt", tmp_path / "big.txt"
    source.write_text("".join(LINES * 2), encoding="utf-8")
    script("token_map").generate(source, 1000, path)
    text = path.read_text(encoding="utf-8")
    assert 998 <= len(text.encode()) <= 1000 and text.startswith("".join(LINES * 4))
    first, second, repeated = (one.read_text() for one in script("token_map").halves(source, tmp_path))
    assert first + second == "".join(LINES * 2) and repeated == first * 3 + second
    assert second.startswith("the quick"), "the cut after the second line would be inside of white space"
