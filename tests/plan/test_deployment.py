"""Layouts, memory, batches and the queue: on a small dense and a small sparse model whose numbers fit on paper."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from toolkit.errors import PlanError
from toolkit.heads.dspark import DSparkConfig
from toolkit.plan.deployment import Planner, Workload
from toolkit.plan.draft_cost import DraftCost
from toolkit.plan.gpus import GPUS
from toolkit.plan.launch import draft_schedule, launch_lines
from toolkit.plan.make_plan import calibrated
from toolkit.plan.model_size import Cache, ModelSize
from toolkit.plan.plan_text import draft_table
from toolkit.plan.step_time import Costs, Layout, forward_s, prefill_s, round_s, weight_bytes

GPU = GPUS["H100"]
DENSE = ModelSize("dense", 4096, 32, 32, 7e9, 0.5e9, 0.5e9, Cache(128 * 1024, 8, 5e5, 5e5))
SPARSE = ModelSize(
    "sparse", 4096, 32, 32, 10e9, 0.5e9, 0.5e9, Cache(64 * 1024, 1, 5e6, 5e5), 8, 160e9, 128, 8, moe_layers=32
)
HEAD = ModelSize("head", 4096, 32, 1, 0.25e9, 0.1e9, 0.0, Cache(4096, 8, 2e4, 2e4))
DRAFT = DraftCost("eagle3", HEAD, {1: 1.7, 3: 2.4, 7: 2.6}, "as stated", "HEAD")


def planner(size=DENSE, draft=DRAFT, **work) -> Planner:
    return Planner(size, draft, GPU, Workload(**{"input": 1000, "output": 500, **work}), Costs())


def test_a_step_by_hand():
    """One GPU, one token: 7.5e9 weights of 2 bytes and 1,000 tokens of cache at 0.8 of 3.35 TB/s, and 32 layers."""
    seconds = forward_s(DENSE, GPU, Layout(1), Costs(), requests=1, tokens=1, context=1000)
    by_hand = (15e9 + 1000 * 128 * 1024) / (0.8 * 3.35e12) + 32 * Costs().layer_s
    assert seconds == pytest.approx(by_hand, rel=1e-12)
    many = forward_s(DENSE, GPU, Layout(1), Costs(), requests=2000, tokens=1, context=0)
    assert many == pytest.approx(2 * 2000 * 7.5e9 / (0.5 * 989e12) + 32 * Costs().layer_s, rel=1e-12)


def test_only_chosen_experts_are_read():
    """One row touches 8 of 128 experts in a layer, many touch all; two GPUs hold half of them each."""
    one, all_of_them = (forward_s(SPARSE, GPU, Layout(1), Costs(), requests=n, tokens=1, context=0) for n in (1, 1000))
    bandwidth = 0.8 * 3.35e12
    assert one == pytest.approx((11e9 + 160e9 * 8 / 128) / bandwidth + 32 * Costs().layer_s)
    assert all_of_them > 171e9 / bandwidth
    spread = Layout(2, data_parallel=True)
    assert weight_bytes(SPARSE, spread) == 10e9 + 2 * 1e9 + 80e9
    assert weight_bytes(SPARSE, Layout(2)) == (10e9 + 2 * 1e9 + 160e9) / 2
    assert weight_bytes(SPARSE, replace(spread, redundant=2)) == 12e9 + 80e9 * 130 / 128


def test_a_round_is_its_parts():
    """k drafts: the target over k + 1 tokens, the head once over those and k - 1 times over one; the host if asked."""
    common = {"gpu": GPU, "layout": Layout(1), "costs": Costs(), "requests": 4, "context": 2000}
    target, first = (forward_s(size, tokens=4, **common) for size in (DENSE, HEAD))
    later = forward_s(HEAD, tokens=1, **common)
    fixed = Costs().round_s + 3 * Costs().pass_s
    assert round_s(DENSE, HEAD, drafts=3, **common) == pytest.approx(target + first + 2 * later + fixed)
    waits = round_s(DENSE, HEAD, drafts=3, overlap=False, **common)
    assert waits == pytest.approx(target + first + 2 * later + fixed + Costs().host_s)
    assert round_s(DENSE, None, drafts=0, **common) == forward_s(DENSE, tokens=1, **common)


def test_memory_bounds_the_batch():
    """80 GB: 0.88 of it less the weights of target and head, over the cache of whole requests, target's and head's."""
    most = planner(concurrency=1).most_requests(Layout(1))
    assert most == int((0.88 * 80e9 - 16e9 - 0.25e9 * 2 - 0.1e9 * 2) / (1500 * (128 * 1024 + 4096)))
    assert planner(concurrency=1, input=10**6).most_requests(Layout(1)) == 0
    shared = replace(DRAFT, size=replace(HEAD, shared_head=True))
    borrowed = planner(draft=shared, concurrency=1).most_requests(Layout(1))
    assert borrowed == int((0.88 * 80e9 - 16e9 - 0.25e9 * 2) / (1500 * (128 * 1024 + 4096))) > most
    one = {"gpu": GPU, "layout": Layout(1), "costs": Costs(), "requests": 1, "tokens": 1, "context": 9}
    assert forward_s(shared.size, **one) == forward_s(HEAD, **one)  # read in every pass all the same
    # One latent vector serves all heads: every GPU of a tensor-parallel group keeps all of it.
    assert planner(SPARSE, None, concurrency=1).most_requests(Layout(4)) < 1024
    with pytest.raises(PlanError, match=r"does not fit 2 H100: 172\.0 GB of weights"):
        planner(SPARSE, None, concurrency=1).best(2)


def test_longer_drafts_for_smaller_batches():
    """As SGLang's report advises: long chains while there is headroom, short ones or none when a GPU is busy."""
    mine = planner(concurrency=4096)
    best, _ = mine.best(1)
    table = draft_table(mine, best)
    drafts = [batch.drafts for batch in table]
    assert drafts == sorted(drafts, reverse=True) and drafts[0] == 3 and drafts[-1] == 1
    assert all(batch.gain >= 1 for batch in table)
    schedule = draft_schedule(table)
    assert schedule[0][0] == 1 and schedule[-1][1] == table[-1].requests
    assert all(before[1] + 1 == after[0] for before, after in zip(schedule, schedule[1:], strict=False))


