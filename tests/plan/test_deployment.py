"""Steps, memory, batches and the queue: on a small dense and a small sparse model whose numbers fit on paper."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from toolkit.errors import PlanError
from toolkit.plan.deployment import Planner, Workload
from toolkit.plan.launch import draft_schedule, launch_lines
from toolkit.plan.model_size import Attention, Cache, DraftCost, ModelSize
from toolkit.plan.step_time import GPUS, Costs, Layout, Rank

GPU = GPUS["H100"]
RANK = Rank(GPU, Layout(1))


def attention(token_bytes, shards, flops) -> Cache:
    """All layers as one; prefill costs a tenth where decoding is expensive, as in latent attention."""
    return Cache((Attention(1, token_bytes, flops, min(flops, 5e5)),), shards)


DENSE = ModelSize("dense", 4096, 32, 32, 7e9, 0.5e9, 0.5e9, attention(128 * 1024, 8, 5e5))
SPARSE = ModelSize(
    "sparse", 4096, 32, 32, 10e9, 0.5e9, 0.5e9, attention(64 * 1024, 1, 5e6), 8, 160e9, 128, 8, moe_layers=32
)
HEAD = ModelSize("head", 4096, 32, 1, 0.25e9, 0.1e9, 0.0, attention(4096, 8, 2e4))
DRAFT = DraftCost("eagle3", HEAD, {1: 1.7, 3: 2.4, 7: 2.6}, "as stated", "HEAD")


def planner(size=DENSE, draft=DRAFT, **work) -> Planner:
    return Planner(size, draft, GPU, Workload(**{"input": 1000, "output": 500, **work}), Costs())


def test_a_step_by_hand():
    """One GPU, one token: 7.5e9 weights of 2 bytes and 1,000 tokens of cache at 0.8 of 3.35 TB/s, and 32 layers."""
    seconds = RANK.forward_s(DENSE, requests=1, tokens=1, context=1000)
    by_hand = (15e9 + 1000 * 128 * 1024) / (0.8 * 3.35e12) + 32 * Costs().layer_s
    assert seconds == pytest.approx(by_hand, rel=1e-12)
    many = RANK.forward_s(DENSE, requests=2000, tokens=1, context=0)
    assert many == pytest.approx(2 * 2000 * 7.5e9 / (0.5 * 989e12) + 32 * Costs().layer_s, rel=1e-12)


def test_a_round_is_its_parts():
    """k drafts: the target over k + 1 tokens, the head once over those and k - 1 times over one; the host if asked."""
    common = {"requests": 4, "context": 2000}
    target, first = (RANK.forward_s(size, tokens=4, **common) for size in (DENSE, HEAD))
    parts = target + first + 2 * RANK.forward_s(HEAD, tokens=1, **common) + Costs().round_s + 3 * Costs().pass_s
    assert RANK.round_s(DENSE, HEAD, drafts=3, **common) == pytest.approx(parts)
    assert RANK.round_s(DENSE, HEAD, drafts=3, overlap=False, **common) == pytest.approx(parts + Costs().host_s)


def test_memory_bounds_the_batch():
    """80 GB: 0.88 of it less the weights of target and head, over the cache of whole requests, target's and head's."""
    most = planner(concurrency=1).most_requests(Layout(1))
    assert most == int((0.88 * 80e9 - 16e9 - 0.25e9 * 2 - 0.1e9 * 2) / (1500 * (128 * 1024 + 4096)))
    assert planner(concurrency=1, input=10**6).most_requests(Layout(1)) == 0
    with pytest.raises(PlanError, match=r"does not fit 2 H100: 172\.0 GB of weights"):
        planner(SPARSE, None, concurrency=1).best(2)
    with pytest.raises(PlanError, match="as tp3"):
        replace(planner(concurrency=1), only=(3, False)).best(8)


def test_longer_drafts_for_smaller_batches():
    """As SGLang's report advises: long chains while there is headroom, short ones or none when a GPU is busy."""
    mine = planner(concurrency=4096)
    table = mine.table(mine.best(1))
    drafts = [batch.drafts for batch in table]
    assert drafts == sorted(drafts, reverse=True) and drafts[0] == 3 and drafts[-1] == 1
    assert all(batch.gain >= 1 for batch in table)
    schedule = draft_schedule(table)
    assert schedule[0][0] == 1 and schedule[-1][1] == table[-1].requests
    assert all(before[1] + 1 == after[0] for before, after in zip(schedule, schedule[1:], strict=False))


def test_requests_in_flight_bound_throughput():
    """Little's law: requests per second times the seconds of a request are the requests in flight. The prompts of
    others interrupt a request's rounds, its own does not."""
    mine = planner(concurrency=8)
    best = mine.best(1)
    reads = RANK.prefill_s(DENSE, 1000)
    assert best.batch.requests == 8
    assert best.requests_per_s * 8 * (reads + 500 / best.batch.tokens_per_s) == pytest.approx(8)
    assert best.tpot_s == pytest.approx(best.batch.round_s / best.batch.committed + 7 * reads / 500)
    assert planner(concurrency=4).best(8).requests_per_s < planner(concurrency=64).best(8).requests_per_s


def test_waiting_grows_with_the_load():
    """M/D/1: at a load of 1/2 a request waits half the time of a prefill."""
    reads = RANK.prefill_s(DENSE, 1000)
    best = planner(draft=None, rate=0.5 / reads, output=1).best(1)
    assert best.ttft_s == pytest.approx(reads + best.batch.round_s / 2 + reads / 2)


def test_launch_lines_of_two_nodes():
    """Every node has its line; the numbers on it are the plan's, and each engine's words are its own."""
    mine = replace(planner(SPARSE, replace(DRAFT, kind="mtp", path=None), concurrency=256), only=(16, True))
    best = mine.best(16)
    table = mine.table(best)
    first, further = launch_lines("sglang", ["org/m", "--revision", "r"], best, mine.draft, table)[1:]
    for words in (
        "--model-path org/m --revision r",
        "--tp-size 16",
        "--dp-size 16 --enable-dp-attention",
        f"--speculative-num-steps {best.batch.drafts} --speculative-eagle-topk 1",
        f"--max-running-requests {best.batch.requests * 16}",
    ):
        assert words in first
    assert "draft-model-path" not in first
    assert first.endswith("--node-rank 0") and further == first[:-1] + "K"
    lines = launch_lines("vllm", ["org/m"], best, mine.draft, table)
    assert "--data-parallel-size 16 --enable-expert-parallel" in lines[1] and lines[2].endswith("--headless")
    config = json.loads(lines[1].split("--speculative-config '")[1].split("'")[0])
    assert config["method"] == "mtp" and [tuple(one) for one in config["num_speculative_tokens_per_batch_size"]]
