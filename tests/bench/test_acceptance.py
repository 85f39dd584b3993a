import hashlib
import json
from dataclasses import replace

import pytest

from toolkit.bench.acceptance import ONE_BY_ONE, best_row, measure_acceptance
from toolkit.bench.prompts import Prompt
from toolkit.bench.records import read_record, write_record
from toolkit.bench.report import RunData, write_page
from toolkit.bench.side_by_side import Sampling, Trial
from toolkit.bench.table import mode_name, print_acceptance
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.verify.verifiers import ForcedAcceptance

SHAPES = [DraftShape.chain(2), DraftShape(3, 2, 6)]
PROMPTS = [
    Prompt("1", "writing", ("write short stories about rivers",)),
    Prompt("2", "math", ("count seven apples", "and numbers")),
    Prompt("3", "math", ("the weather in spring",)),
]


def trial_of(target, draft, sampling, **options):
    return Trial(target, draft, PROMPTS, sampling, replace(ONE_BY_ONE, **options))


@pytest.mark.parametrize(("batch", "temperature"), [(2, 0.0), pytest.param(1, 0.9, marks=pytest.mark.slow)])
def test_a_whole_measurement_on_a_tiny_target(tiny_target, tiny_draft, tmp_path, capsys, batch, temperature):
    """Engine, clock, log, comparison and table together; in fp32 tokens must equal plain decoding's."""
    trial = trial_of(tiny_target, tiny_draft, Sampling(12, temperature, 0), max_running_requests=batch)
    record = measure_acceptance(trial, SHAPES, adaptive=DraftShape(3, 2, 6))
    whole = [row for row in record["rows"] if row["task"] == "all"]
    modes = ["adaptive, no lookup", "adaptive", "chain 2", "tree 3x2/6"]
    assert [mode_name(row) for row in whole] == modes == list(dict.fromkeys(one["shape"] for one in record["answers"]))
    assert [row["num_draft_tokens"] for row in whole] == [6, 6, 3, 6]
    assert len(record["rows"]) == 12 and len(record["answers"]) == 16
    for row in whole:
        assert row["tokens_equal"] is True and row["unequal"] == 0 and row["answers"] == 4 and row["prompts"] == 3
        assert row["tokens_per_s"] > 0 and row["plain_tokens_per_s"] > 0 and row["temperature"] == temperature
    for row in whole[2:]:
        assert row["accept_length"] >= 1 and row["verify_steps"] > 0 and row["drafted_share"] == 1
    assert whole[0]["drafted_share"] < 1, "adaptive drafting begins with plain steps"
    assert record["target"]["dtype"] == "float32" and record["settings"]["shapes"] == [
        "adaptive",
        "adaptive, no lookup",
        "2,1,3",
        "3,2,6",
    ]
    ceiling = record["ceiling"]
    assert ceiling["drafts"] == 3 and ceiling["accept_length"] == 4.0 and ceiling["tokens_per_s"] > 0
    write_record(tmp_path / "acceptance.json", record)
    assert read_record(tmp_path / "acceptance.json", "acceptance") == json.loads(json.dumps(record, allow_nan=False))
    print_acceptance(record)
    out = capsys.readouterr().out
    assert "chain 2" in out and "perfect drafts of 3 tokens would give 4.00 tokens a step" in out


def test_another_verifier(tiny_target, tiny_draft, tmp_path):
    """It must reach the engine, where a seed then writes other tokens, and stand beside the numbers; calling those
    tokens unequal would call a lossless head wrong. The map of ids is named by its content."""
    map_file = tmp_path / "freq_160.pt"
    map_file.write_bytes(b"any bytes")
    trial = trial_of(tiny_target, tiny_draft, Sampling(12, 0.9, 0), verify="rejection", token_map=map_file)
    record = measure_acceptance(trial, SHAPES[:1])
    assert record["settings"]["verify"] == "rejection"
    sha256 = hashlib.sha256(b"any bytes").hexdigest()
    assert record["settings"]["token_map"] == {"file": "freq_160.pt", "sha256": sha256}
    assert {(row["verify"], row["tokens_equal"]) for row in record["rows"]} == {("rejection", None)}


def test_forced_acceptance_is_marked_and_not_compared(tiny_target, tiny_draft, tmp_path, capsys):
    """A random head accepts nothing: whatever the rows say comes from the force. Whoever sees a row, a table or the
    page must know."""
    trial = trial_of(tiny_target, tiny_draft, Sampling(25, 0.9, 0))
    record = measure_acceptance(trial, SHAPES, warmup=0, forced=ForcedAcceptance.parse("3"))
    for row in record["rows"]:
        assert row["forced_accept_length"] == row["accept_length"] == 3.0 and row["shallow_steps"] == 0
        assert row["tokens_equal"] is row["near_ties"] is row["unequal"] is None
    assert record["settings"]["forced_accept_length"] == 3.0 and record["settings"]["check_tokens"] is False
    assert record["settings"]["forced_accept_rate"] == [1.0, 1.0] and record["divergences"] == []
    print_acceptance(record)
    words = " ".join(capsys.readouterr().out.split())
    assert "Drafts were accepted by chance (forced accept_length 3.00): only times mean anything, no token." in words
    assert "toolkit serve" not in words, "its speed is not what serve would have"
    write_page(tmp_path / "page.html", RunData(tmp_path, acceptance=record))
    page = (tmp_path / "page.html").read_text()
    assert page.count("orced accept_length 3.00") >= 6 and "toolkit serve" not in page


def test_an_engine_that_writes_something_else_is_caught(tiny_target, tiny_draft, monkeypatch):
    """The comparison must be able to fail: an engine whose accepted tokens are shifted by one is not lossless."""
    from toolkit.infer.engine import round as engine_round

    honest = engine_round.follow

    def dishonest(tree, chosen):
        return honest(tree, chosen if chosen.shape[1] == 1 else (chosen + 1) % tiny_target.vocab_size)

    monkeypatch.setattr(engine_round, "follow", dishonest)
    record = measure_acceptance(trial_of(tiny_target, tiny_draft, Sampling(8, 0.0, 0)), SHAPES[:1])
    row = best_row(record)
    assert row["tokens_equal"] is False and row["unequal"] == 4 and len(record["divergences"]) == 4
    assert all(found["speculative_logit"] < found["plain_logit"] for found in record["divergences"])