def test_requests_in_flight_bound_throughput():
    """Little's law: requests per second times the seconds of a request are the requests in flight."""
    mine = planner(concurrency=8)
    best, _ = mine.best(1)
    reads = prefill_s(DENSE, GPU, best.decode.layout, Costs(), 1000)
    assert best.prefill is None and best.batch.requests == 8
    assert best.requests_per_s * 8 * (reads + 500 / best.batch.tokens_per_s) == pytest.approx(8)
    few, many = (planner(concurrency=n).best(8)[0].requests_per_s for n in (4, 64))
    assert few < many


def test_prefill_is_disaggregated_where_that_helps():
    """Long prompts interrupt decoding: under a limit on the time per token, separate prefill engines serve more.
    Without a limit they do not; and neither limit nor rate is passed over in silence."""
    work = {"input": 8000, "output": 400, "rate": 25.0, "max_tpot_s": 0.006}
    best, other = planner(**work).best(16)
    assert best.prefill is not None and best.tpot_s <= 0.006 and best.requests_per_s == 25.0 and best.gpus == 16
    assert other is None or other.requests_per_s < 25.0 / 1.05
    free, apart = planner(input=500, output=2000, concurrency=64).best(8)
    assert free.prefill is None and apart is not None
    with pytest.raises(PlanError, match="use about .* GPUs"):
        planner(**{**work, "rate": 2000.0}).best(16)
    with pytest.raises(PlanError, match="reaches 0.1 ms per token"):
        planner(concurrency=8, max_tpot_s=1e-4).best(8)


