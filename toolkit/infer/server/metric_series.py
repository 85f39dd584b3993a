"""The metrics of a server: names, what they count, and their equivalents in SGLang and vLLM."""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "toolkit_"


class Series(NamedTuple):
    """A metric, its name without "toolkit_". label: of its values, if there are several. like: of SGLang and vLLM."""

    kind: str
    text: str
    like: tuple[str, ...] = ()
    label: str | None = None


SERIES = {
    "requests_total": Series(
        "counter",
        "Answers that ended, by finish reason (abort: the client left, its time was over, a step failed, or the end)",
        ("sglang:num_requests_total", "vllm:request_success_total"),
        "finish_reason",
    ),
    "http_requests_total": Series(
        "counter", "Replies to POST requests, by HTTP status (499: the client left)", (), "status"
    ),
    "failed_steps_total": Series("counter", "Steps of the engine that failed, and with them their requests"),
    "nonfinite_answers_total": Series("counter", "Answers that ended since the target's logits had NaN or infinity"),
    "refused_rows_total": Series("counter", "Times that the cache had no room for the next request of the queue"),
    "eager_rounds_total": Series("counter", "Rounds that no CUDA graph could run, where graphs are on"),
    "prompt_tokens_total": Series(
        "counter", "Prompt tokens of ended answers", ("sglang:prompt_tokens_total", "vllm:prompt_tokens_total")
    ),
    "prompt_tokens_cached_total": Series(
        "counter",
        "Prompt tokens of ended answers that were in the prefix cache",
        ("sglang:cached_tokens_total", "vllm:prefix_cache_hits_total"),
    ),
    "preemptions_total": Series(
        "counter",
        "Preemptions of the requests of ended answers, in favour of older requests",
        ("sglang:num_retracted_requests_total", "vllm:num_preemptions_total"),
    ),
    "completion_tokens_total": Series(
        "counter", "Tokens of answers", ("sglang:generation_tokens_total", "vllm:generation_tokens_total")
    ),
    "decode_steps_total": Series("counter", "Steps of each request in which it decoded, drafted or not"),
    "plain_steps_total": Series(
        "counter", "Those of them in which nothing was drafted, which accept_length leaves out"
    ),
    "decoded_tokens_total": Series("counter", "Tokens of all these steps"),
    "verify_steps_total": Series(
        "counter",
        "Verify steps counted (with drafts, not truncated by the answer's end)",
        ("sglang:spec_verify_calls_total", "vllm:spec_decode_num_drafts_total"),
    ),
    "draft_tokens_offered_total": Series(
        "counter",
        "Drafted nodes that were verified, in counted verify steps",
        ("vllm:spec_decode_num_draft_tokens_total",),
    ),
    "draft_tokens_accepted_total": Series(
        "counter",
        "Drafted tokens that the target accepted, in counted verify steps",
        ("vllm:spec_decode_num_accepted_tokens_total",),
    ),
    "committed_tokens_total": Series(
        "counter", "Tokens of counted verify steps; divided by their number: accept_length since the start"
    ),
    "verify_steps_per_pos_total": Series(
        "counter", "Counted verify steps that offered a drafted token at this position (0: the first)", (), "position"
    ),
    "draft_tokens_accepted_per_pos_total": Series(
        "counter",
        "Drafted tokens accepted at this position (0: the first), in counted verify steps",
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total",),
        "position",
    ),
    "accept_length": Series(
        "gauge",
        "Mean tokens per counted verify step in the last seconds, bonus token included; absent if there was none",
        ("sglang:spec_accept_length",),
    ),
    "accept_rate": Series(
        "gauge",
        "Share of the verified drafted nodes that was accepted in the last seconds; absent if there was none",
        ("sglang:spec_accept_rate",),
    ),
    "drafted_share": Series(
        "gauge", "Share of the decode steps that drafted in the last seconds; absent if there was none"
    ),
    "tokens_per_step": Series(
        "gauge", "Mean tokens per decode step in the last seconds, plain steps included; absent if there was none"
    ),
    "tokens_per_second": Series(
        "gauge", "Tokens of answers per second, in the last seconds", ("sglang:gen_throughput",)
    ),
    "requests_in_flight": Series("gauge", "Requests that the engine holds, running or waiting"),
    "requests_running": Series(
        "gauge", "Requests that are decoded or read", ("sglang:num_running_reqs", "vllm:num_requests_running")
    ),
    "requests_waiting": Series(
        "gauge", "Requests in the queue", ("sglang:num_queue_reqs", "vllm:num_requests_waiting")
    ),
    "cache_request_tokens": Series("gauge", "Tokens that running requests hold", ("sglang:num_used_tokens",)),
    "cache_tokens": Series("gauge", "Tokens in the cache, kept prefixes included"),
    "cache_capacity_tokens": Series("gauge", "Tokens that the cache holds at most", ("sglang:max_total_num_tokens",)),
    "cache_usage": Series(
        "gauge",
        "Share of the cache that running requests hold",
        ("sglang:token_usage", "vllm:kv_cache_usage_perc"),
    ),
    "queue_seconds": Series(
        "histogram",
        "Seconds from submission until the prompt is read",
        ("sglang:queue_time_seconds", "vllm:request_queue_time_seconds"),
    ),
    "time_to_first_token_seconds": Series(
        "histogram",
        "Seconds from submission to the first token",
        ("sglang:time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    ),
    "time_per_output_token_seconds": Series(
        "histogram",
        "Mean seconds per token of an answer after its first",
        ("sglang:inter_token_latency_seconds", "vllm:request_time_per_output_token_seconds"),
    ),
    "request_seconds": Series(
        "histogram",
        "Seconds from submission to the end of an answer",
        ("sglang:e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"),
    ),
}
