"""host_rounds.py measures the host's work alone, with page tables of the length that is asked for."""

from __future__ import annotations

from toolkit.bench.records import read_record
from toolkit.infer.kernels.dispatch import ops_for


def test_rounds_upload_new_pages_only(script, tmp_path) -> None:
    """Whole tables, uploaded each round, were 16 ms of the host at 16 rows of 131072 tokens."""
    module, out, before = script("host_rounds"), tmp_path / "record.json", ops_for("cpu")
    line = ["--rows", "3", "--context", "600", "--rounds", "40", "--out", str(out)]
    assert module.main(line) == 0
    rows = read_record(out, "host-rounds")["rows"]
    assert [(row["shape"], row["how"]) for row in rows] == [
        (shape, how) for shape in ("plain", rows[-1]["shape"]) for how in ("graph", "graph-serial")
    ]
    assert rows[-1]["shape"].startswith("chain")
    for row in rows:
        assert row["pages"] > 3 * 20 and row["uploaded_numbers"] < 3, row
    assert ops_for("cpu") is before
