"""What operators look at: /metrics, the status page at /, its figures at /status, and a log line now and then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response

from toolkit import __version__
from toolkit.infer.server.completions import Served
from toolkit.infer.server.live_rates import SAMPLE_S, Rates
from toolkit.infer.server.metric_series import SERIES
from toolkit.infer.server.server_metrics import ServerMetrics
from toolkit.log import get_logger

logger = get_logger(__name__)

UNLABELLED = [name for name, one in SERIES.items() if one.kind == "counter" and one.label is None]

PAGE = Path(__file__).with_name("status.html")
# The page loads nothing from elsewhere, and no other page may show it.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


def add_monitoring(app: FastAPI, served: Served, metrics: ServerMetrics) -> None:
    """Add the three routes. None shows a prompt, an answer or a key."""
    started = time.time()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics_text(http: Request) -> Response:
        text, content_type = metrics.text(http.headers.get("accept", ""), time.perf_counter())
        return Response(text, headers={"Content-Type": content_type})

    @app.get("/status")
    async def status() -> dict[str, Any]:
        return {
            "model": served.model_name,
            "version": __version__,
            "context_length": served.context_length,
            "shape": served.shape_name,
            "uptime_s": round(time.time() - started, 1),
            **status_of(metrics),
        }

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=HEADERS)


def status_of(metrics: ServerMetrics) -> dict[str, Any]:
    """The figures of the status page. Rates that no verify step gives are None.

    now: of the last ten seconds. history: of each second of the last three minutes, the oldest first. positions[i]: of
    the counted verify steps since the start that offered i+1 drafted tokens, how many accepted them."""
    metrics.sample(time.perf_counter())
    counts = metrics.counts
    steps, every = counts["verify_steps_total"], counts["decode_steps_total"]
    means = ("time_to_first_token_seconds", "time_per_output_token_seconds", "queue_seconds", "request_seconds")
    return {
        "now": metrics.rates.latest._asdict(),
        "load": asdict(metrics.load),
        "total": {
            **{name.removesuffix("_total"): counts[name] for name in UNLABELLED},
            "accept_length": counts["committed_tokens_total"] / steps if steps else None,
            "tokens_per_step": counts["decoded_tokens_total"] / every if every else None,
            "requests": dict(metrics.finished),
        },
        "positions": [
            {"offered": offered, "accepted": metrics.accepted_by_depth[depth]}
            for depth, offered in sorted(metrics.offered_by_depth.items())
        ],
        "mean_seconds": {name.removesuffix("_seconds"): metrics.mean_seconds(name) for name in means},
        "history": [{"ago_s": round(ago, 1), **rates._asdict()} for ago, rates in metrics.rates.history()],
    }


@asynccontextmanager
async def watching(metrics: ServerMetrics, log_interval_s: float) -> AsyncIterator[None]:
    """Sample the counters each second. Every `log_interval_s` seconds in which tokens were written, log their rates."""
    task = asyncio.create_task(_watch(metrics, log_interval_s))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _watch(metrics: ServerMetrics, log_interval_s: float) -> None:
    last = metrics.sample(time.perf_counter())
    while True:
        await asyncio.sleep(min(SAMPLE_S, log_interval_s or SAMPLE_S))
        sample = metrics.sample(time.perf_counter())
        if log_interval_s and sample.at - last.at >= log_interval_s:
            rates, last = Rates.between(last, sample), sample
            if rates.tokens:
                logger.info("%s", line_of(metrics, rates))


def line_of(metrics: ServerMetrics, rates: Rates) -> str:
    """The log line of an interval. Without drafts it has no accept_length, which is of the steps that drafted alone."""
    load = metrics.load
    usage = load.request_tokens / load.capacity_tokens
    acceptance = ""
    if rates.accept_length is not None:
        acceptance = f"accept_length {rates.accept_length:.2f} in {rates.drafted_share:.0%} of the steps, "
        acceptance += f"{rates.tokens_per_step:.2f} tokens a step, "
    return (
        f"{load.running} running, {load.waiting} waiting, {load.request_tokens} tokens ({usage:.0%} of the cache), "
        f"{acceptance}{rates.tokens_per_s:.1f} tokens/s"
    )
