"""Choose the engines and layouts of a deployment, with prefill and decode together or disaggregated.

A rank serves b requests. Each has `input` prompt tokens (P seconds of prefill) and `output` tokens, which are decoded
in rounds of T(b) seconds that commit a tokens:

    together        requests per second = 1 / (P + output * T / (a * b))        prefill interrupts the rank's rounds
    disaggregated   requests per second = min(prefill ranks / P, decode ranks * a * b / (output * T))
    TPOT            together: T / a + (b - 1) * P / output, as prefill of other requests interrupts decoding;
                    disaggregated: T / a

Requests that arrive at a rate wait for prefill as in an M/D/1 queue: P * load / (2 * (1 - load)).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from toolkit.errors import PlanError
from toolkit.plan.draft_cost import DraftCost
from toolkit.plan.gpus import Gpu
from toolkit.plan.model_size import ModelSize
from toolkit.plan.step_time import Costs, Layout, cache_bytes, prefill_s, round_s, weight_bytes

MEMORY_SHARE = 0.88  # share of GPU memory for weights and cache; the rest is for activations and graphs
SPLIT_MARGIN = 1.05  # disaggregation must be this much better, as two kinds of engines are harder to operate
BIGGEST_BATCH = 1024
IDLE_RATE = 1e-9  # requests per second, so few that none waits


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
        if self.input < 1 or self.output < 1:
            raise PlanError(f"input is {self.input} and output is {self.output} tokens; expected at least 1 each")
        if (self.concurrency is None) == (self.rate is None):
            raise PlanError("give exactly one of concurrency (requests in flight) and rate (requests per second)")
        for name, value in (("concurrency", self.concurrency), ("rate", self.rate), ("TPOT", self.max_tpot_s)):
            if value is not None and value <= 0:
                raise PlanError(f"{name} is {value}; expected a number above 0")


@dataclass(frozen=True)
class Engines:
    """`count` engines of one layout."""

    layout: Layout
    count: int

    @property
    def gpus(self) -> int:
        return self.layout.gpus * self.count

    @property
    def ranks(self) -> int:
        return self.layout.ranks * self.count


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
    """prefill: engines for prefill only; None: `decode` does both. tpot_s includes interruptions by prefill."""

    decode: Engines
    prefill: Engines | None
    batch: DecodeBatch
    most_requests: int
    requests_per_s: float
    tpot_s: float
    ttft_s: float

    @property
    def gpus(self) -> int:
        return self.decode.gpus + (self.prefill.gpus if self.prefill else 0)


@dataclass(frozen=True)
class Planner:
    """The inputs of a plan.

    overlap: the engine overlaps host and GPU work. only: the only layout to consider for decode engines, as (GPUs, data
    parallel).
    """

    size: ModelSize
    draft: DraftCost | None
    gpu: Gpu
    work: Workload
    costs: Costs
    node: int = 8
    overlap: bool = True
    only: tuple[int, bool] | None = None

    def most_requests(self, layout: Layout) -> int:
        """Return how many requests of full length fit into a rank's memory; 0 if the weights do not fit."""
        head = self.draft.size if self.draft else None
        weights = weight_bytes(self.size, layout) + (weight_bytes(head, layout) if head else 0.0)
        context = self.work.input + self.work.output
        cache = cache_bytes(self.size, layout, context) + (cache_bytes(head, layout, context) if head else 0.0)
        return max(0, min(BIGGEST_BATCH, int((self.gpu.memory * MEMORY_SHARE - weights) / cache)))

    def batch(self, layout: Layout, requests: int) -> DecodeBatch:
        """Return the batch of `requests` with the draft length that gives the most tokens per second."""
        plain = self._round_s(layout, requests, 0)
        best = DecodeBatch(requests, 0, 1.0, plain, plain)
        for drafts, committed in self.draft.accept_length.items() if self.draft else ():
            one = DecodeBatch(requests, drafts, committed, self._round_s(layout, requests, drafts), plain)
            best = max(best, one, key=lambda found: found.tokens_per_s)
        return best

    def _round_s(self, layout: Layout, requests: int, drafts: int) -> float:
        return round_s(
            self.size,
            self.draft.size if self.draft else None,
            self.gpu,
            layout,
            self.costs,
            requests=requests,
            drafts=drafts,
            context=self.work.input + self.work.output / 2,
            overlap=self.overlap,
        )

    def layouts(self, gpus: int) -> Iterator[Layout]:
        """Yield the layouts that divide the GPUs, fit a node or several nodes, and have memory for a request."""
        for n in (n for n in range(1, gpus + 1) if gpus % n == 0 and (self.node % n == 0 or n % self.node == 0)):
            found = [Layout(n, node=self.node)] if self.size.heads % n == 0 else []
            if self.size.n_experts and n > 1:
                spread = Layout(n, True, self.node, redundant=-self.size.n_experts % n)
                found += [spread] if n <= self.node else [spread, replace(spread, two_batches=True)]
            for layout in found:
                if self.only in (None, (layout.gpus, layout.data_parallel)) and self.most_requests(layout):
                    yield layout

    def best(self, gpus: int) -> tuple[Deployment, Deployment | None]:
        """Return the best deployment, and the best one of the other kind (together or disaggregated).

        Raises `PlanError` when the model does not fit, or the limits cannot be met.
        """
        together, split = self._found(gpus)
        if not together and not split:
            raise PlanError(self._why_not(gpus))
        one = max(together, key=self._worth, default=None)
        two = max(split, key=self._worth, default=None)
        if one is None or (two is not None and two.requests_per_s > SPLIT_MARGIN * one.requests_per_s):
            assert two is not None
            best, other = two, one
        else:
            best, other = one, two
        self._check_rate(best)
        return best, other

    def _found(self, gpus: int) -> tuple[list[Deployment], list[Deployment]]:
        """Return the deployments that meet the limits: together, and disaggregated."""
        together = (
            one for layout in self.layouts(gpus) for one in self._together(Engines(layout, gpus // layout.gpus))
        )
        return list(together), list(self._splits(gpus))

    def _worth(self, deployment: Deployment) -> tuple[float, float]:
        """Return the sort key: most requests per second, then the shortest time per token."""
        return round(deployment.requests_per_s, 9), -deployment.tpot_s

    def _check_rate(self, best: Deployment) -> None:
        if self.work.rate is not None and best.requests_per_s < self.work.rate * (1 - 1e-9):
            raise PlanError(
                f"{best.gpus} GPUs serve at most {best.requests_per_s:.3g} requests per second, but the rate is "
                f"{self.work.rate:g}; use about {math.ceil(best.gpus * self.work.rate / best.requests_per_s)} GPUs"
            )

    def _together(self, engines: Engines) -> Iterator[Deployment]:
        layout, work = engines.layout, self.work
        reads = prefill_s(self.size, self.gpu, layout, self.costs, work.input)
        for batch in self._batches(engines):
            writes = work.output / batch.tokens_per_s
            rate = engines.ranks / (reads + writes)
            if work.concurrency is not None:
                rate = min(rate, work.concurrency / (batch.requests * (reads + writes)))
            tpot = (batch.requests * (reads + writes) - reads) / work.output  # its own prefill does not count
            yield from self._judged(engines, None, batch, rate, tpot, reads, reads + batch.round_s / 2)

    def _splits(self, gpus: int) -> Iterator[Deployment]:
        work = self.work
        unrestricted = replace(self, only=None)
        readers = [layout for n in range(1, gpus) for layout in unrestricted.layouts(n) if layout.gpus == n]
        smallest = sorted({layout.gpus for layout in readers})[:2]
        for reader in (layout for layout in readers if layout.gpus in smallest and not layout.two_batches):
            reads = prefill_s(self.size, self.gpu, reader, self.costs, work.input)
            carried = cache_bytes(self.size, reader, work.input) / (self.gpu.network * self.costs.network_share)
            for count in range(1, (gpus - 1) // reader.gpus + 1):
                prefill, left = Engines(reader, count), gpus - count * reader.gpus
                for layout in self.layouts(left):
                    decode = Engines(layout, left // layout.gpus)
                    for batch in self._batches(decode):
                        rate = min(prefill.ranks / reads, decode.ranks * batch.tokens_per_s / work.output)
                        tpot = batch.round_s / batch.committed
                        if work.concurrency is not None:
                            rate = min(rate, work.concurrency / (reads + carried + work.output * tpot))
                        yield from self._judged(decode, prefill, batch, rate, tpot, reads, reads + carried)

    def _batches(self, engines: Engines) -> Iterator[DecodeBatch]:
        most = self.most_requests(engines.layout)
        if self.work.concurrency is not None:
            most = min(most, math.ceil(self.work.concurrency / engines.ranks))
        sizes = {most, *(n for n in range(1, 17) if n <= most)}
        sizes |= {n for power in range(4, 11) for n in (2**power, 3 * 2 ** (power - 1)) if n <= most}
        for requests in sorted(sizes):
            yield self.batch(engines.layout, requests)

    def _judged(
        self,
        decode: Engines,
        prefill: Engines | None,
        batch: DecodeBatch,
        rate: float,
        tpot: float,
        reads: float,
        ttft: float,
    ) -> Iterator[Deployment]:
        """Yield the deployment if it meets the limits; at most the requests that arrive are served."""
        work = self.work
        if work.max_tpot_s is not None and tpot > work.max_tpot_s:
            return
        if work.rate is not None:
            rate = min(rate, work.rate)
            load = rate * reads / (prefill or decode).ranks
            if load >= 1:
                return
            ttft += reads * load / (2 * (1 - load))
        yield Deployment(decode, prefill, batch, self.most_requests(decode.layout), rate, tpot, ttft)

    def _why_not(self, gpus: int) -> str:
        """Explain why there is no deployment: the limit that cannot be met, else the given layout, else memory."""
        work, there = self.work, f"{gpus} {self.gpu.name}"
        limit = "" if work.max_tpot_s is None else f"{1000 * work.max_tpot_s:g} ms per token"
        idle = work if work.rate is None else replace(work, rate=IDLE_RATE)
        if any(replace(self, work=idle)._found(gpus)):
            return (
                f"{there} cannot serve {work.rate:g} requests per second{limit and f' within {limit}'}, only lower "
                f"rates; lower the rate, {limit and 'allow more time per token, '}or add GPUs"
            )
        if any(replace(self, work=replace(idle, max_tpot_s=None))._found(gpus)):
            return f"no layout of {there} reaches {limit}, even with one request per rank; allow more, or add GPUs"
        others = dict.fromkeys(layout.name for layout in replace(self, only=None).layouts(gpus))
        if self.only is not None and others:
            return (
                f"{self.size.name} cannot run on {there} as {Layout(*self.only).name}: a layout must divide the GPUs, "
                f"a node and the {self.size.heads} heads (or distribute experts), and have memory for the weights and "
                f"one request. Give another --layout ({', '.join(others)}), or omit it"
            )
        weights = self.size.body_bytes + self.size.expert_bytes + 2 * (self.size.head + self.size.embedding)
        context, room = work.input + work.output, gpus * self.gpu.memory * MEMORY_SHARE
        return (
            f"{self.size.name} does not fit {there}: {weights / 1e9:.1f} GB of weights and "
            f"{self.size.cache.bytes(context) / 1e9:.2f} GB of cache per request of {context:,} tokens; "
            f"{room / 1e9:.0f} GB are available, and layouts divide {self.size.heads} heads"
            f"{' or distribute experts' if self.size.n_experts else ''}. Use more or larger GPUs, or fewer bits per "
            "weight"
        )
