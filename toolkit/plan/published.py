"""Published figures to check the model of a step: some are used to fit its costs, the others are predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from transformers import AutoConfig

from toolkit.plan.model_size import ModelSize, native_mtp, size_of_config, usual_head
from toolkit.plan.step_time import GPUS, Costs, Layout, Rank

SOURCES = {
    "mtp": "SGLang's MTP report, lmsys.org/blog/2025-07-17-mtp. Its accept_length of 1 draft is not published: 1.72 "
    "follows from 2.18 and 2.44. Of the large deployment's 128 GPUs 96 decode (12 of 16 nodes); that it overlaps two "
    "batches is assumed. Its drafts are without overlapped scheduling",
    "ep": "SGLang's large-scale EP report, lmsys.org/blog/2025-05-05-large-scale-ep; one batch: by its gain of 25.5 %",
    "docs": "SGLang's documentation of speculative decoding",
    "bundle": "SpecBundle's raw results, batch 1, MT-Bench; the GPU is taken to be an H200 by its plain speed, and "
    "scheduling, which is not stated, to be overlapped",
}
# The largest error of the predicted figures, which every plan prints.
PREDICTED_WITHIN = 0.14
# One accept_length is not published: that of [mtp]'s chain of 1. With a conditional acceptance that falls by the same
# factor at each depth, the published 2.18 (2 drafts) and 2.44 (3 drafts) mean 0.72, 0.64, 0.57.
ACCEPT_LENGTH = {1: 1.72, 2: 2.18, 3: 2.44}
BUNDLE = {3: 2.90, 5: 3.52, 7: 3.86}  # accept_length by drafts


@lru_cache(maxsize=1)
def deepseek_v3() -> ModelSize:
    """Return the size of DeepSeek-V3, which is transformers' default deepseek_v3; its layers are served in fp8."""
    size = size_of_config(AutoConfig.for_model("deepseek_v3"), "DeepSeek-V3", 8)
    return replace(size, native_mtp=1)


@lru_cache(maxsize=1)
def llama_8b() -> tuple[ModelSize, ModelSize]:
    """Return the sizes of Llama-3.1-8B and of a typical EAGLE-3 head."""
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    config = AutoConfig.for_model("llama", **shape, num_key_value_heads=8, vocab_size=128256)
    size = size_of_config(config, "Llama-3.1-8B")
    return size, usual_head("eagle3", config, size)


def _llama(costs: Costs, gpu: str, drafts: int = 0) -> float:
    """Return rounds per second of one request, at a context of 512 tokens since MT-Bench's texts are short."""
    size, head = llama_8b()
    return 1 / Rank(GPUS[gpu], Layout(1), costs).round_s(size, head, requests=1, drafts=drafts, context=512)


def _bundle(costs: Costs, drafts: int) -> float:
    return BUNDLE[drafts] * _llama(costs, "H200", drafts) / _llama(costs, "H200")


def _decoded(costs: Costs, gpu: str, layout: Layout, requests: int, drafts: int, context: int, overlap: bool) -> float:
    """Return tokens per second of a rank of DeepSeek-V3, after `context` tokens."""
    size = deepseek_v3()
    rank = Rank(GPUS[gpu], layout, costs)
    seconds = rank.round_s(size, native_mtp(size), requests=requests, drafts=drafts, context=context, overlap=overlap)
    return requests * ACCEPT_LENGTH.get(drafts, 1.0) / seconds


def _long(costs: Costs, drafts: int, overlap: bool = False) -> float:
    """In the middle of 4,096 tokens after a prompt of 65,536, with 2 requests per rank."""
    return _decoded(costs, "H200", Layout(16, True), 2, drafts, 65_536 + 2_048, overlap)


def _large(costs: Costs, gpu: str, gpus: int, requests: int, drafts: int = 0, two_batches: bool = True) -> float:
    """In the middle of 100 tokens after a prompt of 2,000; the H100 deployment overlaps scheduling."""
    layout = Layout(gpus, True, two_batches=two_batches)
    return _decoded(costs, gpu, layout, requests, drafts, 2_050, overlap=gpu == "H100")


