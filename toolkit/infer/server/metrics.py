"""What operators look at: the metrics of a server, the figures of its status page, and a log line now and then.

Answers count while they are written: an event of the engine's log counts once all its tokens are in the answer.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from toolkit.infer.engine.engine import EngineLoad
from toolkit.infer.request.request import NOT_FINITE, Answer, Request, events_of_answer, summarise
from toolkit.log import get_logger

logger = get_logger(__name__)

PREFIX = "toolkit_"
BUCKETS = tuple(base * 10.0**power for power in range(-3, 3) for base in (1, 2.5, 5))  # 1 ms to 500 s
SAMPLE_S = 1.0  # between two samples
KEPT_SAMPLES = 180  # three minutes
LATEST_S = 10.0  # "the last seconds"


class Series(NamedTuple):
    """A metric. label: of its values, if there are several."""

    kind: str
    text: str
    label: str = ""


# By name, without PREFIX. Gauges of the last seconds are NaN if nothing was counted in them.
SERIES = {
    "requests_total": Series(
        "counter",
        "Answers that ended, by finish reason (abort: the client left, its time was over, a step failed, or the end)",
        "finish_reason",
    ),
    "http_requests_total": Series("counter", "Replies to POST requests, by status (499: the client left)", "status"),
    "failed_steps_total": Series("counter", "Steps of the engine that failed, and with them their requests"),
    "nonfinite_answers_total": Series("counter", "Answers that ended since the target's logits had NaN or infinity"),
    "refused_rows_total": Series("counter", "Times that the cache had no room for the next request of the queue"),
    "eager_rounds_total": Series("counter", "Rounds that no CUDA graph could run, where graphs are on"),
    "prompt_tokens_total": Series("counter", "Prompt tokens of ended answers"),
    "prompt_tokens_cached_total": Series("counter", "Prompt tokens of ended answers that were in the prefix cache"),
    "preemptions_total": Series("counter", "Preemptions of the requests of ended answers, in favour of older requests"),
    "completion_tokens_total": Series("counter", "Tokens of answers"),
    "decode_steps_total": Series("counter", "Steps of each request in which it decoded, drafted or not"),
    "plain_steps_total": Series("counter", "Those of them that drafted nothing, which accept_length leaves out"),
    "decoded_tokens_total": Series("counter", "Tokens of all these steps"),
    "verify_steps_total": Series("counter", "Verify steps counted (with drafts, not truncated by the answer's end)"),
    "draft_tokens_offered_total": Series("counter", "Drafted nodes that were verified, in counted verify steps"),
    "draft_tokens_accepted_total": Series("counter", "Drafted tokens that were accepted, in counted verify steps"),
    "committed_tokens_total": Series(
        "counter", "Tokens of counted verify steps; divided by their number: accept_length since the start"
    ),
    "verify_steps_per_pos_total": Series(
        "counter", "Counted verify steps that offered a drafted token at this position (0: the first)", "position"
    ),
    "draft_tokens_accepted_per_pos_total": Series(
        "counter", "Drafted tokens accepted at this position (0: the first), in counted verify steps", "position"
    ),
    "accept_length": Series("gauge", "Mean tokens per counted verify step in the last seconds, bonus token included"),
    "accept_rate": Series("gauge", "Share of the verified drafted nodes that was accepted in the last seconds"),
    "drafted_share": Series("gauge", "Share of the decode steps that drafted in the last seconds"),
    "tokens_per_step": Series("gauge", "Mean tokens per decode step in the last seconds, plain steps included"),
    "tokens_per_second": Series("gauge", "Tokens of answers per second, in the last seconds"),
    "requests_running": Series("gauge", "Requests that are decoded or read"),
    "requests_waiting": Series("gauge", "Requests in the queue"),
    "cache_request_tokens": Series("gauge", "Tokens that running requests hold"),
    "cache_tokens": Series("gauge", "Tokens in the cache, kept prefixes included"),
    "cache_capacity_tokens": Series("gauge", "Tokens that the cache holds at most"),
    "cache_usage": Series("gauge", "Share of the cache that running requests hold"),
    "queue_seconds": Series("histogram", "Seconds from submission until the prompt is read"),
    "time_to_first_token_seconds": Series("histogram", "Seconds from submission to the first token"),
    "time_per_output_token_seconds": Series("histogram", "Mean seconds per token of an answer after its first"),
    "request_seconds": Series("histogram", "Seconds from submission to the end of an answer"),
}
KINDS: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": partial(Histogram, buckets=BUCKETS)}
LABELLED = [name for name, one in SERIES.items() if one.label]
UNLABELLED = [name for name, one in SERIES.items() if one.kind == "counter" and not one.label]


class Sample(NamedTuple):
    """The counters without labels at a moment. at: seconds of any clock that never goes back."""

    at: float
    totals: Mapping[str, float]


class Rates(NamedTuple):
    """What happened between two samples. tokens: written, of all answers.

    accept_length, accept_rate: of the counted verify steps. drafted_share, tokens_per_step: of all steps of requests,
    plain ones too. None without any."""

    tokens: int = 0
    tokens_per_s: float = 0.0
    accept_length: float | None = None
    accept_rate: float | None = None
    drafted_share: float | None = None
    tokens_per_step: float | None = None

    @classmethod
    def between(cls, first: Sample, last: Sample) -> Self:
        """All 0 and None if the samples are of the same moment."""
        new = {name: last.totals[name] - first.totals[name] for name in UNLABELLED}
        every = new["decode_steps_total"]
        return cls(
            int(new["completion_tokens_total"]),
            _ratio(new["completion_tokens_total"], last.at - first.at) or 0.0,
            _ratio(new["committed_tokens_total"], new["verify_steps_total"]),
            _ratio(new["draft_tokens_accepted_total"], new["draft_tokens_offered_total"]),
            _ratio(every - new["plain_steps_total"], every),
            _ratio(new["decoded_tokens_total"], every),
        )


def _ratio(value: float, count: float) -> float | None:
    return value / count if count else None


@dataclass
class _Followed:
    """One answer that is written, and what of it has been counted. committed: tokens of the counted events."""

    request: Request
    answer: Answer
    tokens: int = 0
    events: int = 0
    committed: int = 0


class ServerMetrics:
    """The metrics of one server. Only the event loop's thread uses them.

    load: reads the engine's load. failed_steps: reads how many steps have failed. `now`: perf_counter seconds."""

    def __init__(self, load: Callable[[], EngineLoad], failed_steps: Callable[[], int]) -> None:
        disable_created_metrics()  # one series less for each counter; a restart is seen by the value
        self._load, self._failed_steps = load, failed_steps
        self._followed: dict[int, _Followed] = {}  # id(answer) -> its state
        self._of_engine: Counts[str] = Counts()  # counters that the engine keeps, as they were last read
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._registry = CollectorRegistry()
        self._series: dict[str, Any] = {
            name: KINDS[one.kind](PREFIX + name, one.text, [one.label] if one.label else [], registry=self._registry)
            for name, one in SERIES.items()
        }

    def count_reply(self, status: int) -> None:
        """Count a reply to a POST request."""
        self._series["http_requests_total"].labels(str(status)).inc()

    def follow(self, request: Request, answer: Answer) -> None:
        """Count this answer from now on, until `record`."""
        self._followed[id(answer)] = _Followed(request, answer)

    def record(self, request: Request, answer: Answer, now: float) -> None:
        """Count the end of an answer."""
        series = self._series
        self._count(self._followed.pop(id(answer), _Followed(request, answer)))
        series["requests_total"].labels(answer.finish_reason or "abort").inc()
        series["prompt_tokens_total"].inc(len(request.prompt_ids))
        series["prompt_tokens_cached_total"].inc(request.cached_tokens)
        series["preemptions_total"].inc(request.preemptions)
        series["nonfinite_answers_total"].inc(request.stop_reason == NOT_FINITE)
        series["request_seconds"].observe(now - request.submitted_at)
        if request.admitted_at is not None:
            series["queue_seconds"].observe(request.admitted_at - request.submitted_at)
        if request.first_token_at is None:
            return
        series["time_to_first_token_seconds"].observe(request.first_token_at - request.submitted_at)
        if answer.n_tokens > 1:
            ended = now if request.finished_at is None else request.finished_at
            seconds = (ended - request.first_token_at) / (answer.n_tokens - 1)
            series["time_per_output_token_seconds"].observe(seconds)

    def sample(self, now: float) -> Sample:
        """Count what has been written so far, and keep it for the figures of the last seconds."""
        for one in self._followed.values():
            self._count(one)
        load = self._load()
        counts = {"failed_steps_total": self._failed_steps(), "refused_rows_total": load.refused_rows}
        counts["eager_rounds_total"] = load.eager_rounds
        for name, count in counts.items():
            self._series[name].inc(count - self._of_engine[name])
            self._of_engine[name] = count
        values = self._values()
        sample = Sample(now, {name: values[name,] for name in UNLABELLED})
        if len(self._samples) > 1 and self._samples[-1].at - self._samples[-2].at < 0.9 * SAMPLE_S:
            self._samples.pop()
        self._samples.append(sample)
        return sample

    @property
    def latest(self) -> Rates:
        """Rates of the last ten seconds, or since the first sample."""
        if not self._samples:
            return Rates()
        last = self._samples[-1]
        earlier = [sample for sample in self._samples if sample.at <= last.at - LATEST_S]
        return Rates.between(earlier[-1] if earlier else self._samples[0], last)

    def text(self, accept: str) -> tuple[bytes, str]:
        """The metrics and their content type, in the format that a client accepts (the header Accept)."""
        self.sample(perf_counter())
        load, rates = self._load(), self.latest
        gauges = {
            "requests_running": load.running,
            "requests_waiting": load.waiting,
            "cache_request_tokens": load.request_tokens,
            "cache_tokens": load.cached_tokens,
            "cache_capacity_tokens": load.capacity_tokens,
            "cache_usage": load.request_tokens / load.capacity_tokens,
            "tokens_per_second": rates.tokens_per_s,
            **{name: value for name, value in rates._asdict().items() if name in SERIES},
        }
        for name, value in gauges.items():
            self._series[name].set(math.nan if value is None else value)
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def status(self, now: float) -> dict[str, Any]:
        """The figures of the status page. Rates that no verify step gives are None.

        now: of the last ten seconds. history: of each second of the last three minutes, the oldest first. positions[i]:
        of the counted verify steps since the start that offered i+1 drafted tokens, how many accepted them."""
        totals, values, samples = self.sample(now).totals, self._values(), list(self._samples)
        labelled = {name: {key[1]: value for key, value in values.items() if key[0] == name} for name in LABELLED}
        offered, accepted = labelled["verify_steps_per_pos_total"], labelled["draft_tokens_accepted_per_pos_total"]
        means = [name for name, one in SERIES.items() if one.kind == "histogram"]
        return {
            "now": self.latest._asdict(),
            "load": asdict(self._load()),
            "total": {
                **{name.removesuffix("_total"): totals[name] for name in UNLABELLED},
                "accept_length": _ratio(totals["committed_tokens_total"], totals["verify_steps_total"]),
                "tokens_per_step": _ratio(totals["decoded_tokens_total"], totals["decode_steps_total"]),
                "requests": labelled["requests_total"],
            },
            "positions": [{"offered": offered[at], "accepted": accepted[at]} for at in sorted(offered, key=int)],
            "mean_seconds": {
                name.removesuffix("_seconds"): _ratio(values[f"{name}_sum",], values[f"{name}_count",])
                for name in means
            },
            "history": [
                {"ago_s": round(samples[-1].at - last.at, 1), **Rates.between(first, last)._asdict()}
                for first, last in zip(samples, samples[1:], strict=False)
            ],
        }

    async def watch(self, log_interval_s: float) -> None:
        """Sample the counters each second. Every `log_interval_s` seconds in which tokens were written, log their
        rates; 0: never."""
        last = self.sample(perf_counter())
        while True:
            await asyncio.sleep(min(SAMPLE_S, log_interval_s or SAMPLE_S))
            sample = self.sample(perf_counter())
            if log_interval_s and sample.at - last.at >= log_interval_s:
                rates, last = Rates.between(last, sample), sample
                if rates.tokens:
                    logger.info("%s", line_of(self._load(), rates))

    def _values(self) -> dict[tuple[str, ...], float]:
        """The value of every series, by its name without PREFIX and its label's value."""
        samples = [sample for family in self._registry.collect() for sample in family.samples]
        return {(one.name.removeprefix(PREFIX), *one.labels.values()): one.value for one in samples}

    def _count(self, one: _Followed) -> None:
        """Add the tokens and events of an answer that were not counted yet."""
        new = events_of_answer(one.request.events[one.events :], one.answer.n_tokens - one.committed)
        stats, decoded = summarise(new), sum(event.committed for event in new)
        counts = {
            "completion_tokens_total": one.answer.n_tokens - one.tokens,
            "decode_steps_total": len(new),
            "plain_steps_total": sum(event.offered == 0 for event in new),
            "decoded_tokens_total": decoded,
            "verify_steps_total": stats.verify_steps,
            "draft_tokens_offered_total": stats.offered,
            "draft_tokens_accepted_total": stats.accepted,
            "committed_tokens_total": stats.accepted + stats.verify_steps,
        }
        for name, count in counts.items():
            self._series[name].inc(count)
        by_depth = {"verify_steps_per_pos_total": stats.offered_by_depth}
        by_depth["draft_tokens_accepted_per_pos_total"] = stats.accepted_by_depth
        for name, depths in by_depth.items():
            for depth, count in enumerate(depths):
                self._series[name].labels(str(depth)).inc(count)
        one.tokens, one.events, one.committed = one.answer.n_tokens, one.events + len(new), one.committed + decoded


def line_of(load: EngineLoad, rates: Rates) -> str:
    """The log line of an interval. Without drafts it has no accept_length, which is of the steps that drafted alone."""
    acceptance = ""
    if rates.accept_length is not None:
        acceptance = f"accept_length {rates.accept_length:.2f} in {rates.drafted_share:.0%} of the steps, "
        acceptance += f"{rates.tokens_per_step:.2f} tokens a step, "
    usage = load.request_tokens / load.capacity_tokens
    return (
        f"{load.running} running, {load.waiting} waiting, {load.request_tokens} tokens ({usage:.0%} of the cache), "
        f"{acceptance}{rates.tokens_per_s:.1f} tokens/s"
    )
