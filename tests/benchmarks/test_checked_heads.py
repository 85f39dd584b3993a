"""The script that spoils a head in four ways, on a tiny head that is not trained."""

from __future__ import annotations

from toolkit.bench import check_decoding
from toolkit.bench.records import read_record
from toolkit.checkpoint.draft_dir import load_draft


def test_each_copy_is_spoilt_in_its_own_way(script, draft_directory, tmp_path, monkeypatch):
    """What files alone tell is found in a head that is not trained, too; the head itself is left as it was."""
    monkeypatch.setattr(check_decoding, "DRAWS", 200)
    out = tmp_path / "check.json"
    words = ["--draft", str(draft_directory), "--limit", "4", "--max-tokens", "8", "--out", str(out)]
    assert script("checked_heads").main(words) == 0
    rows = {row["head"]: row for row in read_record(out, "check")["rows"]}
    assert len(rows) == 5
    assert "template" in rows["another chat template"]["failed"]
    assert "midlayer.mlp.up_proj.weight" in rows["one NaN in a weight"]["failed"]["weights"]
    assert "weights" not in rows["as trained"]["failed"] and "template" not in rows["as trained"]["failed"]
    assert all(row["exit_status"] == int(bool(row["failed"])) for row in rows.values())
    assert load_draft(draft_directory).head.state_dict()["midlayer.mlp.up_proj.weight"].isfinite().all()
