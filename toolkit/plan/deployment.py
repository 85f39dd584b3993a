"""Choose the layout of a deployment's engines and the draft length by batch size, and predict its throughput.

A rank serves b requests. Each has `input` prompt tokens (P seconds of prefill) and `output` tokens, which are decoded
in rounds of T(b) seconds that commit a tokens; the prefill of other requests interrupts the rounds:

    requests per second of a rank = 1 / (P + output * T / (a * b))        TPOT = T / a + (b - 1) * P / output

Requests that arrive at a rate wait for prefill as in an M/D/1 queue: P * load / (2 * (1 - load)).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from toolkit.errors import PlanError
from toolkit.plan.model_size import DraftCost, ModelSize
from toolkit.plan.published import CASES, PREDICTED_WITHIN
from toolkit.plan.step_time import NODE, Costs, Gpu, Layout, Rank

MEMORY_SHARE = 0.88  # share of GPU memory for weights and cache; the rest is for activations and graphs
TABLE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
GB = 1e9


@dataclass(frozen=True)
class Workload:
    """input, output: tokens of a request. max_tpot_s: the largest acceptable time per output token, in seconds.

    Give either `concurrency`, requests in flight, or `rate`, requests per second.
    Raises `PlanError` for numbers out of range, and unless exactly one of concurrency and rate is given.
    """

    input: int
    output: int
    concurrency: int | None = None
    rate: float | None = None
    max_tpot_s: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise PlanError("give exactly one of concurrency (requests in flight) and rate (requests per second)")
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise PlanError(f"{name} is {value}; expected a number above 0")


@dataclass(frozen=True)
class DecodeBatch:
    """A decode batch of one rank, with its best draft length.

    committed: tokens per request and round. round_s, plain_s: seconds of a round and of a plain step.
    """

    requests: int
    drafts: int
    committed: float
    round_s: float
    plain_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.requests * self.committed / self.round_s

    @property
    def gain(self) -> float:
        """Speedup over plain decoding of as many requests."""
        return self.committed * self.plain_s / self.round_s


@dataclass(frozen=True)
class Deployment:
    """`count` engines of one layout. tpot_s includes interruptions by prefill."""

    layout: Layout
    count: int
    batch: DecodeBatch
    requests_per_s: float
    tpot_s: float
    ttft_s: float


@dataclass(frozen=True)
class Planner:
    """The inputs of a plan.

    only: the only layout to consider, as (GPUs, data parallel).
    """

    size: ModelSize
    draft: DraftCost | None
    gpu: Gpu
    work: Workload
    costs: Costs
    only: tuple[int, bool] | None = None

    def most_requests(self, layout: Layout) -> int:
        """Return how many requests of full length fit into a rank's memory; 0 if the weights do not fit."""
        models = [self.size, *([self.draft.size] if self.draft else [])]
        room = self.gpu.memory * MEMORY_SHARE - sum(layout.weight_bytes(size) for size in models)
        request = sum(layout.cache_bytes(size, self.work.input + self.work.output) for size in models)
        return max(0, min(TABLE_SIZES[-1], int(room / request)))

    def batch(self, layout: Layout, requests: int) -> DecodeBatch:
        """Return the batch of `requests` with the draft length that gives the most tokens per second."""
        head, context = self.draft.size if self.draft else None, self.work.input + self.work.output / 2
        lengths = {0: 1.0, **(self.draft.accept_length if self.draft else {})}
        rank = Rank(self.gpu, layout, self.costs)
        seconds = {
            drafts: rank.round_s(self.size, head, requests=requests, drafts=drafts, context=context)
            for drafts in lengths
        }
        best = max(lengths, key=lambda drafts: lengths[drafts] / seconds[drafts])
        return DecodeBatch(requests, best, lengths[best], seconds[best], seconds[0])

    def table(self, deployment: Deployment) -> list[DecodeBatch]:
        """Return the best draft length by requests per rank."""
        layout = deployment.layout
        sizes = {n for n in (*TABLE_SIZES, deployment.batch.requests) if n <= self.most_requests(layout)}
        return [self.batch(layout, requests) for requests in sorted(sizes)]

    def layouts(self, gpus: int) -> Iterator[Layout]:
        """Yield the layouts that divide the GPUs, fit a node or several nodes, and have memory for a request."""
        for n in (n for n in range(1, gpus + 1) if gpus % n == 0 and (NODE % n == 0 or n % NODE == 0)):
            found = [Layout(n)] if self.size.heads % n == 0 else []
            if self.size.n_experts and self.size.n_experts % n == 0 and n > 1:
                found += [Layout(n, True)] if n <= NODE else [Layout(n, True), Layout(n, True, two_batches=True)]
            for layout in found:
                if self.only in (None, (layout.gpus, layout.data_parallel)) and self.most_requests(layout):
                    yield layout

    def best(self, gpus: int) -> Deployment:
        """Return the deployment with the most requests per second, then the shortest time per token.

        Raises `PlanError` when the model does not fit, or the limits cannot be met.
        """
        layouts, work, there = list(self.layouts(gpus)), self.work, f"{gpus} {self.gpu.name}"
        if not layouts:
            size, context = self.size, work.input + work.output
            weights = size.body_bytes + size.expert_bytes + 2 * (size.head + size.embedding)
            raise PlanError(
                f"{size.name} does not fit {there}{f' as {Layout(*self.only).name}' if self.only else ''}: "
                f"{weights / GB:.1f} GB of weights and {size.cache.bytes(context) / GB:.2f} GB of cache per request of "
                f"{context:,} tokens, {gpus * self.gpu.memory * MEMORY_SHARE / GB:.0f} GB of memory; a layout divides "
                f"the GPUs, a node and the {size.heads} heads, or the experts. "
                "Use more or larger GPUs, fewer bits per weight, or leave the layout out"
            )
        found = [one for layout in layouts for one in self._deployments(layout, gpus // layout.gpus)]
        if not found:
            limits = [] if work.max_tpot_s is None else [f"{1000 * work.max_tpot_s:g} ms per token"]
            limits += [] if work.rate is None else [f"{work.rate:g} requests per second"]
            raise PlanError(f"no layout of {there} reaches {' with '.join(limits)}; allow more time, or add GPUs")
        best = max(found, key=lambda one: (round(one.requests_per_s, 9), -one.tpot_s))
        if work.rate is not None and best.requests_per_s < work.rate * (1 - 1e-9):
            raise PlanError(
                f"{there} serve at most {best.requests_per_s:.3g} requests per second, but the rate is "
                f"{work.rate:g}; use about {math.ceil(gpus * work.rate / best.requests_per_s)} GPUs"
            )
        return best

    def _deployments(self, layout: Layout, count: int) -> Iterator[Deployment]:
        """Yield the deployments of this layout that meet the limits, by batch size."""
        work, ranks = self.work, layout.ranks * count
        reads = Rank(self.gpu, layout, self.costs).prefill_s(self.size, work.input)
        most = self.most_requests(layout)
        if work.concurrency is not None:
            most = min(most, math.ceil(work.concurrency / ranks))
        sizes = {*range(1, 17), *TABLE_SIZES, *(3 * n // 2 for n in TABLE_SIZES)}
        for requests in sorted({most, *(n for n in sizes if n <= most)}):
            batch = self.batch(layout, requests)
            both = reads + work.output / batch.tokens_per_s
            rate, ttft = ranks / both, reads + batch.round_s / 2
            tpot = (requests * both - reads) / work.output  # its own prefill does not count
            if work.concurrency is not None:
                rate = min(rate, work.concurrency / (requests * both))
            if work.rate is not None:
                rate = min(rate, work.rate)
                load = rate * reads / ranks
                ttft += reads * load / (2 * (1 - load))
            if work.max_tpot_s is None or tpot <= work.max_tpot_s:
                yield Deployment(layout, count, batch, rate, tpot, ttft)


def plan_text(planner: Planner, best: Deployment, table: Sequence[DecodeBatch]) -> str:
    """Return the plan without the launch lines."""
    lines = ["requests a rank  drafts  decoded tokens/s a rank  of plain  ms a token"]
    for one in table:
        lines.append(
            f"{one.requests:>15}  {one.drafts:>6}  {one.tokens_per_s:>23,.1f}  {f'x{one.gain:.2f}':>8}  "
            f"{1000 * one.round_s / one.committed:>10.2f}"
        )
    fitted = sum(1 for case in CASES if case.fitted)
    own = "" if planner.costs == Costs() else " A layer's fixed time is from your measured steps."
    if planner.draft is not None:
        own += " None of them states drafts together with overlapped scheduling, as planned here."
    trust = (
        f"How far to trust it: a roofline with {fitted} costs fitted to {fitted} published figures; "
        f"{len(CASES) - fitted} further ones it predicts within {100 * PREDICTED_WITHIN:.0f} % "
        f"(toolkit plan --published).{own}"
    )
    return "\n\n".join((_what(planner, best), _predicted(planner, best), "\n".join(lines), trust))


def _what(planner: Planner, best: Deployment) -> str:
    size, gpu, work, layout = planner.size, planner.gpu, planner.work, best.layout
    context = work.input + work.output
    experts = f", {size.n_experts} experts of which {size.chosen} a token" if size.n_experts else ""
    fp8 = f", {gpu.flops_8 / 1e12:g} fp8" if gpu.flops_8 else ""
    rows = [
        f"{size.name}: {size.parameters / 1e9:.1f}B parameters, {size.active / 1e9:.1f}B a token{experts}, "
        f"{size.bits:g} bits; cache {size.cache.bytes(context) / context / 1024:.1f} KiB a token",
        f"{gpu.name}: {gpu.memory / GB:g} GB, {gpu.bandwidth / GB:,.0f} GB/s, {gpu.flops / 1e12:g} TFLOPS bf16{fp8}",
        f"memory of a GPU: {layout.weight_bytes(size) / GB:.1f} GB weights of the target, "
        f"{layout.cache_bytes(size, context) / GB:.2f} GB cache a request of {context:,} tokens, of "
        f"{gpu.memory * MEMORY_SHARE / GB:.1f} GB: at most {planner.most_requests(layout)} requests a rank",
    ]
    if size.max_context and context > size.max_context:
        rows.append(
            f"{context:,} tokens a request are more than the target's max_position_embeddings of {size.max_context:,}: "
            "engines refuse such requests, and the target was not trained for them"
        )
    if planner.draft is None:
        rows.append("no head: plain decoding (--draft, or --accept-lengths)")
    else:
        lengths = ", ".join(f"{n}: {a:.2f}" for n, a in planner.draft.accept_length.items())
        rows.append(f"{planner.draft.kind} head, accept_length by drafts {lengths} ({planner.draft.source})")
    return "\n".join(rows)


def _predicted(planner: Planner, best: Deployment) -> str:
    batch, layout, gpus = best.batch, best.layout, best.count * best.layout.gpus
    how = f"DP attention {layout.gpus}, EP {layout.gpus}" if layout.data_parallel else f"TP {layout.gpus}"
    how += ", two batches" if layout.two_batches else ""
    drafts = f"{batch.drafts} a round, x{batch.gain:.2f} of plain decoding" if batch.drafts else "none, plain decoding"
    tokens = best.requests_per_s * planner.work.output
    lines = [
        f"plan for {gpus} GPU(s):",
        f"  engines: {best.count} x {layout.gpus} GPU(s) ({how}), {batch.requests} request(s) a rank",
        f"  drafts: {drafts}; a round takes {1000 * batch.round_s:.1f} ms",
        f"  predicted: {best.requests_per_s:.3g} requests/s, {tokens:,.0f} tokens/s, {tokens / gpus:,.1f} a GPU; "
        f"{1000 * best.tpot_s:.1f} ms a token, first token after {best.ttft_s:.2f} s",
    ]
    places, wanted = layout.ranks * best.count * batch.requests, planner.work.concurrency or 0
    if wanted > places:
        lines.append(
            f"  of {wanted} requests in flight {places} are served at a time; the other {wanted - places} wait first, "
            "which the time to the first token leaves out"
        )
    return "\n".join(lines)
