"""What a server has done, counted from the engine's event log: the metrics of /metrics and of the status page.

Answers count while they are written: an event counts once all its tokens are in the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toolkit.infer.engine.engine_load import EngineLoad
from toolkit.infer.load.answer import Answer, events_of_answer
from toolkit.infer.request.request import NOT_FINITE, Request, summarise
from toolkit.infer.server.live_rates import LiveRates, Rates, Sample
from toolkit.infer.server.metric_series import PREFIX, SERIES

BUCKETS = tuple(base * 10.0**power for power in range(-3, 3) for base in (1, 2.5, 5))  # 1 ms to 500 s


@dataclass
class _Followed:
    """One answer that is written, and how much of it has been counted. committed: tokens of the counted events."""

    request: Request
    answer: Answer
    tokens: int = 0
    events: int = 0
    committed: int = 0


class ServerMetrics(Collector):
    """Counters of one server. Only the event loop's thread uses them.

    load: reads the engine's load. failed_steps: reads how many steps have failed. replies: by HTTP status."""

    def __init__(self, load: Callable[[], EngineLoad], failed_steps: Callable[[], int]) -> None:
        disable_created_metrics()  # one series less for each counter; a restart is seen by the value
        self.counts: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.replies: Counter[str] = Counter()
        self.offered_by_depth: Counter[int] = Counter()
        self.accepted_by_depth: Counter[int] = Counter()
        self.rates = LiveRates()
        self._load, self._failed_steps = load, failed_steps
        self._followed: dict[int, _Followed] = {}  # id(answer) -> its state
        self._registry = CollectorRegistry()
        self._histograms = {
            name: PrometheusHistogram(PREFIX + name, one.text, registry=self._registry, buckets=BUCKETS)
            for name, one in SERIES.items()
            if one.kind == "histogram"
        }
        self._registry.register(self)

    def follow(self, request: Request, answer: Answer) -> None:
        """Count this answer from now on, until `record`."""
        self._followed[id(answer)] = _Followed(request, answer)

    def record(self, request: Request, answer: Answer, now: float) -> None:
        """Count the end of an answer. now: perf_counter seconds, the clock of `request.submitted_at`."""
        self._count(self._followed.pop(id(answer), _Followed(request, answer)))
        self.finished[answer.finish_reason or "abort"] += 1
        self.counts["prompt_tokens_total"] += len(request.prompt_ids)
        self.counts["prompt_tokens_cached_total"] += request.cached_tokens
        self.counts["preemptions_total"] += request.preemptions
        self.counts["nonfinite_answers_total"] += request.stop_reason == NOT_FINITE
        times = self._histograms
        times["request_seconds"].observe(now - request.submitted_at)
        if request.admitted_at is not None:
            times["queue_seconds"].observe(request.admitted_at - request.submitted_at)
        if request.first_token_at is None:
            return
        times["time_to_first_token_seconds"].observe(request.first_token_at - request.submitted_at)
        if answer.n_tokens > 1:
            ended = now if request.finished_at is None else request.finished_at
            times["time_per_output_token_seconds"].observe((ended - request.first_token_at) / (answer.n_tokens - 1))

    def sample(self, now: float) -> Sample:
        """Count what has been written so far, and keep it for the figures of the last seconds. now: perf_counter."""
        for one in self._followed.values():
            self._count(one)
        load = self.load
        self.counts["failed_steps_total"] = self._failed_steps()
        self.counts["refused_rows_total"], self.counts["eager_rounds_total"] = load.refused_rows, load.eager_rounds
        sample = Sample.of(now, self.counts)
        self.rates.add(sample)
        return sample

    @property
    def load(self) -> EngineLoad:
        """The engine's load now."""
        return self._load()

    def mean_seconds(self, name: str) -> float | None:
        """The mean of a histogram since the start; None without a value."""
        samples = {one.name: one.value for metric in self._histograms[name].collect() for one in metric.samples}
        count = samples[f"{PREFIX}{name}_count"]
        return samples[f"{PREFIX}{name}_sum"] / count if count else None

    def text(self, accept: str, now: float) -> tuple[bytes, str]:
        """The metrics and their content type, in the format that a client accepts (the header Accept)."""
        self.sample(now)
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterable[Metric]:
        """All metrics but the histograms, for prometheus_client."""
        values: dict[str, dict[str, float]] = {
            "requests_total": dict(self.finished),
            "http_requests_total": dict(self.replies),
            "verify_steps_per_pos_total": _by_position(self.offered_by_depth),
            "draft_tokens_accepted_per_pos_total": _by_position(self.accepted_by_depth, self.offered_by_depth),
        }
        gauges = self._gauges()
        for name, one in SERIES.items():
            if one.kind == "histogram":
                continue
            family = CounterMetricFamily if one.kind == "counter" else GaugeMetricFamily
            metric = family(PREFIX + name, one.text, labels=[one.label] if one.label else None)
            if one.label:
                for label, value in sorted(values[name].items()):
                    metric.add_metric([label], value)
            elif one.kind == "counter" or name in gauges:
                metric.add_metric([], self.counts[name] if one.kind == "counter" else gauges[name])
            yield metric

    def _gauges(self) -> dict[str, float]:
        load, rates = self.load, self.rates.latest
        acceptance = {name: getattr(rates, name) for name in Rates._fields if name in SERIES}
        return {
            "tokens_per_second": rates.tokens_per_s,
            "requests_in_flight": load.running + load.waiting,
            "requests_running": load.running,
            "requests_waiting": load.waiting,
            "cache_request_tokens": load.request_tokens,
            "cache_tokens": load.cached_tokens,
            "cache_capacity_tokens": load.capacity_tokens,
            "cache_usage": load.request_tokens / load.capacity_tokens,
            **{name: value for name, value in acceptance.items() if value is not None},
        }

    def _count(self, one: _Followed) -> None:
        """Add the tokens and events of an answer that were not counted yet."""
        new = events_of_answer(one.request.events[one.events :], one.answer.n_tokens - one.committed)
        stats = summarise(new)
        self.counts["completion_tokens_total"] += one.answer.n_tokens - one.tokens
        self.counts["decode_steps_total"] += len(new)
        self.counts["plain_steps_total"] += sum(event.offered == 0 for event in new)
        self.counts["verify_steps_total"] += stats.verify_steps
        self.counts["draft_tokens_offered_total"] += stats.offered
        self.counts["draft_tokens_accepted_total"] += stats.accepted
        self.counts["committed_tokens_total"] += stats.accepted + stats.verify_steps
        self.offered_by_depth.update(dict(enumerate(stats.offered_by_depth)))
        self.accepted_by_depth.update(dict(enumerate(stats.accepted_by_depth)))
        one.tokens, one.events = one.answer.n_tokens, one.events + len(new)
        decoded = sum(event.committed for event in new)
        self.counts["decoded_tokens_total"] += decoded
        one.committed += decoded


def _by_position(values: Counter[int], positions: Iterable[int] | None = None) -> dict[str, float]:
    return {str(depth): values[depth] for depth in (values if positions is None else positions)}
