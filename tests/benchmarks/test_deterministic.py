"""The scripts about equal bits, on a tiny target: what their record says, and which operation they name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from toolkit.bench.records import read_record

WORDS = ["--limit", "4", "--max-tokens", "9", "--repeats", "1"]


def test_the_record_of_schedules(script, draft_directory, tmp_path):
    """A row for each schedule with the option and without; with it nothing may be unequal. A second run resumes."""
    out = tmp_path / "record.json"
    words = ["--draft", str(draft_directory), "--variants", "bfloat16", *WORDS, "--out", str(out), "--schedules"]
    chosen = ["preempted", "prefix reuse", "tree 4,4,16"]
    assert script("deterministic").main([*words, *chosen]) == 0
    rows = read_record(out, "deterministic")["rows"]
    assert [(row["schedule"], row["deterministic"]) for row in rows] == [(n, f) for n in chosen for f in (False, True)]
    assert all(row["equal"] == row["requests"] == 4 and not row["unequal"] for row in rows if row["deterministic"])
    assert rows[3]["cached_tokens"] and all(row["cost"] > 0 for row in rows if row["deterministic"])
    assert script("deterministic").main([*words, "preempted", "batch 4", "--resume"]) == 0
    resumed = read_record(out)["rows"]
    assert resumed[:6] == rows and [row["schedule"] for row in resumed[6:]] == ["batch 4"] * 2
    with pytest.raises(ValueError, match="name the same options"):
        script("deterministic").main([*words, *chosen, "--resume", "--max-tokens", "8"])


def test_transformers_in_the_record(script, tiny_target_directory, tmp_path):
    """A prompt that is padded at the wrong side, or an answer cut elsewhere than ours, would differ in float32 too."""
    out = tmp_path / "record.json"
    words = ["--target", str(tiny_target_directory), "--variants", "float32", "int8", *WORDS, "--out", str(out)]
    assert (
        script("deterministic").main([*words, "--engines", "transformers", "--schedules", "batch 4", "preempted"]) == 0
    )
    (row,) = read_record(out)["rows"]
    assert (row["engine"], row["schedule"], row["dtype"]) == ("transformers", "batch 4", "float32")
    assert row["equal"] == row["requests"] == 4 and row["version"]


def test_a_rival_that_answers_otherwise_in_a_batch(script, tiny_target, monkeypatch):
    """vLLM gets all prompts, its options and what drafts; what it writes behind a stop id or the asked length is no
    difference. Chains need a head of its kind."""
    tool, asked, rows = script("deterministic_rivals"), [], []
    stop = min(tiny_target.stop_ids)

    class Process:
        version, settings = "1.2", "threads: 1"

        def __init__(self, settings, threads, python):
            asked.append((settings["max_running_requests"], settings["options"], settings["draft"], python))
            self._last = len(asked)

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *_: None  # noqa: E731

        def wait_until_loaded(self):
            pass

        def answer(self, prompts, max_tokens):
            assert (len(prompts), max_tokens) == (3, 4)
            return {"seconds": 2.0, "output_ids": [[5, 6, 7, self._last], [stop, *[self._last] * 3], [self._last] * 4]}

    monkeypatch.setattr(tool, "EngineProcess", Process)
    run = tool.RivalRun("vllm", tiny_target, [[1], [2, 3], [4]], [3, 4, 2], 1, "python")
    run.rows(["batch 4", "chunks of 64", "n-gram 4,1,5", "chain 4,1,5"], rows.append)
    chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64}
    alone, four, parts, lookup = asked
    assert [alone, four] == [(1, {}, None, "python"), (4, {}, None, "python")]
    assert [parts, lookup] == [(4, chunks, None, "python"), (4, {}, "ngram", "python")]
    assert [(row["equal"], row["unequal"], row["seconds"]) for row in rows] == [(2, 1, 2.0)] * 3
    monkeypatch.setattr(tool, "exported", lambda head, to, folder, *_: f"{head.kind} for {to}")
    replace(run, head=SimpleNamespace(kind="eagle3")).rows(["chain 4,1,5"], rows.append)
    assert asked[-1] == (4, {}, "eagle3 for vllm", "python")
