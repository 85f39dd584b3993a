"""The verifiers' benchmark on a tiny head."""

from __future__ import annotations

import sys

from toolkit.bench.records import read_record


def test_one_prompt_is_a_record_without_intervals(script, monkeypatch, tmp_path, draft_directory, capsys) -> None:
    """A command that cannot be typed again, or an interval of one prompt, which there is not, would be a false row."""
    verifiers, out = script("verifiers"), tmp_path / "record.json"
    line = ["--draft", str(draft_directory), "--limit", "1", "--max-tokens", "8", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["benchmarks/verifiers.py", *line])
    assert verifiers.main() == 0
    record = read_record(out, "acceptance")
    assert record["command"].startswith("python benchmarks/verifiers.py --draft ")
    assert [row["verify"] for row in record["rows"]] == ["target", "rejection", "block"]
    assert all(row["interval"] == [None, None] and row["verify_steps"] > 0 for row in record["rows"])
    assert "T=1 block: accept_length " in capsys.readouterr().out
