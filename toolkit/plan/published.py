"""Published figures to check the model of a step: some are used to fit its costs, the others are predicted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from transformers import AutoConfig

from toolkit.plan.draft_cost import native_mtp, usual_head
from toolkit.plan.gpus import GPUS
from toolkit.plan.model_size import ModelSize, size_of_config
from toolkit.plan.step_time import Costs, Layout, prefill_s, round_s

SOURCES = {
    "mtp": "SGLang's MTP report, lmsys.org/blog/2025-07-17-mtp. Its accept_length of 1 draft is not published: 1.72 "
    "follows from 2.18 and 2.44. Of the large deployment's 128 GPUs 96 decode (12 of 16 nodes); that it overlaps two "
    "batches, and 32 redundant experts in both deployments, is assumed. Its drafts are without overlapped scheduling",
    "ep": "SGLang's large-scale EP report, lmsys.org/blog/2025-05-05-large-scale-ep; one batch: by its gain of 25.5 %",
    "docs": "SGLang's documentation of speculative decoding",
    "bundle": "SpecBundle's raw results, batch 1, MT-Bench; the GPU is taken to be an H200 by its plain speed, and "
    "scheduling, which is not stated, to be overlapped",
}


@dataclass(frozen=True)
class Case:
    """A published figure. fitted: the cost that was fitted to this figure; empty: the model predicts the figure."""

    name: str
    source: str
    published: float
    unit: str
    fitted: str = ""


# The largest error of the predicted figures, which every plan prints.
PREDICTED_WITHIN = 0.14

# One accept_length is not published: that of [mtp]'s chain of 1. With a conditional acceptance that falls by the same
# factor at each depth, the published 2.18 (2 drafts) and 2.44 (3 drafts) mean 0.72, 0.64, 0.57.
ACCEPT_LENGTH = {1: 1.72, 2: 2.18, 3: 2.44}
BUNDLE = {3: (2.90, 2.13), 5: (3.52, 2.35), 7: (3.86, 2.37)}  # drafts: accept_length, speedup

PLAIN_H100, PLAIN_H200 = "Llama-3.1-8B, plain, 1 H100", "Llama-3.1-8B, plain, 1 H200"
SYNC, OVERLAP = "DeepSeek-V3, 16 H200, 65,536 in, plain", "DeepSeek-V3, 16 H200, 65,536 in, overlap"
PREFILL = "DeepSeek-V3, prefill, 32 H100, 4,096 in"
CASES = (
    Case(PLAIN_H100, "docs", 158.34, "tokens/s", "layer_s"),
    Case(OVERLAP, "mtp", 60.4, "tokens/s a rank", "exchange_s"),
    Case(SYNC, "mtp", 51.0, "tokens/s a rank", "host_s"),
    Case("Llama-3.1-8B, EAGLE-3, 3 drafts", "bundle", 2.13, "x plain", "round_s"),
    Case("Llama-3.1-8B, EAGLE-3, 5 drafts", "bundle", 2.35, "x plain", "pass_s"),
    Case(PREFILL, "ep", 50_302, "tokens/s a node", "prefill_share"),
    Case("DeepSeek-V3, 16 H200, 65,536 in, MTP of 2 drafts (3-token)", "mtp", 81.5, "tokens/s a rank"),
    Case("DeepSeek-V3, 16 H200, 65,536 in, MTP of 3 drafts (4-token)", "mtp", 82.0, "tokens/s a rank"),
    Case("DeepSeek-V3, 96 H200 decode, 128 a rank, 2,000 in, MTP of 1 draft", "mtp", 1.142, "x plain"),
    Case("DeepSeek-V3, 72 H100 decode, 256 a rank, two batches", "ep", 22_310, "tokens/s a node"),
    Case("DeepSeek-V3, 72 H100 decode, 256 a rank, one batch", "ep", 22_310 / 1.255, "tokens/s a node"),
    Case("DeepSeek-V3, prefill, 32 H100, 1,024 in", "ep", 57_674, "tokens/s a node"),
    Case(PLAIN_H200, "bundle", 190, "tokens/s"),
    Case("Llama-3.1-8B, EAGLE-3, 7 drafts", "bundle", 2.37, "x plain"),
)


@lru_cache(maxsize=1)
def deepseek_v3() -> ModelSize:
    """Return the size of DeepSeek-V3, which is transformers' default deepseek_v3; its layers are served in fp8."""
    size = size_of_config(AutoConfig.for_model("deepseek_v3"), "DeepSeek-V3", 8)
    return replace(size, native_mtp=1)


@lru_cache(maxsize=1)
def llama_8b() -> tuple[ModelSize, ModelSize]:
    """Return the sizes of Llama-3.1-8B and of a typical EAGLE-3 head."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    )
    size = size_of_config(config, "Llama-3.1-8B")
    return size, usual_head("eagle3", config, size)


def predictions(costs: Costs) -> dict[str, float]:
    """Return the model's value for every case, by name."""
    values = [
        _llama("H100", costs, 0),
        _long(costs, 0, overlap=True),
        _long(costs, 0),
        _bundle(costs, 3),
        _bundle(costs, 5),
        _prefill(costs, 4096),
        _long(costs, 2),
        _long(costs, 3),
        _large("H200", 96, costs, 128, 1, two_batches=True) / _large("H200", 96, costs, 128, 0, two_batches=True),
        8 * _large("H100", 72, costs, 256, 0, two_batches=True),
        8 * _large("H100", 72, costs, 256, 0),
        _prefill(costs, 1024),
        _llama("H200", costs, 0),
        _bundle(costs, 7),
    ]
    return {case.name: value for case, value in zip(CASES, values, strict=True)}


def _llama(gpu: str, costs: Costs, drafts: int) -> float:
    """Return rounds per second of one request, at a context of 512 tokens since MT-Bench's texts are short."""
    size, head = llama_8b()
    return 1 / round_s(size, head, GPUS[gpu], Layout(1), costs, requests=1, drafts=drafts, context=512)


def _bundle(costs: Costs, drafts: int) -> float:
    return BUNDLE[drafts][0] * _llama("H200", costs, drafts) / _llama("H200", costs, 0)


def _decoded(
    gpu: str, layout: Layout, costs: Costs, requests: int, drafts: int, context: int, overlap: bool = False
) -> float:
    """Return tokens per second of a rank of DeepSeek-V3, after `context` tokens."""
    size = deepseek_v3()
    seconds = round_s(
        size,
        native_mtp(size),
        GPUS[gpu],
        layout,
        costs,
        requests=requests,
        drafts=drafts,
        context=context,
        overlap=overlap,
    )
    return requests * ACCEPT_LENGTH.get(drafts, 1.0) / seconds


def _long(costs: Costs, drafts: int, overlap: bool = False) -> float:
    """In the middle of 4,096 tokens after a prompt of 65,536, with 2 requests per rank."""
    return _decoded("H200", Layout(16, True, redundant=32), costs, 2, drafts, 65_536 + 2_048, overlap)


def _large(gpu: str, gpus: int, costs: Costs, requests: int, drafts: int, two_batches: bool = False) -> float:
    """In the middle of 100 tokens after a prompt of 2,000; the H100 deployment overlaps scheduling."""
    layout = Layout(gpus, True, redundant=32, two_batches=two_batches)
    return _decoded(gpu, layout, costs, requests, drafts, 2_050, overlap=gpu == "H100")


def _prefill(costs: Costs, tokens: int) -> float:
    layout = Layout(32, data_parallel=True)
    return 8 * tokens / prefill_s(deepseek_v3(), GPUS["H100"], layout, costs, tokens)
