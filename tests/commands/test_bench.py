"""`toolkit bench` as it is typed: forced acceptance, and two records side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit import cli
from toolkit.bench.records import read_record

SMALL = ["--limit", "6", "--max-tokens", "12", "--warmup", "0"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_measure_force_and_compare(tiny_draft_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = ["bench", "acceptance", "--draft", str(tiny_draft_directory), *SMALL]
    assert cli.main([*head, "--shape", "3,1,4", "--out", "a.json"]) == 0
    capsys.readouterr()
    assert cli.main([*head, "--shape", "3,1,4", "--force-accept-length", "0.9,0.5", "--out", "b.json"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "forced accept_length 2.35" in words
    assert read_record("b.json")["settings"]["forced_accept_rate"] == [0.9, 0.5]
    assert "forced accept_length 2.35" in Path("b.html").read_text()
    assert cli.main(["bench", "compare", "a.json", "a.json"]) == 0
    assert "+0.00" in capsys.readouterr().out
    assert cli.main(["bench", "compare", "a.json", "b.json"]) == 2
    assert "a.json and b.json cannot be compared, since they differ in forced_accept_length" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--force-accept-length 9 --shape 3,1,4", "at most accept_length 4"),
        ("--force-accept-length 2", "adaptive drafting are both asked for"),
    ],
)
def test_a_force_that_cannot_work_is_refused_before_the_target_loads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, says: str
) -> None:
    monkeypatch.setattr("toolkit.pipeline.measure.load_models", lambda *_: pytest.fail("the models were loaded"))
    assert cli.main(["bench", "acceptance", "--draft", "ngram", "--target", "t", *line.split()]) == 2
    assert says in capsys.readouterr().err
