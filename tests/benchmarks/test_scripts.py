"""One smoke of each benchmark, on tiny models: it runs, and its record has the rows that it is for. No times."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from toolkit.bench.records import read_record
from toolkit.infer.cpu import blocked_product

WITHOUT_GPU = "--device cpu --target tiny --context 20 --rounds 2 --repeats 1".split()


@pytest.fixture(autouse=True)
def threads(monkeypatch) -> None:
    """Tests that follow compute with as many as before."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


def test_engines_on_a_cpu(script, monkeypatch, draft_directory, tmp_path) -> None:
    """An engine that stops early, or decodes another prompt, would win the race by not running it."""
    cpu, worker, out = script("engine_cpu"), script("engine_worker"), tmp_path / "record.json"

    class InProcess:
        def __init__(self, settings, threads, python=None, more=None):
            self.asked = settings

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *_: None  # noqa: E731

        def wait_until_loaded(self):
            if self.asked["engine"] == "vllm":
                raise cpu.ProgramError("no such module")
            self.engine = worker.ENGINES[self.asked["engine"]](self.asked)
            self.version, self.weight_bits, self.most, self.settings = (
                getattr(self.engine, name) for name in ("version", "weight_bits", "most", "settings")
            )

        def answer(self, prompts, max_tokens):
            began = time.perf_counter()
            told = self.engine.answer(prompts, max_tokens)
            return {"seconds": time.perf_counter() - began, "peak_memory_bytes": 1, **told}

    monkeypatch.setattr(cpu, "EngineProcess", InProcess)
    monkeypatch.setattr(cpu, "find_spec", lambda name: None)  # torchao, whatever this machine has
    sizes = "--limit 2 --max-tokens 6 --batch 1 --repeats 1 --tree 3,3,8".split()
    rivals = ["--vllm-python", sys.executable]
    assert cpu.main(["--draft", str(draft_directory), *sizes, *rivals, "--out", str(out)]) == 0
    record = read_record(out, "engine")
    ours = ["ours-plain", "ours-eagle3-chain", "ours-eagle3-tree", "ours-eagle3-adaptive", "ours-null", "ours-ngram"]
    assert [row["engine"] for row in record["rows"]] == [*ours, "hf-generate", "hf-prompt-lookup"]
    assert all(row["tokens_equal"] and row["tokens"] == 12 for row in record["rows"])
    rivals = ("vllm-cpu", "vllm-cpu-ngram", "vllm-cpu-eagle3")
    assert all(record["left_out"][name] == "no such module" for name in rivals), "planned, and their heads exported"
    assert {"llama.cpp", "hf-generate-torchao-int8"} <= record["left_out"].keys()


@pytest.mark.slow
def test_the_engine_on_a_gpu(script, tmp_path) -> None:
    """Every entrant has a row with its kernels, and with its parts where it is recorded."""
    out = tmp_path / "record.json"
    line = "--hows graph eager --shapes 3,1,4 --hf-batch --kernels --force-accept-length 3"
    assert script("engine_gpu").main([*WITHOUT_GPU, *line.split(), "--out", str(out)]) == 0
    record = read_record(out, "engine")
    names = [f"ours-{what}-{how}" for how in ("graph", "eager") for what in ("plain", "chain")]
    assert [row["engine"] for row in record["rows"]] == names and not record["left_out"]
    assert all(row["parts"]["verify"] > 0 for row in record["rows"][:2])
    assert all(row["kernels"]["count"] > 50 for row in record["rows"])


@pytest.mark.slow
def test_block_heads_on_a_gpu(script, tmp_path) -> None:
    """Trees of one pass have a row for each budget, with their parts, and predictions stand beside."""
    out = tmp_path / "record.json"
    line = "--kind dspark --hows graph --shapes 16 256 --hf-batch --out".split()
    assert script("engine_gpu").main([*WITHOUT_GPU, *line, str(out)]) == 0
    record = read_record(out, "engine")
    assert [row["shape"] for row in record["rows"]] == ["plain", "tree of 16", "tree of 256"]
    assert all(row["parts"]["draft"] > 0 for row in record["rows"][1:]) and record["predicted"]["ours-plain-graph"]


@pytest.mark.slow
def test_cliffs_on_a_gpu(script, tmp_path, monkeypatch) -> None:
    cliffs, out = script("cliffs_gpu"), tmp_path / "record.json"
    monkeypatch.setattr(cliffs, "GROUPS", (cliffs.GROUPS[1], cliffs.GROUPS[-1]))
    assert cliffs.main([*WITHOUT_GPU, "--out", str(out)]) == 0
    record = read_record(out, "cliffs")
    assert not record["left_out"] and len(record["rows"]) == 2 * (2 + 4)


