"""`toolkit forecast` and `toolkit search` as they are typed, on tiny targets. Times are not looked at."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.native_targets import SERVES_HYBRIDS, write_native_target
from tests.conftest import train_tokenizer
from toolkit import cli
from toolkit.bench.records import read_record
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.load.load_engine import load_engine
from toolkit.weights import read_json

SMALL = ["--limit", "3", "--max-tokens", "12", "--top-k", "1", "2", "--num-steps", "2", "--num-draft-tokens", "4"]
SHAPES = ["1,1,2", "2,1,3", "1,2,3", "2,2,4"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    for few in ("step_times.TURNS", "step_times.AGAIN_TURNS", "search.PASSES"):
        monkeypatch.setattr(f"toolkit.bench.{few}", 1)


@pytest.fixture
def draft(tiny_draft_directory: Path) -> Path:
    return Path(shutil.copytree(tiny_draft_directory, "ckpt"))


def shapes_in(record: dict) -> list[str]:
    return [f"{row['num_steps']},{row['top_k']},{row['num_draft_tokens']}" for row in record["rows"]]


def test_forecast_prints_tables(draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The draft directory names the target; nothing else is needed."""
    assert cli.main(["forecast", "--draft", str(draft), *SMALL, "--out", "f.json"]) == 0
    out = capsys.readouterr().out
    assert "top_k 1: chains, by levels" in out and "top_k 2: levels downwards" in out
    assert out.splitlines()[-1] == "f.json"
    record = read_record("f.json", "forecast")
    assert shapes_in(record) == SHAPES and record["settings"]["max_tokens"] == 12
    assert all(row["accept_length"] >= 1 and row["verify_steps"] > 0 for row in record["rows"])


