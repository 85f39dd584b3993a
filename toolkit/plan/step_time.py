"""GPUs, and the time of a step on them: a roofline with a fixed time per layer, simple enough to check by hand.

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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from toolkit.errors import PlanError

if TYPE_CHECKING:  # which loads torch
    from toolkit.plan.model_size import ModelSize

GB, TB, TFLOPS = 1e9, 1e12, 1e12


@dataclass(frozen=True)
class Gpu:
    """memory: bytes. bandwidth: memory bytes per second. flops: bf16 operations per second; a multiply-add is two.

    flops_8: the same in fp8; None if not supported. link: bytes per second to a GPU of the same node, one way. network:
    the same to other nodes (one NIC per GPU).
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    flops_8: float | None
    link: float
    network: float = 50 * GB  # 400 Gbit/s InfiniBand per GPU, as in the published cases

    def rate(self, weight_bits: float) -> float:
        """Return operations per second for weights of so many bits; below 8 bits they are converted to bf16 first."""
        return self.flops_8 if weight_bits == 8 and self.flops_8 is not None else self.flops


# From NVIDIA's data sheets of the SXM (HGX) parts; L40S: PCIe 4.0 x16, and 200 Gbit/s InfiniBand per GPU. Memory uses
# 1 GB = 1e9 bytes; the parts have slightly more, so plans err on the safe side.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 80 * GB, 2.039 * TB, 312 * TFLOPS, None, 300 * GB, 25 * GB),
        Gpu("H20", 96 * GB, 4.0 * TB, 148 * TFLOPS, 296 * TFLOPS, 450 * GB),
        Gpu("H100", 80 * GB, 3.35 * TB, 989 * TFLOPS, 1979 * TFLOPS, 450 * GB),
        Gpu("H200", 141 * GB, 4.8 * TB, 989 * TFLOPS, 1979 * TFLOPS, 450 * GB),
        Gpu("B200", 180 * GB, 7.7 * TB, 2250 * TFLOPS, 4500 * TFLOPS, 900 * GB),
        Gpu("L40S", 48 * GB, 0.864 * TB, 362 * TFLOPS, 733 * TFLOPS, 32 * GB, 25 * GB),
    )
}

# Figures that users may give, in the units of data sheets: name -> field of a Gpu, factor, unit.
FIGURES = {
    "memory": ("memory", GB, "GB"),
    "bandwidth": ("bandwidth", GB, "GB/s"),
    "tflops": ("flops", TFLOPS, "TFLOPS of bf16, dense"),
    "link": ("link", GB, "GB/s to a GPU of the same node, one way"),
    "network": ("network", GB, "GB/s to other nodes, a GPU"),
}
NEEDED = ("memory", "bandwidth", "tflops")


def gpu_named(name: str, stated: Mapping[str, float | None] | None = None) -> Gpu:
    """Return a GPU of the table, or another one. `stated` figures, by FIGURES, override those of the table.

    Raises `PlanError` for figures that are not above 0, and when an unknown GPU lacks figures.
    """
    given = {figure: value for figure, value in (stated or {}).items() if value is not None}
    if wrong := [figure for figure, value in given.items() if value <= 0]:
        raise PlanError(f"{', '.join(wrong)} of the GPU must be above 0")
    own: dict[str, Any] = {FIGURES[figure][0]: value * FIGURES[figure][1] for figure, value in given.items()}
    known = next((gpu for key, gpu in GPUS.items() if key.lower() == name.lower()), None)
    if known is not None:
        return replace(known, **own)
    if lacking := [figure for figure in NEEDED if figure not in given]:
        raise PlanError(
            f"GPU {name!r} is not in the table ({', '.join(GPUS)}); give --gpu-memory GB, --gpu-bandwidth GB/s and "
            f"--gpu-tflops of bf16 (missing: {', '.join(lacking)})"
        )
    return Gpu(name, **{"flops_8": None, "link": 32 * GB, **own})


