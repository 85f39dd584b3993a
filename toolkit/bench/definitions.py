"""The accept lengths that other projects would print for the same steps, from the engine's event log.

SGLang: its scheduler and its requests' meta_info. vLLM: v1/spec_decode/metrics.py. EAGLE: the answer files of
eagle/evaluation, which hold `new_tokens` and `idxs` of every answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.bench.answers import LoggedAnswer

RATE = "vllm_draft_acceptance_rate"
_WHOLE = "steps that a stop or max_tokens truncates are counted whole"
_PLAIN = "a plain step is one that accepted nothing, since SGLang verifies in every step"
# By key of a row's `other_definitions`: the column of a table, and the definition.
OTHERS = {
    "sglang_server": (
        "SGLang\nserver",
        "`sglang:spec_accept_length`, `avg_spec_accept_length` and so `bench_serving`: (accepted drafts + 1) per "
        f"verify step; {_WHOLE}; {_PLAIN}",
    ),
    "sglang_requests": (
        "SGLang\nrequests",
        "completion_tokens / spec_verify_ct of `meta_info`, over all answers, as its benchmark scripts print it: "
        f"prefill's token is counted, and of a truncated step what is left of it; {_PLAIN}",
    ),
    "vllm": (
        "vLLM",
        f"mean acceptance length, 1 + accepted / drafts of the spec_decode counters; {_WHOLE}; plain steps and "
        "prefill's token are not counted",
    ),
    RATE: (
        "vLLM draft\nacceptance",
        "average draft acceptance rate, accepted / drafted tokens of the same steps; a wide tree dilutes it",
    ),
    "eagle": (
        "EAGLE\nscripts",
        "sum(new_tokens) / sum(idxs) of its answer files; idxs numbers an answer's steps from 0, so one step an answer "
        f"is missing; {_WHOLE}; prefill's token is counted in place of the last bonus token",
    ),
}


def other_definitions(answers: Sequence[LoggedAnswer]) -> dict[str, float | None]:
    """Return what other projects would print of these answers, by key of `OTHERS`; None for a mean over nothing."""
    events = [event for answer in answers for event in answer.events]
    accepted, drafted = sum(event.accepted for event in events), [event for event in events if event.offered > 0]
    vllm = _ratio(accepted, len(drafted))
    return {
        "sglang_server": _ratio(accepted + len(events), len(events)),
        "sglang_requests": _ratio(sum(len(answer.output_ids) for answer in answers), len(events)),
        "vllm": None if vllm is None else 1 + vllm,
        RATE: _ratio(accepted, sum(event.offered for event in drafted)),
        "eagle": _ratio(accepted + len(events), sum(max(0, len(answer.events) - 1) for answer in answers)),
    }


def _ratio(top: float, bottom: float) -> float | None:
    return top / bottom if bottom else None
