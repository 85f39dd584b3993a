"""The text of a plan: what fits, the engines to start, their predicted performance, and the accuracy of predictions."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.plan.deployment import MEMORY_SHARE, DecodeBatch, Deployment, Engines, Planner
from toolkit.plan.published import CASES, PREDICTED_WITHIN, SOURCES, predictions
from toolkit.plan.step_time import Costs, cache_bytes, weight_bytes

TABLE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
GB = 1e9


def draft_table(planner: Planner, deployment: Deployment) -> list[DecodeBatch]:
    """Return the best draft length of the decode engines, by requests per rank."""
    layout, most = deployment.decode.layout, deployment.most_requests
    sizes = sorted({n for n in (*TABLE_SIZES, deployment.batch.requests) if n <= most})
    return [planner.batch(layout, requests) for requests in sizes]


def plan_text(planner: Planner, best: Deployment, other: Deployment | None, table: Sequence[DecodeBatch]) -> str:
    """Return the plan without the launch lines."""
    return "\n\n".join((_what(planner, best), _deployment(planner, best, other), _table(table), _trust(planner)))


def _what(planner: Planner, best: Deployment) -> str:
    size, gpu, work, layout = planner.size, planner.gpu, planner.work, best.decode.layout
    context = work.input + work.output
    experts = f", {size.n_experts} experts of which {size.chosen} a token" if size.n_experts else ""
    fp8 = f", {gpu.flops_8 / 1e12:g} fp8" if gpu.flops_8 else ""
    cache = cache_bytes(size, layout, context)
    rows = [
        f"{size.name}: {size.parameters / 1e9:.1f}B parameters, {size.active / 1e9:.1f}B a token{experts}, "
        f"{size.bits:g} bits; cache {size.cache.bytes(context) / context / 1024:.1f} KiB a token",
        f"{gpu.name}: {gpu.memory / GB:g} GB, {gpu.bandwidth / GB:,.0f} GB/s, {gpu.flops / 1e12:g} TFLOPS bf16{fp8}",
        f"memory of a GPU: {weight_bytes(size, layout) / GB:.1f} GB weights of the target, {cache / GB:.2f} GB cache a "
        f"request of {context:,} tokens, of {gpu.memory * MEMORY_SHARE / GB:.1f} GB: at most {best.most_requests} "
        "requests a rank",
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


def _deployment(planner: Planner, best: Deployment, other: Deployment | None) -> str:
    batch = best.batch
    tokens = best.requests_per_s * planner.work.output
    lines = [f"plan for {best.gpus} GPU(s):"]
    if best.prefill is not None:
        lines.append(f"  prefill: {_engines(best.prefill)}")
    lines.append(
        f"  {'decode' if best.prefill else 'engines'}: {_engines(best.decode)}, {batch.requests} request(s) a rank"
    )
    drafts = f"{batch.drafts} a round, x{batch.gain:.2f} of plain decoding" if batch.drafts else "none, plain decoding"
    lines += [
        f"  drafts: {drafts}; a round takes {1000 * batch.round_s:.1f} ms",
        f"  predicted: {best.requests_per_s:.3g} requests/s, {tokens:,.0f} tokens/s, {tokens / best.gpus:,.1f} a GPU; "
        f"{1000 * best.tpot_s:.1f} ms a token, first token after {best.ttft_s:.2f} s",
    ]
    places, wanted = best.decode.ranks * batch.requests, planner.work.concurrency or 0
    if best.prefill is not None:
        places += best.prefill.ranks
    if wanted > places:
        lines.append(
            f"  of {wanted} requests in flight {places} are served at a time; the other {wanted - places} wait first, "
            "which the time to the first token leaves out"
        )
    mine, theirs = ("apart", "together") if best.prefill else ("together", "apart")
    if other is None:
        lines.append(f"  prefill and decode {mine}: {theirs} does not fit or keep the limits")
    else:
        lines.append(
            f"  prefill and decode {mine}: {theirs} would serve {other.requests_per_s:.3g} requests/s with "
            f"{1000 * other.tpot_s:.1f} ms a token, first token after {other.ttft_s:.2f} s"
        )
    return "\n".join(lines)


def _engines(engines: Engines) -> str:
    layout = engines.layout
    how = f"DP attention {layout.gpus}, EP {layout.gpus}" if layout.data_parallel else f"TP {layout.gpus}"
    more = f", {layout.redundant} redundant experts" if layout.redundant else ""
    return f"{engines.count} x {layout.gpus} GPU(s) ({how}{more}{', two batches' if layout.two_batches else ''})"


def _table(table: Sequence[DecodeBatch]) -> str:
    lines = ["requests a rank  drafts  decoded tokens/s a rank  of plain  ms a token"]
    for one in table:
        lines.append(
            f"{one.requests:>15}  {one.drafts:>6}  {one.tokens_per_s:>23,.1f}  {f'x{one.gain:.2f}':>8}  "
            f"{1000 * one.round_s / one.committed:>10.2f}"
        )
    return "\n".join(lines)


def _trust(planner: Planner) -> str:
    fitted = sum(1 for case in CASES if case.fitted)
    own = "" if planner.costs == Costs() else " A layer's fixed time is from your measured steps."
    if planner.overlap and planner.draft is not None:
        own += (
            " None of them states drafts together with overlapped scheduling, as planned here (--no-overlap: without)."
        )
    return (
        f"How far to trust it: a roofline with {fitted} costs fitted to {fitted} published figures; "
        f"{len(CASES) - fitted} further ones it predicts within {100 * PREDICTED_WITHIN:.0f} % "
        f"(toolkit plan --published).{own}"
    )


def published_text() -> str:
    """Return a table of the published figures, the model's values, and which figures its costs were fitted to."""
    predicted = predictions(Costs())
    lines = [f"{'case':<66} {'published':>9} {'model':>9} {'error':>7}  how"]
    for case in CASES:
        how = f"fitted ({case.fitted})" if case.fitted else "predicted"
        error = f"{100 * (predicted[case.name] / case.published - 1):+.1f} %"
        numbers = f"{_number(case.published):>9} {_number(predicted[case.name]):>9} {error:>7}"
        lines.append(f"{case.name:<66} {numbers}  {how}, {case.unit} [{case.source}]")
    return "\n".join([*lines, "", *(f"[{key}] {text}" for key, text in SOURCES.items())])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3f}" if value < 10 else f"{value:.1f}"
