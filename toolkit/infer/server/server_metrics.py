"""Prometheus metrics of /metrics, summed over ended answers from the engine's event log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from toolkit.infer.load.answer import Answer, events_of_answer
from toolkit.infer.request.acceptance import summarise
from toolkit.infer.request.request import Request, VerifyEvent

# name -> (kind, help)
SERIES = {
    "requests_total": ("counter", "Answers that ended, by finish reason (abort: the client disconnected)"),
    "prompt_tokens_total": ("counter", "Prompt tokens of ended answers"),
    "prompt_tokens_cached_total": ("counter", "Prompt tokens of ended answers that were in the prefix cache"),
    "preemptions_total": ("counter", "Preemptions of the requests of ended answers, in favour of older requests"),
    "completion_tokens_total": ("counter", "Tokens of ended answers"),
    "draft_tokens_accepted_total": ("counter", "Drafted tokens that the target accepted, in counted verify steps"),
    "draft_tokens_offered_total": ("counter", "Drafted nodes that were verified, in counted verify steps"),
    "verify_steps_total": ("counter", "Verify steps counted (with drafts, not truncated by the answer's end)"),
    "committed_tokens_total": ("counter", "Tokens of counted verify steps; divided by their number: accept_length"),
    "time_to_first_token_seconds": ("summary", "Seconds from submission to the first token"),
    "request_seconds": ("summary", "Seconds from submission to the end of an answer"),
    "requests_in_flight": ("gauge", "Requests that the engine holds, running or waiting"),
}


class ServerMetrics:
    """Counters of one server. Only the event loop's thread reads and writes them."""

    def __init__(self) -> None:
        self._values: defaultdict[str, float] = defaultdict(int)

    def record(self, request: Request, answer: Answer, now: float) -> None:
        """Add one ended answer. now: perf_counter seconds, the clock of `request.submitted_at`."""
        self._values[f'requests_total{{finish_reason="{answer.finish_reason or "abort"}"}}'] += 1
        self._values["prompt_tokens_total"] += len(request.prompt_ids)
        self._values["prompt_tokens_cached_total"] += request.cached_tokens
        self._values["preemptions_total"] += request.preemptions
        self._values["completion_tokens_total"] += answer.n_tokens
        self._add_events(events_of_answer(list(request.events), answer.n_tokens))
        self._observe("request_seconds", now - request.submitted_at)
        if request.first_token_at is not None:
            self._observe("time_to_first_token_seconds", request.first_token_at - request.submitted_at)

    def _add_events(self, events: Sequence[VerifyEvent]) -> None:
        stats = summarise(events)
        self._values["verify_steps_total"] += stats.verify_steps
        self._values["draft_tokens_offered_total"] += stats.offered
        self._values["draft_tokens_accepted_total"] += stats.accepted
        self._values["committed_tokens_total"] += stats.accepted + stats.verify_steps

    def _observe(self, name: str, seconds: float) -> None:
        self._values[f"{name}_sum"] += seconds
        self._values[f"{name}_count"] += 1

    def text(self, in_flight: int) -> str:
        """The metrics in Prometheus' text format."""
        self._values["requests_in_flight"] = in_flight
        lines = []
        for name, (kind, help_text) in SERIES.items():
            lines += [f"# HELP toolkit_{name} {help_text}", f"# TYPE toolkit_{name} {kind}"]
            written = sorted(key for key in self._values if key.split("{")[0] in (name, f"{name}_sum", f"{name}_count"))
            lines += [f"toolkit_{key} {self._values[key]}" for key in written]
        return "\n".join(lines) + "\n"