NODE = 8  # GPUs of a machine

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
    otherwise all tensors are split over all GPUs (tensor parallel). two_batches: one half of a rank's requests computes
    while the rows of the other half are exchanged (SGLang's two-batch overlap); each half reads the weights and has the
    fixed times.
    """

    gpus: int
    data_parallel: bool = False
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

    def weight_bytes(self, size: ModelSize) -> float:
        """Return the bytes of weights on one GPU; a shared output matrix counts for the target only."""
        dense = size.body_bytes + 2 * ((0.0 if size.shared_head else size.head) + size.embedding)
        return dense / self.split + size.expert_bytes / self.gpus

    def cache_bytes(self, size: ModelSize, context: float) -> float:
        """Return the cache bytes of one request on each GPU of its rank."""
        return size.cache.bytes(context) / min(self.split, size.cache.shards)


@dataclass(frozen=True)
class Rank:
    """A rank, and the times of its steps in seconds."""

    gpu: Gpu
    layout: Layout
    costs: Costs = Costs()

    def forward_s(self, size: ModelSize, *, requests: float, tokens: int, context: float) -> float:
        """Return the time of one forward over `tokens` of each of `requests`, after `context` tokens."""
        gpu, layout, costs = self.gpu, self.layout, self.costs
        parts = 2 if layout.two_batches and requests * tokens >= TWO_BATCH_ROWS else 1
        rows = requests * tokens / parts  # per batch
        cache = requests / parts * layout.cache_bytes(size, context)
        operations = rows * size.cache.operations(context) / layout.split
        attention = max(
            cache / (gpu.bandwidth * costs.bandwidth_share), operations / (gpu.flops * costs.attention_share)
        )
        compute = self._linear_s(size, rows) + attention + size.layers * costs.layer_s
        exchange = self._exchange_s(size, rows)
        return compute + exchange if parts == 1 else parts * max(compute, exchange)

    def _linear_s(self, size: ModelSize, rows: float) -> float:
        """Return the time of linear layers and experts. Rows choose experts at random; only those chosen are read."""
        gpu, layout, costs = self.gpu, self.layout, self.costs
        touched = 1 - (1 - size.chosen / size.n_experts) ** (rows * layout.ranks) if size.n_experts else 0.0
        read = (size.body_bytes + 2 * size.head) / layout.split + size.expert_bytes / layout.gpus * touched
        products = 2 * rows * size.active / layout.split
        rate = gpu.rate(size.bits) * costs.product_share
        return max(read / (gpu.bandwidth * costs.bandwidth_share), products / rate)

    def _exchange_s(self, size: ModelSize, rows: float) -> float:
        """Return the time of communication.

        Experts: each row is sent in 8 bits and returned in 16 bits, once per chosen expert. Tensor parallel: two
        all-reduces per layer over every row in 16 bits (a ring sends 2 (n-1)/n of it).
        """
        gpu, costs, n, width = self.gpu, self.costs, self.layout.gpus, size.hidden_size
        if n == 1:
            return 0.0
        if self.layout.data_parallel:
            away, fixed = size.moe_layers * rows * size.chosen * width * 3, size.moe_layers * costs.exchange_s
            if n <= NODE:
                return fixed + away / (gpu.link * costs.link_share)
            return fixed + away * (1 - NODE / n) / (gpu.network * costs.network_share)
        speed = gpu.link * costs.ring_share if n <= NODE else gpu.network * costs.network_share
        return size.layers * 2 * (costs.sum_s + 2 * (n - 1) / n * rows * width * 2 / speed)

    def round_s(
        self,
        size: ModelSize,
        head: ModelSize | None = None,
        *,
        requests: float,
        context: float,
        drafts: int = 0,
        overlap: bool = True,
        top_k: int = 1,
        nodes: int | None = None,
    ) -> float:
        """Return the time of one round with `drafts` drafted levels per request; 0: a plain step.

        overlap: the engine overlaps host and GPU work. top_k, nodes: branches and verified nodes of a tree; None: of a
        chain.
        """
        asked = {"requests": requests, "context": context}
        seconds = self.forward_s(size, tokens=1 + drafts if nodes is None else nodes, **asked)
        if drafts and head is not None:
            passes = 1 if head.one_pass else drafts
            seconds += self.forward_s(head, tokens=1 + drafts, **asked) + self.costs.round_s
            seconds += (passes - 1) * self.forward_s(head, tokens=top_k, **asked) + passes * self.costs.pass_s
        return seconds + (0.0 if overlap else self.costs.host_s)

    def prefill_s(self, size: ModelSize, tokens: float) -> float:
        """Return the time of prefill for one prompt per rank, on all ranks at the same time.

        prefill_share includes the communication of experts; tensor-parallel all-reduces are added.
        """
        linear = 2 * (size.active - size.head) * tokens / self.gpu.rate(size.bits)
        attention = size.cache.prefill_operations(tokens) / self.gpu.flops
        sums = 0.0 if self.layout.data_parallel else self._exchange_s(size, tokens)
        return (linear + attention) / self.layout.split / self.costs.prefill_share + sums

    def calibrated(self, size: ModelSize, step_s: Mapping[int, float], context: float) -> Costs:
        """Return costs whose fixed time per layer makes plain steps as long as measured.

        step_s: measured seconds of a step, by requests per rank; several measurements are averaged.
        Raises `PlanError` when a measured step is shorter than the time of its reads and computations.
        """
        bare, rest = replace(self, costs=replace(self.costs, layer_s=0.0)), []
        for requests, seconds in step_s.items():
            shortest = bare.round_s(size, requests=requests, context=context)
            if seconds < shortest:
                raise PlanError(
                    f"the step of {1000 * seconds:.3g} ms with {requests} request(s) per rank is shorter than its "
                    f"reads and computations on {self.gpu.name} take ({1000 * shortest:.3g} ms at {context:.0f} tokens "
                    "of context); give a step that was measured with this model, GPU and layout"
                )
            rest.append(seconds - shortest)
        return replace(self.costs, layer_s=sum(rest) / len(rest) / size.layers)
