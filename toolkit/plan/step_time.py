"""The time of a step: a roofline with a fixed time per layer, simple enough to check by hand.

    forward = max(weights / bandwidth, products / rate)      linear layers and experts
            + max(cache / bandwidth, operations / rate)      attention
            + layers * layer_s                               kernels that are too small to fill a GPU
            + exchange                                       all-reduce (TP), or dispatch and combine of experts
    round   = target's forward over the verified nodes of a request: 1 + k for a chain of k
            + head's forward over 1 + k tokens, and k - 1 forwards over one (a tree: over top_k)
            + round_s + k * pass_s + host                    host: only without overlapped scheduling

A rank is a data-parallel rank of attention: one GPU, or all GPUs of a tensor-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.plan.gpus import Gpu
from toolkit.plan.model_size import ModelSize

# Below this many rows per rank, two batches are slower than one (SGLang's large-scale EP report, ablation study).
TWO_BATCH_ROWS = 64


@dataclass(frozen=True)
class Costs:
    """Costs that data sheets do not give: times in seconds, and shares of the data sheet's rates.

    The first six are fitted to published figures (tests/plan/test_published.py); the rest are assumptions.
    layer_s: fixed time per layer. exchange_s: dispatch and combine in one layer with experts. host_s: host work between
    two steps. pass_s: fixed time per pass of a head, besides its layer. round_s: fixed time per round with drafts,
    besides its passes. prefill_share: share of the peak rate in prefill.
    bandwidth_share, product_share: reached by large kernels. attention_share: FlashMLA's published 660 of 989 TFLOPS.
    network_share: DeepEP's published 40 of 50 GB/s; link_share: its 110 of 450 GB/s within a node. ring_share: share of
    a node's links that a large ring all-reduce reaches; sum_s: time of a small one.
    """

    layer_s: float = 21.56e-6
    exchange_s: float = 290.3e-6
    host_s: float = 6.103e-3
    pass_s: float = 71.5e-6
    round_s: float = 724.5e-6
    prefill_share: float = 0.2919
    bandwidth_share: float = 0.8
    product_share: float = 0.5
    attention_share: float = 0.67
    network_share: float = 0.8
    link_share: float = 0.25
    ring_share: float = 0.8
    sum_s: float = 10e-6


@dataclass(frozen=True)
class Layout:
    """The parallel layout of one engine on `gpus` GPUs.

    data_parallel: attention is replicated, each GPU serves its own requests, and experts are distributed over all GPUs;
    otherwise all tensors are split over all GPUs (tensor parallel). node: GPUs per node. redundant: additional copies
    of experts. two_batches: one half of a rank's requests computes while the rows of the other half are exchanged
    (SGLang's two-batch overlap); each half reads the weights and has the fixed times.
    """

    gpus: int
    data_parallel: bool = False
    node: int = 8
    redundant: int = 0
    two_batches: bool = False

    @property
    def name(self) -> str:
        """The name used by `--layout`."""
        return f"{'dp' if self.data_parallel else 'tp'}{self.gpus}"

    @property
    def ranks(self) -> int:
        return self.gpus if self.data_parallel else 1

    @property
    def split(self) -> int:
        """Number of GPUs over which the attention weights are split."""
        return 1 if self.data_parallel else self.gpus


def weight_bytes(size: ModelSize, layout: Layout) -> float:
    """Return the bytes of weights on one GPU; a shared output matrix counts for the target only."""
    copies = 1 + (layout.redundant / size.n_experts if size.n_experts and layout.data_parallel else 0)
    dense = size.body_bytes + 2 * ((0.0 if size.shared_head else size.head) + size.embedding)
    return dense / layout.split + size.expert_bytes * copies / layout.gpus


def cache_bytes(size: ModelSize, layout: Layout, context: float) -> float:
    """Return the cache bytes of one request on each GPU of its rank."""
    return size.cache.bytes(context) / min(layout.split, size.cache.shards)


def forward_s(
    size: ModelSize, gpu: Gpu, layout: Layout, costs: Costs, *, requests: float, tokens: int, context: float
) -> float:
    """Return the seconds of one forward over `tokens` of each of `requests` per rank, after `context` tokens."""
    parts = 2 if layout.two_batches and requests * tokens >= TWO_BATCH_ROWS else 1
    rows = requests * tokens / parts  # per rank and batch
    compute = _linear_s(size, gpu, layout, costs, rows) + size.layers * costs.layer_s
    cache = requests / parts * cache_bytes(size, layout, context)
    operations = rows * size.cache.operations(context) / layout.split
    compute += max(cache / (gpu.bandwidth * costs.bandwidth_share), operations / (gpu.flops * costs.attention_share))
    exchange = _exchange_s(size, gpu, layout, costs, rows)
    return compute + exchange if parts == 1 else parts * max(compute, exchange)


def _linear_s(size: ModelSize, gpu: Gpu, layout: Layout, costs: Costs, rows: float) -> float:
    """Return the seconds of linear layers and experts. Rows choose experts at random; only those chosen are read."""
    touched = 1 - (1 - size.chosen / size.n_experts) ** (rows * layout.ranks) if size.n_experts else 0.0
    read = (size.body_bytes + 2 * size.head) / layout.split + size.expert_bytes / layout.gpus * touched
    products = 2 * rows * size.active / layout.split
    rate = gpu.rate(size.bits) * costs.product_share
    return max(read / (gpu.bandwidth * costs.bandwidth_share), products / rate)


def _exchange_s(size: ModelSize, gpu: Gpu, layout: Layout, costs: Costs, rows: float) -> float:
    """Return the seconds of communication.

    Experts: each row is sent in 8 bits and returned in 16 bits, once per chosen expert. Tensor parallel: two
    all-reduces per layer over every row in 16 bits (a ring sends 2 (n-1)/n of it).
    """
    n, width = layout.gpus, size.hidden_size
    if n == 1:
        return 0.0
    if layout.data_parallel:
        away, fixed = size.moe_layers * rows * size.chosen * width * 3, size.moe_layers * costs.exchange_s
        if n <= layout.node:
            return fixed + away / (gpu.link * costs.link_share)
        return fixed + away * (1 - layout.node / n) / (gpu.network * costs.network_share)
    speed = gpu.link * costs.ring_share if n <= layout.node else gpu.network * costs.network_share
    return size.layers * 2 * (costs.sum_s + 2 * (n - 1) / n * rows * width * 2 / speed)


def round_s(
    size: ModelSize,
    head: ModelSize | None,
    gpu: Gpu,
    layout: Layout,
    costs: Costs,
    *,
    requests: float,
    drafts: int,
    context: float,
    overlap: bool = True,
    top_k: int = 1,
    nodes: int | None = None,
) -> float:
    """Return the seconds of one round with `drafts` drafted levels per request; 0: a plain step.

    overlap: the engine overlaps host and GPU work. top_k, nodes: branches and verified nodes of a tree; None: of a
    chain.
    """
    verified = 1 + drafts if nodes is None else nodes
    seconds = forward_s(size, gpu, layout, costs, requests=requests, tokens=verified, context=context)
    if drafts and head is not None:
        first = forward_s(head, gpu, layout, costs, requests=requests, tokens=1 + drafts, context=context)
        later = forward_s(head, gpu, layout, costs, requests=requests, tokens=top_k, context=context)
        passes = 1 if head.one_pass else drafts
        seconds += first + (passes - 1) * later + costs.round_s + passes * costs.pass_s
    return seconds + (0.0 if overlap else costs.host_s)


def prefill_s(size: ModelSize, gpu: Gpu, layout: Layout, costs: Costs, tokens: float) -> float:
    """Return the seconds of prefill for one prompt per rank, on all ranks at the same time.

    Full attention computes half of a causal square. Sliding layers (window w) compute half of a square of w, and w keys
    per further token. prefill_share includes the communication of experts; tensor-parallel all-reduces are added.
    """
    linear = 2 * (size.active - size.head) * tokens / gpu.rate(size.bits)
    window = min(tokens, size.cache.window)
    sliding = tokens * window - window * window / 2
    pairs = size.cache.prefill_flops * tokens * tokens / 2 + size.cache.window_flops * sliding
    sums = 0.0 if layout.data_parallel else _exchange_s(size, gpu, layout, costs, tokens)
    return (linear + pairs / gpu.flops) / layout.split / costs.prefill_share + sums