def test_the_error_names_the_limit_that_cannot_be_met():
    """The layout, the limit on TPOT or the rate cannot be met: each has another remedy."""
    with pytest.raises(PlanError, match=r"cannot run on 8 H100 as tp3: .*--layout \(tp1, tp2, tp4, tp8\)"):
        replace(planner(concurrency=1), only=(3, False)).best(8)
    # Only two GPUs together are quick enough, of three: the third one reads, and cannot read so many prompts.
    free = planner(draft=None, input=8000, output=2, concurrency=1)
    one, two = (free.batch(Layout(gpus), 1).round_s for gpus in (1, 2))
    limits = {"draft": None, "input": 8000, "output": 2, "max_tpot_s": (one + two) / 2}
    assert planner(**limits, rate=1.0).best(3)[0].prefill is not None
    with pytest.raises(PlanError, match="cannot serve 1000 requests per second within .* ms per token, only lower"):
        planner(**limits, rate=1000.0).best(3)
    with pytest.raises(PlanError, match="no layout of 3 H100 reaches 0.1 ms per token"):
        planner(**{**limits, "max_tpot_s": 1e-4}, rate=1.0).best(3)


def test_waiting_grows_with_the_load():
    """M/D/1: at a load of 1/2 a request waits half the time of a prefill."""
    mine = planner(draft=None, rate=1.0)
    reads = prefill_s(DENSE, GPU, Layout(1), Costs(), 1000)
    half = replace(mine, work=replace(mine.work, output=1, rate=0.5 / reads), only=(1, False))
    together = [one for one in half._together(_engines(1)) if one.batch.requests == 1]
    assert together[0].ttft_s == pytest.approx(reads + together[0].batch.round_s / 2 + reads / 2)


def test_only_the_prompts_of_others_are_pauses():
    """b requests per rank: prefill of the b - 1 others interrupts a request's decoding. A single one never waits."""
    mine = planner(draft=None, concurrency=4)
    reads = prefill_s(DENSE, GPU, Layout(1), Costs(), 1000)
    found = {one.batch.requests: one for one in mine._together(_engines(1))}
    assert found[1].tpot_s == pytest.approx(found[1].batch.round_s)
    assert found[4].tpot_s == pytest.approx(found[4].batch.round_s + 3 * reads / 500)


def test_a_prompt_in_sliding_layers():
    """Query t sees min(t, w) keys: a triangle of w and then w a token; half a square where the window is longer."""
    heads = {"layer_s": 0.0, "prefill_share": 1.0}
    size = replace(DENSE, body=0.0, head=0.0, cache=Cache(0.0, 8, 0.0, 0.0, 100, 1.0, 6.0))
    for tokens in (40, 100, 1000):
        pairs = sum(min(t, 100) - 0.5 for t in range(1, tokens + 1))
        seconds = prefill_s(size, GPU, Layout(1), replace(Costs(), **heads), tokens)
        assert seconds * GPU.flops / 6 == pytest.approx(pairs, rel=0.01), tokens


def _engines(gpus: int):
    from toolkit.plan.deployment import Engines

    return Engines(Layout(gpus), 1)


def test_measured_steps_replace_the_fixed_time():
    """The plan then has the measured times; a step faster than the memory allows is of another model or GPU."""
    mine = planner(concurrency=1)
    costs = calibrated(mine, Layout(1), {1: 0.012})
    again = forward_s(DENSE, GPU, Layout(1), costs, requests=1, tokens=1, context=1250)
    assert again == pytest.approx(0.012) and costs.layer_s > Costs().layer_s
    with pytest.raises(PlanError, match="shorter than its reads"):
        calibrated(mine, Layout(1), {1: 0.001})
    waits = replace(mine, overlap=False)
    waits = replace(waits, costs=calibrated(waits, Layout(1), {1: 0.018, 4: 0.020}))
    said = [waits.batch(Layout(1), requests).plain_s for requests in (1, 4)]
    assert sum(said) == pytest.approx(0.038)
    with pytest.raises(PlanError, match="6.1 ms of the host without overlap"):
        calibrated(waits, Layout(1), {1: 0.008})