def _prefill(costs: Costs, tokens: int) -> float:
    rank = Rank(GPUS["H100"], Layout(32, data_parallel=True), costs)
    return 8 * tokens / rank.prefill_s(deepseek_v3(), tokens)


@dataclass(frozen=True)
class Case:
    """A published figure, and the model's value for it.

    fitted: the cost that was fitted to this figure; empty: the model predicts the figure.
    """

    name: str
    source: str
    published: float
    unit: str
    model: Callable[[Costs], float]
    fitted: str = ""


RANK, NODE, PLAIN = "tokens/s a rank", "tokens/s a node", "x plain"
LONG, LARGE = "DeepSeek-V3, 16 H200, 65,536 in", "DeepSeek-V3, 72 H100 decode, 256 a rank"
MTP_GAIN = "DeepSeek-V3, 96 H200 decode, 128 a rank, 2,000 in, MTP of 1 draft"
CASES = (
    Case("Llama-3.1-8B, plain, 1 H100", "docs", 158.34, "tokens/s", lambda c: _llama(c, "H100"), "layer_s"),
    Case(f"{LONG}, overlap", "mtp", 60.4, RANK, lambda c: _long(c, 0, overlap=True), "exchange_s"),
    Case(f"{LONG}, plain", "mtp", 51.0, RANK, lambda c: _long(c, 0), "host_s"),
    Case("Llama-3.1-8B, EAGLE-3, 3 drafts", "bundle", 2.13, PLAIN, lambda c: _bundle(c, 3), "round_s"),
    Case("Llama-3.1-8B, EAGLE-3, 5 drafts", "bundle", 2.35, PLAIN, lambda c: _bundle(c, 5), "pass_s"),
    Case("DeepSeek-V3, prefill, 32 H100, 4,096 in", "ep", 50_302, NODE, lambda c: _prefill(c, 4096), "prefill_share"),
    Case(f"{LONG}, MTP of 2 drafts (3-token)", "mtp", 81.5, RANK, lambda c: _long(c, 2)),
    Case(f"{LONG}, MTP of 3 drafts (4-token)", "mtp", 82.0, RANK, lambda c: _long(c, 3)),
    Case(MTP_GAIN, "mtp", 1.142, PLAIN, lambda c: _large(c, "H200", 96, 128, 1) / _large(c, "H200", 96, 128)),
    Case(f"{LARGE}, two batches", "ep", 22_310, NODE, lambda c: 8 * _large(c, "H100", 72, 256)),
    Case(f"{LARGE}, one batch", "ep", 22_310 / 1.255, NODE, lambda c: 8 * _large(c, "H100", 72, 256, 0, False)),
    Case("DeepSeek-V3, prefill, 32 H100, 1,024 in", "ep", 57_674, NODE, lambda c: _prefill(c, 1024)),
    Case("Llama-3.1-8B, plain, 1 H200", "bundle", 190, "tokens/s", lambda c: _llama(c, "H200")),
    Case("Llama-3.1-8B, EAGLE-3, 7 drafts", "bundle", 2.37, PLAIN, lambda c: _bundle(c, 7)),
)


def published_text() -> str:
    """Return a table of the published figures, the model's values, and which figures its costs were fitted to."""
    lines = [f"{'case':<66} {'published':>9} {'model':>9} {'error':>7}  how"]
    for case in CASES:
        how, value = f"fitted ({case.fitted})" if case.fitted else "predicted", case.model(Costs())
        error = f"{100 * (value / case.published - 1):+.1f} %"
        numbers = f"{_number(case.published):>9} {_number(value):>9} {error:>7}"
        lines.append(f"{case.name:<66} {numbers}  {how}, {case.unit} [{case.source}]")
    return "\n".join([*lines, "", *(f"[{key}] {text}" for key, text in SOURCES.items())])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3f}" if value < 10 else f"{value:.1f}"
