"""The scripts about equal bits, on a tiny target: what their record says, and which operation they name."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.conftest import build_target
from toolkit.bench.records import read_record
from toolkit.infer.cache.cache_manager import MemorySettings
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams

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


def test_the_operation_that_differs_is_named(script, tiny_draft):
    """An activation that rounds by the number of rows is the source; what follows from it is none."""
    tool, target = script("bit_sources"), build_target()
    act, prompt = target.layers[1].mlp.act_fn, [random.Random(0).randrange(1, 200) for _ in range(20)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    alone, drafting = (
        Engine(target, draft, shape, max_running_requests=1, deterministic=True)
        for draft, shape in ((None, None), (tiny_draft, DraftShape.chain(4)))
    )
    _, first_trace = tool.traced(alone, [prompt], params)
    own = act.forward
    act.forward = lambda x: own(x) if x[..., 0].numel() != 5 else own(x) * (1 + 2**-20)
    _, second_trace = tool.traced(drafting, [prompt], params)
    (found,) = tool.sources(first_trace, second_trace).items()
    assert found[0] == type(act).__name__ and found[1].first == "layers.1.mlp.act_fn, token 20"
    assert 7 <= found[1].differs < found[1].results
    # From where the answers part, another token's numbers are no sign of a source.
    other_token = ("embed_tokens", "Embedding", b"another", b"another")
    parted = {place: ops if place < 23 else [other_token, *ops[1:]] for place, ops in second_trace.items()}
    assert [(kind, one.differs) for kind, one in tool.sources(first_trace, parted).items()] == [(found[0], 3)]


def test_the_record_of_sources(script, tiny_target_directory, tmp_path, monkeypatch):
    """With the option no operation may be named; a schedule without a source has a row that says so."""
    tool, out = script("bit_sources"), tmp_path / "record.json"
    eager = {name: options for name, options in tool.SCHEDULES.items() if "torch_compile" not in options}
    monkeypatch.setattr(tool, "SCHEDULES", eager)
    words = ["--target", str(tiny_target_directory), "--max-tokens", "4", "--out", str(out)]
    assert tool.main([*words, "--variants", "bfloat16", "int8"]) == 0
    rows = read_record(out, "bit_sources")["rows"]
    with_option = [row for row in rows if row["deterministic"]]
    assert [row["schedule"] for row in with_option] == 2 * ["parts of 16", "parts of 64", "beside 7"]
    assert [row["quantization"] for row in with_option] == 3 * [None] + 3 * ["int8"]
    assert all(row["operation"] is None and row["differs"] == 0 and row["tokens"] > 20 for row in with_option)
    assert any(row["differs"] and 0 < row["share"] <= 1 for row in rows if not row["deterministic"])


@pytest.mark.compile
def test_a_compiled_layer_that_rounds_by_row_count_is_named(script, monkeypatch):
    """Modules have no hooks there: what differs in a layer shows at the attention that gets it, in the layer behind."""
    tool, target = script("bit_sources"), build_target()
    prompt = [random.Random(0).randrange(1, 200) for _ in range(20)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    alone, parts = (
        Engine(target, max_running_requests=1, torch_compile=True, memory=MemorySettings(chunked_prefill_size=size))
        for size in (64, 5)
    )
    _, first_trace = tool.traced(alone, [prompt], params)
    assert [name for name, *_ in first_trace[3]] == [
        "ids",
        *(f"layers.{one}" for one in range(len(target.layers))),
        "output",
    ]
    own = tool._Attending.attend

    def off(self, at, q, k, v, scoring):
        out = own(self, at, q, k, v, scoring)
        return out * (1 + 2**-5) if at == 0 and q.shape[2] == 5 else out

    monkeypatch.setattr(tool._Attending, "attend", off)
    _, second_trace = tool.traced(parts, [prompt], params)
    found = tool.sources(first_trace, second_trace)
    assert found["before attention"].first == "layers.1, token 0"
