"""The benchmark of the draft loss: both ways compute the same, and the record has the designed rows. No times."""

from __future__ import annotations

import sys

import pytest

from toolkit.bench.records import read_record

DESIGNED = {"variant", "tokens", "seconds_per_step", "tokens_per_s", "peak_memory_bytes", "accept_length", "loss"}


@pytest.mark.slow
def test_both_ways_agree_and_the_tiled_one_holds_less(script, monkeypatch, tmp_path, capsys) -> None:
    """A variant that computed something else, or a peak that misses what the step holds, would make a false record.

    Logits in fp32 are 134 MB, which only the naive way holds (several times): the other stays below half of its peak.
    """
    out = tmp_path / "record.json"
    sizes = ["--vocabulary", "4096", "--tokens", "8192", "--hidden", "8", "--dtype", "float32", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["draft_loss.py", *sizes, "--device", "cpu", "--out", str(out)])
    assert script("draft_loss").main() == 0
    naive, tiled = read_record(out, "training")["rows"]
    assert (naive["variant"], tiled["variant"]) == ("naive", "tiled")
    assert set(naive) >= DESIGNED and set(tiled) >= DESIGNED
    assert naive["loss"] == pytest.approx(tiled["loss"], rel=1e-5)
    assert 2 * tiled["peak_memory_bytes"] < naive["peak_memory_bytes"] > 134e6
    assert "naive" in capsys.readouterr().out