def test_forecast_of_rollouts(draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last answer of each row is replayed, and nothing is decoded; tests/bench has the values."""
    target = read_json(draft / "config.json")["toolkit"]["target"]["name"]
    row = {
        "messages": [{"role": "user", "content": "words"}], "input_ids": [*range(5, 25)],
        "response_spans": [[2, 3], [8, 20]], "provenance": {"target": target, "temperature": 0.0},
    }  # fmt: skip
    Path("rollouts.jsonl").write_text("".join(json.dumps(row | {"id": name}) + "\n" for name in "ab"))
    line = ["forecast", "--draft", str(draft), "--rollouts", "rollouts.jsonl", *SMALL[4:], "--out", "f.json"]
    assert cli.main(line) == 0
    assert "2 prompts, 2 answers of at most 12 tokens, temperature 0" in " ".join(capsys.readouterr().out.split())
    record = read_record("f.json", "forecast")
    assert record["settings"]["rollouts"] == "rollouts.jsonl" and record["rows"][0]["verify_steps"] > 0
    assert cli.main([*line, "--limit", "1"]) == 0 and read_record("f.json")["answers"] == 1
    capsys.readouterr()
    assert cli.main([*line, "--temperature", "1"]) == 2
    assert "--temperature is for answers that are written here" in capsys.readouterr().err


def test_search_and_what_starts_from_it(
    draft: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """More requests at once than prompts; the winners land in the draft directory, and a measurement takes them."""
    line = ["search", "--draft", str(draft), *SMALL, "--batch", "4", "1", "--out", "s.json"]
    assert cli.main(line) == 0
    out = capsys.readouterr().out
    assert "batch 1: " in out and "batch 4: " in out and "(best)" in out and out.count("; perfect drafts: ") == 2
    assert "or lookup where the text repeats itself. The other rows draft by the head alone." in " ".join(out.split())
    assert out.splitlines()[-2:] == ["s.json", "ckpt/search.json"]
    record, kept = read_record("s.json", "search"), json.loads(Path("ckpt/search.json").read_text())
    settings = {"plain", "adaptive", *SHAPES}
    for batch in ("1", "4"):
        rows = [row for row in record["rows"] if row["batch"] == int(batch)]
        assert [row["setting"] for row in rows if row["predicted_tokens_per_s"]] == ["plain", *SHAPES]
        assert sum(row["measured_tokens_per_s"] is not None for row in rows) == 6
        best = kept["found"]["greedy"][batch]
        assert (
            record["best"][batch].items() <= best.items()
            and best["times"]["batch"] == int(batch)
            and best["setting"] in settings
            and best["shape"] in SHAPES
        )
    assert kept["holds_for"]["tensor_parallel_size"] == 1
    measure = ["bench", "acceptance", "--draft", str(draft), "--limit", "2", "--max-tokens", "8", "--warmup", "0"]
    assert cli.main([*measure, "--batch", "4", "--out", "a.json"]) == 0
    assert "The shapes are those of ckpt/search.json for batch 4" in capsys.readouterr().out
    assert "adaptive drafting starts from the times in search.json" in caplog.text
    shapes = ["adaptive", "adaptive, no lookup", kept["found"]["greedy"]["4"]["shape"]]
    assert read_record("a.json")["settings"]["shapes"] == shapes
    assert cli.main([*measure, "--shape", "2,1,3", "--out", "a.json"]) == 0
    assert read_record("a.json")["settings"]["shapes"] == ["2,1,3"], "a shape that is given wins"


@pytest.mark.slow
def test_two_searches_are_kept_side_by_side(
    draft: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Greedy and sampled requests of other batch sizes; an engine starts from both."""
    line = ["search", "--draft", str(draft), *SMALL, "--out", "s.json"]
    assert cli.main(line) == 0
    out = capsys.readouterr().out
    assert "start from search.json on this machine, for greedy requests" in out
    assert "requests that state no temperature are sampled at 1 here" in out
    assert cli.main([*line, "--temperature", "1", "--batch", "4"]) == 0
    assert "for sampled, verify target requests" in capsys.readouterr().out
    found = json.loads(Path("ckpt/search.json").read_text())["found"]
    assert {kind: list(sizes) for kind, sizes in found.items()} == {"greedy": ["1"], "sampled, verify target": ["4"]}
    caplog.clear()
    load_engine(EngineConfig(draft=str(draft))).engine.close()
    assert "not used" not in caplog.text and "search.json" in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(not SERVES_HYBRIDS, reason="needs transformers 5.23 or later")
def test_a_hybrid_target_gets_chains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its linear-attention layers verify no trees: these are left out, and said. Its own MTP module has no folder."""
    target = str(write_native_target(tmp_path / "hybrid", "qwen3.5", train_tokenizer(), agreeing=True))
    for command in ("forecast", "search"):
        assert cli.main([command, "--target", target, *SMALL, "--out", f"{command}.json"]) == 0
        assert "top_k 2 is left out: the target has linear-attention layers, and verifies chains only" in caplog.text
    assert shapes_in(read_record("forecast.json")) == SHAPES[:2]
    assert read_record("search.json")["best"]["1"]["shape"] in SHAPES[:2]
    assert "since the target's own MTP module has no draft directory for search.json" in caplog.text
    assert cli.main(["forecast", "--target", target, *SMALL, "--top-k", "2"]) == 2
    assert "give a smaller top_k, such as 1 (chains)" in capsys.readouterr().err


def test_flags_for_other_engines(draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["search", "--draft", str(draft), *SMALL[:4], "--num-steps", "3", "--batch", "1", "64"]
    assert cli.main([*line, "--for", "sglang", "--gpu", "H100"]) == 0
    out = capsys.readouterr().out
    assert "sglang on H100" in out and "batch 1: " in out and "batch 64: " in out and not Path("runs").exists()
    assert cli.main([*line, "--for", "vllm", "--step-ms", "1:7.1"]) == 0
    assert "vllm on H100, step times as given" in capsys.readouterr().out
    assert not (draft / "search.json").exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--batch 0", "--batch is 0; at least 1 is needed"),
        ("--for vllm --top-k 4", "top_k is 4, and vLLM drafts chains only"),
        ("--for sglang --out x.json", "--out is for a search here"),
    ],
)
def test_options_that_contradict(draft: Path, line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["search", "--draft", str(draft), *line.split()]) == 2
    assert says in capsys.readouterr().err
