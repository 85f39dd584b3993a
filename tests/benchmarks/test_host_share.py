"""What counts as the host's part of a round. No times: a made-up round, and tiny ones that only tell what ran."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from toolkit.bench.records import read_record

DESIGNED = {
    "engine", "version", "weight_bits", "batch", "context", "tokens", "seconds", "tokens_per_s", "accept_length",
    "peak_memory_bytes", "parts",
}  # fmt: skip
EACH = 2.0  # what the profiler takes for an event, microseconds


def event(name: str, own: float, *inside: SimpleNamespace) -> SimpleNamespace:
    """own: its microseconds without those inside, as they are without a profiler."""
    took = own + EACH / 2 + sum(one.time_range.elapsed_us() + EACH / 2 for one in inside)
    return SimpleNamespace(name=name, cpu_children=inside, time_range=SimpleNamespace(elapsed_us=lambda: took))


def test_what_the_profiler_adds_is_taken_off(script) -> None:
    """Python of 3 + 10 + 5 + 4 us, beside and inside operators, whatever the profiler adds to each of them."""
    attend = event("toolkit::attend", 5, event("aten::bmm", 7))
    program = event("function of C++", 30, event("toolkit::attend", 4, event("aten::bmm", 6)))
    verify = event("verify", 10, event("aten::linear", 20, event("aten::addmm", 9)), attend, program)
    share = script("host_share").share_of([event("round", 3, verify)], 1.0)
    assert 1e6 * share.host(EACH / 1e6) == pytest.approx(22)
    assert share.outer == 4 and share.events == 8.5


def test_the_operators_of_a_round_are_counted(script, monkeypatch, tmp_path, draft_directory) -> None:
    """A function of C++ called by another name than the benchmark knows would count as the host's. A round with drafts
    calls more operators than a plain one."""
    host_share = script("host_share")
    monkeypatch.setattr(host_share.torch, "set_num_threads", lambda count: None)
    out = tmp_path / "record.json"
    assert host_share.main(["--draft", str(draft_directory), "--rounds", "2", "--out", str(out)]) == 0
    rows = read_record(out, "engine")["rows"]
    assert all(set(row) >= DESIGNED and row["context"] > 0 for row in rows)
    plain, drafted = (row["operators_called"] for row in rows)
    assert 0 < plain < drafted
