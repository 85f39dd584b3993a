"""The script that forces a wrong convention through, on a tiny target: what it serves, and what its record says."""

from __future__ import annotations

import pytest

from toolkit.bench.records import read_record
from toolkit.checkpoint.draft_dir import save_draft
from toolkit.checkpoint.open_head import open_head
from toolkit.heads.mtp import MtpConfig, MtpHead


def test_the_layers_are_moved_and_the_answers_are_not(script, draft_directory, tmp_path, monkeypatch):
    """Ids that were not moved, or moved under the key that is not read, would measure the same head three times."""
    aux_shift = script("aux_shift")
    served, inner = [], aux_shift.LLM

    class Watched(inner):
        def __init__(self, target, draft, **settings):
            if draft is not None:
                served.append(open_head(draft, target=target).head.config.aux_layer_ids)
            super().__init__(target, draft, **settings)

    monkeypatch.setattr(aux_shift, "LLM", Watched)
    out = tmp_path / "record.json"
    words = ["--draft", str(draft_directory), "--limit", "3", "--max-tokens", "12", "--shape", "2,1,3"]
    assert aux_shift.main([*words, "--out", str(out)]) == 0
    rows = read_record(out, "acceptance")["rows"]
    assert served == [(2, 3, 4), (1, 2, 3), (3, 4, 5)] == [tuple(row["aux_layer_ids"]) for row in rows]
    assert all(row["tokens_equal"] and row["verify_steps"] and row["prompts"] == 3 for row in rows)
    assert rows[0]["change"] == 0


def test_a_head_without_auxiliary_layers(script, tmp_path, tiny_target, capsys):
    head = MtpHead(MtpConfig.from_target_config(tiny_target.config, vocab_size=tiny_target.vocab_size))
    directory = save_draft(tmp_path / "mtp", head.state_dict(), head.config, None, {})
    with pytest.raises(SystemExit):
        script("aux_shift").main(["--draft", str(directory)])
    assert "only eagle3 heads read auxiliary layers" in capsys.readouterr().err