def test_two_batches_hide_the_exchange_of_large_ones_alone():
    layout = Layout(16, data_parallel=True)
    small, large = (
        [
            forward_s(SPARSE, GPU, replace(layout, two_batches=two), Costs(), requests=n, tokens=1, context=2000)
            for two in (False, True)
        ]
        for n in (8, 512)
    )
    assert small[0] == small[1] and large[1] < large[0]


@pytest.mark.parametrize(
    "work",
    [{"input": 0, "concurrency": 1}, {}, {"concurrency": 1, "rate": 1.0}, {"rate": 0.0}, {"concurrency": 0}],
)
def test_workloads_that_cannot_be(work):
    with pytest.raises(PlanError, match="expected|give exactly one"):
        Workload(**{"input": 10, "output": 10, **work})


def test_launch_lines_of_two_nodes():
    """Every node has its line; the numbers on it are the plan's, and each engine's words are its own."""
    mine = planner(SPARSE, replace(DRAFT, kind="mtp", path=None), concurrency=256)
    best, _ = replace(mine, only=(16, True)).best(16)
    table = draft_table(mine, best)
    first, further = launch_lines("sglang", ["org/m", "--revision", "r"], best, mine.draft, table)[1:]
    for word in ("--model-path org/m --revision r", "--tp-size 16", "--dp-size 16 --enable-dp-attention"):
        assert word in first
    steps = best.batch.drafts
    assert f"--speculative-num-steps {steps} --speculative-eagle-topk 1" in first and "draft-model-path" not in first
    assert f"--max-running-requests {best.batch.requests * 16}" in first
    assert first.endswith("--node-rank 0") and further == first[:-1] + "K"
    lines = launch_lines("vllm", ["org/m"], best, mine.draft, table)
    assert "--data-parallel-size 16 --enable-expert-parallel" in lines[1] and lines[2].endswith("--headless")
    config = json.loads(lines[1].split("--speculative-config '")[1].split("'")[0])
    assert config["method"] == "mtp" and [tuple(one) for one in config["num_speculative_tokens_per_batch_size"]]
    apart, _ = planner(input=8000, output=400, rate=25.0, max_tpot_s=0.006).best(16)
    lines = launch_lines("sglang", ["m"], apart, DRAFT, draft_table(planner(concurrency=1), apart))
    assert any("--disaggregation-mode prefill" in line for line in lines)
    assert any("--disaggregation-mode decode" in line for line in lines)
    router = lines[-1]
    assert router.count("--decode ") == apart.decode.count and router.count("--prefill ") == apart.prefill.count


@pytest.mark.parametrize(("anchor", "name", "more"), [(True, "dspark", 0), (False, "dflash", 1)])
def test_launch_lines_of_block_drafters(anchor, name, more):
    """One kind here, two algorithms there; a block of 4 drafts at most."""
    config = DSparkConfig(
        hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        rms_norm_eps=1e-6, vocab_size=90, max_position_embeddings=64, rope_parameters={}, target_hidden_size=64,
        draft_vocab_size=90, aux_layer_ids=(1, 2, 3), block_size=4 if anchor else 5, sample_from_anchor=anchor,
        markov_rank=8 if anchor else 0, confidence=anchor,
        confidence_with_markov=anchor,
    )  # fmt: skip
    draft = replace(DRAFT, kind="dspark", config=config)
    mine = planner(draft=draft, concurrency=1)
    best, _ = mine.best(1)
    places = 4 + more  # whole, whatever is planned
    assert best.batch.drafts < 4
    table = draft_table(mine, best)
    assert f"--speculative-{name}-block-size {places}" in launch_lines("sglang", ["m"], best, draft, table)[1]
    assert f'"method": "{name}"' in launch_lines("vllm", ["m"], best, draft, table)[1]