def test_a_training_step_on_a_gpu(script, tmp_path) -> None:
    out = tmp_path / "record.json"
    line = "--device cpu --target tiny --length 64 --steps 2 --repeats 1".split()
    assert script("training_gpu").main([*line, "--out", str(out)]) == 0
    rows = read_record(out, "training")["rows"]
    assert [row["row"] for row in rows] == ["as is", "packed"] and all(row["parts"]["head"] > 0 for row in rows)


def test_never_slower(script, tiny_target_directory, draft_directory, tmp_path) -> None:
    out = tmp_path / "record.json"
    line = f"--target {tiny_target_directory} --draft {draft_directory} --shape 3,1,4 --batch 1 2".split()
    assert script("never_slower").main([*line, "--limit", "2", "--max-tokens", "8", "--out", str(out)]) == 0
    rows = read_record(out, "engine")["rows"]
    assert [(row["batch"], row["groups"], row["draft"]) for row in rows] == [
        (batch, groups, draft) for batch, groups in ((1, 5), (2, 5)) for draft in ("random head", str(draft_directory))
    ]
    assert all(row["ratio"] > 0 for row in rows)


def test_deterministic(script, draft_directory, tmp_path) -> None:
    """A row for each schedule with the option and without; with it nothing may be unequal."""
    out, chosen = tmp_path / "record.json", ["prefix reuse", "tree 4,4,16"]
    line = ["--draft", str(draft_directory), "--variants", "bfloat16", "--limit", "4", "--max-tokens", "9"]
    line += ["--repeats", "1", "--out", str(out), "--schedules"]
    assert script("deterministic").main([*line, *chosen]) == 0
    rows = read_record(out, "deterministic")["rows"]
    assert [(row["schedule"], row["deterministic"]) for row in rows] == [(n, f) for n in chosen for f in (False, True)]
    assert all(row["equal"] == 4 and row["cost"] > 0 for row in rows if row["deterministic"])


def test_rollouts(script, tiny_target_directory, tmp_path) -> None:
    """Both write the same answers in float32."""
    out = tmp_path / "record.json"
    line = ["--target", str(tiny_target_directory), "--hf-dtype", "float32", "--max-tokens", "6", "--limit", "4"]
    assert script("rollouts").main([*line, "--batch", "2", "--out", str(out)]) == 0
    rows = read_record(out, "engine")["rows"]
    assert [row["engine"] for row in rows] == ["ours", "hf-generate-float32"]
    assert all(row["equal"] == row["answers"] == 4 for row in rows)


@pytest.mark.process
def test_servers(script, tiny_target_directory, draft_directory, tmp_path, monkeypatch) -> None:
    """Ours with and without the head; a server that does not start is named with its last words."""
    broken, out = tmp_path / "python", tmp_path / "record.json"
    broken.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
    broken.chmod(0o755)
    words = ["--draft", str(draft_directory), "--target", str(tiny_target_directory), "--dtype", "float32"]
    words += ["--limit", "3", "--max-tokens", "6", "--clients", "2", "--context-length", "512"]
    words += ["--transformers-python", str(broken), "--out", str(out), "--head-flags=--shape 4,1,5"]
    monkeypatch.setattr(sys, "argv", ["benchmarks/serve.py", *words])
    assert script("serve").main(words) == 0
    record = read_record(out, "server")
    assert [row["server"] for row in record["rows"]] == ["ours-plain", "ours-eagle3"]
    assert all(row["errors"] == 0 == row["other_texts"] and row["requests"] == 3 for row in record["rows"])
    assert record["left_out"]["transformers-batching"] == "its process ended with 3: no such module"


@pytest.mark.skipif(not blocked_product.available(), reason="this machine has no packed products")
def test_products_on_a_cpu(script, tiny_target_directory, tmp_path) -> None:
    """A row for each number of rows that a step has."""
    out = tmp_path / "record.json"
    line = ["--target", str(tiny_target_directory), "--dtype", "bfloat16", "--limit", "2", "--max-tokens", "40"]
    assert script("products_cpu").main([*line, "--rows", "6", "--out", str(out)]) == 0
    rows = read_record(out, "products")["rows"]
    assert [row["rows"] for row in rows] == [1, 6] and all(row["step_ms"] > 0 < row["products_ms"] for row in rows)
