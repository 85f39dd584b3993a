"""The server benchmark on tiny models: its rows, what is left out, and 200 clients who leave nothing. No times."""

from __future__ import annotations

import asyncio
import random
import sys
import threading

import httpx
import pytest

from toolkit.bench.records import read_record
from toolkit.infer.cache.cache_manager import MemorySettings
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape

DESIGNED = {
    "server", "clients", "requests", "ttft_p50", "ttft_p99", "tpot_p50", "tokens_per_s", "errors", "leaked_pages",
}  # fmt: skip


@pytest.mark.soak
def test_two_hundred_clients(script, tiny_target, tiny_draft, record_property):
    """Answers of a batch, a tree, a prefix or a row that belong to another request; pages, threads or memory that stay
    after aborts and deadlines. Wrong answers do not depend on the times; what ends how does, so little is asked of it.
    """
    soak = script("serve_soak")
    chance = random.Random(5)
    sizes = [chance.choice((2, 9, 40)) for _ in range(24)]
    prompts = [[chance.randrange(3, tiny_target.vocab_size) for _ in range(size)] for size in sizes]
    prompts += [prompts[0] + prompts[1], prompts[2] * 3]
    wanted = soak.plain_answers(tiny_target, prompts)
    engine = Engine(
        tiny_target, tiny_draft, DraftShape.parse("3,2,6"), max_running_requests=16, context_length=256, adaptive=True,
        memory=MemorySettings(2048, chunked_prefill_size=64),
    )  # fmt: skip
    with soak.server_of(soak.served_of(engine, tiny_target, "tree")) as url:
        asyncio.run(soak.soak(url, prompts, wanted, requests=1))
        assert soak.leaked_pages(engine) == 0
        memory, threads = soak.resident_bytes(), threading.active_count()
        found = asyncio.run(soak.soak(url, prompts, wanted, seed=1))
        assert soak.leaked_pages(engine) == 0
        assert threading.active_count() <= threads
        assert soak.resident_bytes() - memory < 64 * 2**20
        assert httpx.get(f"{url}/ready").status_code == 200
    engine.close()
    assert not found.wrong, found.wrong[:3]
    assert found.seen["complete"] > 300 and found.seen["left"] > 20 and sum(found.seen.values()) == 800
    assert found.seen["cut"] + found.seen["too late"] > 10
    record_property("ttft_p99", soak.times(found.first_s, found.per_token_s)["ttft_p99"])


@pytest.mark.process
def test_the_record(script, tiny_target_directory, draft_directory, tmp_path, monkeypatch):
    """Ours with and without the head; what has no row is named, a server that does not start with its last words."""
    serve = script("serve")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
    broken.chmod(0o755)
    out = tmp_path / "record.json"
    words = ["--draft", str(draft_directory), "--target", str(tiny_target_directory), "--dtype", "float32"]
    words += ["--limit", "3", "--max-tokens", "6", "--clients", "1", "2", "--context-length", "512"]
    words += ["--transformers-python", str(broken), "--out", str(out), "--head-flags=--shape 4,1,5"]
    monkeypatch.setattr(sys, "argv", ["benchmarks/serve.py", *words])
    assert serve.main(words) == 0
    record = read_record(out, "server")
    assert [(row["server"], row["clients"]) for row in record["rows"]] == [
        ("ours-plain", 1), ("ours-eagle3", 1), ("ours-plain", 2), ("ours-eagle3", 2),
    ]  # fmt: skip
    for row in record["rows"]:
        assert DESIGNED <= row.keys() and row["requests"] == 3 and row["errors"] == 0 == row["other_texts"]
        assert row["tokens"] >= 3 and row["ttft_p50"] <= row["ttft_p99"]
    assert record["left_out"]["transformers"] == "its process ended with 3: no such module"
    assert "--vllm-python" in record["left_out"]["vllm"]


def test_vllm_runs_as_its_page_for_cpus_says(script, tmp_path, monkeypatch):
    """Without its libraries, or with all of its threads on one core, vLLM would look slower than it is."""
    processes = script("serve_processes")
    monkeypatch.setattr("ctypes.util.find_library", "lib{}.so.4".format)
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: {5, 3, 8}, raising=False)
    monkeypatch.setattr(processes, "threads_of_all", lambda: 2)
    monkeypatch.setenv("LD_PRELOAD", "mine.so")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    args = script("serve").arguments().parse_args(["--vllm-python", str(tmp_path / "bin" / "python")])
    own, bound = processes._vllm(args, "target", "head")
    assert (own.name, bound.name) == ("vllm-eagle3", "vllm-eagle3-all-cores")
    preloaded = f"libtcmalloc_minimal.so.4:{tmp_path}/lib/libiomp5.so:mine.so"
    assert own.environment["LD_PRELOAD"] == bound.environment["LD_PRELOAD"] == preloaded
    assert own.environment["VLLM_CPU_OMP_THREADS_BIND"] == "auto"
    assert bound.environment["VLLM_CPU_OMP_THREADS_BIND"] == "3,5" and "bound to: 3,5" in bound.settings


def test_vllm_counts_its_drafts(script):
    """Its counters have labels, and others that begin alike."""
    text = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 87.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="target"} 261.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} 30.0
"""
    assert script("serve_processes").drafts_of(text) == (87.0, 40.0)
    assert script("serve_processes").drafts_of("") == (0.0, 0.0)


def test_quantiles(script):
    """The p99 of few values is their largest one."""
    quantile = script("serve_clients").quantile
    assert quantile([], 0.5) is None and quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(range(100), 0.99) == 99 and quantile([1.0], 0.99) == 1.0
