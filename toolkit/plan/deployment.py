"""Which engines on which GPUs: layouts that fit, what each yields, and whether reading prompts elsewhere pays.

The queue of a rank with b requests, each reading `input` tokens (P seconds) and writing `output` tokens in rounds of
T(b) seconds that commit a tokens:

    together    requests a second = 1 / (P + output * T / (a * b))        a prompt being read stops the rank's rounds
    split       requests a second = min(prefill ranks / P, decode ranks * a * b / (output * T))
    TPOT        together T / a + (b - 1) * P / output: the others' prompts are pauses, its own is not; split T / a

Requests that come at a rate wait for a prompt reader as in an M/D/1 queue: P * load / (2 * (1 - load)).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from toolkit.plan.draft_cost import Draft
from toolkit.plan.errors import PlanError
from toolkit.plan.gpus import Gpu
from toolkit.plan.model_size import ModelSize
from toolkit.plan.step_time import Costs, Layout, cache_bytes, prefill_s, round_s, weight_bytes

MEMORY_SHARE = 0.88  # of a GPU for weights and cache; the rest is for activations and graphs
SPLIT_MARGIN = 1.05  # two kinds of engines are more to run: they have to be worth it
BIGGEST_BATCH = 1024
IDLE_RATE = 1e-9  # requests a second that keep nobody waiting


@dataclass(frozen=True)
class Workload:
    """input, output: tokens of a request. Either `concurrency`, requests in flight, or `rate`, requests a second.
    max_tpot_s: seconds a token that a reader will wait at most, while it is written."""

    input: int
    output: int
    concurrency: int | None = None
    rate: float | None = None
    max_tpot_s: float | None = None

    def __post_init__(self) -> None:
        if self.input < 1 or self.output < 1:
            raise PlanError(f"{self.input} input and {self.output} output tokens came; at least 1 each is needed")
        if (self.concurrency is None) == (self.rate is None):
            raise PlanError("either a concurrency (requests in flight) or a rate (requests a second) is needed")
        for name, value in (("concurrency", self.concurrency), ("rate", self.rate), ("TPOT", self.max_tpot_s)):
            if value is not None and value <= 0:
                raise PlanError(f"{name} is {value}; a number above 0 is needed")


@dataclass(frozen=True)
class Engines:
    """So many engines of one layout."""

    layout: Layout
    count: int

    @property
    def gpus(self) -> int:
        return self.layout.gpus * self.count

    @property
    def ranks(self) -> int:
        return self.layout.ranks * self.count


@dataclass(frozen=True)
class Batch:
    """What a decoding rank does with so many requests: the draft length that yields most, and a round of it."""

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
        """Over plain decoding of as many requests."""
        return self.committed * self.plain_s / self.round_s


@dataclass(frozen=True)
class Deployment:
    """prefill: engines that only read prompts; None: `decode` does both. tpot_s: with the pauses for prompts."""

    decode: Engines
    prefill: Engines | None
    batch: Batch
    most_requests: int
    requests_per_s: float
    tpot_s: float
    ttft_s: float

    @property
    def gpus(self) -> int:
        return self.decode.gpus + (self.prefill.gpus if self.prefill else 0)


@dataclass(frozen=True)
class Planner:
    """Everything a deployment is judged by. overlap: the engine's host work runs beside the GPU's. only: the one layout
    of decoding engines to consider (GPUs, data parallel)."""

    size: ModelSize
    draft: Draft | None
    gpu: Gpu
    work: Workload
    costs: Costs
    node: int = 8
    overlap: bool = True
    only: tuple[int, bool] | None = None

    def most_requests(self, layout: Layout) -> int:
        """Requests of full length whose cache fits a rank beside the weights; 0 where not even the weights fit."""
        head = self.draft.size if self.draft else None
        weights = weight_bytes(self.size, layout) + (weight_bytes(head, layout) if head else 0.0)
        context = self.work.input + self.work.output
        cache = cache_bytes(self.size, layout, context) + (cache_bytes(head, layout, context) if head else 0.0)
        return max(0, min(BIGGEST_BATCH, int((self.gpu.memory * MEMORY_SHARE - weights) / cache)))

    def batch(self, layout: Layout, requests: int) -> Batch:
        """With the draft length that yields most tokens a second."""
        plain = self._round_s(layout, requests, 0)
        best = Batch(requests, 0, 1.0, plain, plain)
        for drafts in self.draft.accept_length if self.draft else ():
            one = Batch(requests, drafts, self._committed(drafts), self._round_s(layout, requests, drafts), plain)
            best = max(best, one, key=lambda found: found.tokens_per_s)
        return best

    def _committed(self, drafts: int) -> float:
        assert self.draft is not None
        return self.draft.committed(drafts)

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
        """Layouts that divide so many GPUs, and nodes or whole ones of them, and hold at least one request."""
        for n in (n for n in range(1, gpus + 1) if gpus % n == 0 and (self.node % n == 0 or n % self.node == 0)):
            found = [Layout(n, node=self.node)] if self.size.heads % n == 0 else []
            if self.size.n_experts and n > 1:
                spread = Layout(n, True, self.node, redundant=-self.size.n_experts % n)
                found += [spread] if n <= self.node else [spread, replace(spread, two_batches=True)]
            for layout in found:
                if self.only in (None, (layout.gpus, layout.data_parallel)) and self.most_requests(layout):
                    yield layout

    def best(self, gpus: int) -> tuple[Deployment, Deployment | None]:
        """The best deployment, and what it is better than: the best of the other kind (together or split).

        Raises `PlanError` when the model does not fit, or the limits cannot be kept.
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
        """Those that keep the limits: together, and split."""
        together = (
            one for layout in self.layouts(gpus) for one in self._together(Engines(layout, gpus // layout.gpus))
        )
        return list(together), list(self._splits(gpus))

    def _worth(self, deployment: Deployment) -> tuple[float, float]:
        """Most requests; among those that serve the whole rate, the quickest."""
        return round(deployment.requests_per_s, 9), -deployment.tpot_s

    def _check_rate(self, best: Deployment) -> None:
        if self.work.rate is not None and best.requests_per_s < self.work.rate * (1 - 1e-9):
            raise PlanError(
                f"{best.gpus} GPUs serve {best.requests_per_s:.3g} requests a second at most, {self.work.rate:g} are "
                f"asked for: about {math.ceil(best.gpus * self.work.rate / best.requests_per_s)} GPUs are needed"
            )

    def _together(self, engines: Engines) -> Iterator[Deployment]:
        layout, work = engines.layout, self.work
        reads = prefill_s(self.size, self.gpu, layout, self.costs, work.input)
        for batch in self._batches(engines):
            writes = work.output / batch.tokens_per_s
            rate = engines.ranks / (reads + writes)
            if work.concurrency is not None:
                rate = min(rate, work.concurrency / (batch.requests * (reads + writes)))
            tpot = (batch.requests * (reads + writes) - reads) / work.output  # its own prompt is no pause
            yield from self._judged(engines, None, batch, rate, tpot, reads, reads + batch.round_s / 2)

    def _splits(self, gpus: int) -> Iterator[Deployment]:
        work = self.work
        anyhow = replace(self, only=None)
        readers = [layout for n in range(1, gpus) for layout in anyhow.layouts(n) if layout.gpus == n]
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

    def _batches(self, engines: Engines) -> Iterator[Batch]:
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
        batch: Batch,
        rate: float,
        tpot: float,
        reads: float,
        ttft: float,
    ) -> Iterator[Deployment]:
        """The deployment, unless its readers would wait too long; requests cannot be served faster than they come."""
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
        """The limit that cannot be kept, else the layout that was asked for, else memory."""
        work, there = self.work, f"{gpus} {self.gpu.name}"
        limit = "" if work.max_tpot_s is None else f"{1000 * work.max_tpot_s:g} ms a token"
        idle = work if work.rate is None else replace(work, rate=IDLE_RATE)
        if any(replace(self, work=idle)._found(gpus)):
            return (
                f"{there} cannot serve {work.rate:g} requests a second{limit and f' within {limit}'}; lower rates they "
                f"can: lower the rate, {limit and 'allow more time a token, '}or add GPUs"
            )
        if any(replace(self, work=replace(idle, max_tpot_s=None))._found(gpus)):
            return f"no layout of {there} keeps {limit}, even with one request a rank; allow more, or add GPUs"
        others = dict.fromkeys(layout.name for layout in replace(self, only=None).layouts(gpus))
        if self.only is not None and others:
            return (
                f"{self.size.name} cannot run on {there} as {Layout(*self.only).name}: a layout divides the GPUs, a "
                f"node and the {self.size.heads} heads (or spreads experts), and holds the weights and one request. "
                f"Name another --layout ({', '.join(others)}), or none"
            )
        weights = self.size.body_bytes + self.size.expert_bytes + 2 * (self.size.head + self.size.embedding)
        context, room = work.input + work.output, gpus * self.gpu.memory * MEMORY_SHARE
        return (
            f"{self.size.name} does not fit {there}: {weights / 1e9:.1f} GB of weights and "
            f"{self.size.cache.bytes(context) / 1e9:.2f} GB of cache a request of {context:,} tokens; {room / 1e9:.0f} "
            f"GB are there, and layouts divide {self.size.heads} heads"
            f"{' or spread experts' if self.size.n_experts else ''}. More GPUs, larger ones or fewer bits a weight are "
            "needed"
        )
