"""Commands that start a planned deployment with SGLang or vLLM: one per node, for one engine of each kind.

Users replace the names in capitals: NODE0 is the first node of an engine, K the number of a further node from 1,
OUT the folder of an exported head, HEAD the folder of a head that is not trained yet.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from toolkit.checkpoint.launch_lines import Shape, sglang_speculation, vllm_speculation
from toolkit.plan.deployment import MEMORY_SHARE, DecodeBatch, Deployment, Engines
from toolkit.plan.draft_cost import DraftCost


def launch_lines(
    engine: str, model: Sequence[str], deployment: Deployment, draft: DraftCost | None, table: Sequence[DecodeBatch]
) -> list[str]:
    """Return comments and commands in order. model: the target's path or hub id, with further options (--revision R).

    table: the best draft length by requests per rank, which becomes vLLM's schedule.
    """
    lines: list[str] = []
    for role, engines in (("prefill", deployment.prefill), ("decode", deployment.decode)):
        if engines is None:
            continue
        part = role if deployment.prefill else ""
        words = (
            _sglang_words(deployment, engines, part) if engine == "sglang" else _vllm_words(deployment, engines, part)
        )
        if draft is not None and deployment.batch.drafts:
            words += _speculation(engine, draft, deployment.batch.drafts, table)
        start = ["python", "-m", "sglang.launch_server", "--model-path"] if engine == "sglang" else ["vllm", "serve"]
        lines.append(
            f"# {engines.count} {part and part + ' '}engine(s) of {engines.layout.gpus} GPU(s); start each with:"
        )
        lines += [shlex.join([*start, *model, *words, *rank]) for rank in _ranks(engine, engines)]
    return [*lines, *_router(engine, deployment)]


def _speculation(engine: str, draft: DraftCost, drafts: int, table: Sequence[DecodeBatch]) -> list[str]:
    """Return the options for the best draft length of the planned batch; vLLM gets one per batch size."""
    shape = Shape(drafts, 1, drafts + 1)
    if engine == "sglang":
        return sglang_speculation(draft.kind, draft.path, shape, draft.config)
    settings = vllm_speculation(draft.kind, draft.path, shape, draft.config)
    schedule = draft_schedule(table)
    blocks = draft.config is not None and draft.config.drafts_at_once  # which have one length
    if len({length for _, _, length in schedule}) > 1 and not blocks:
        settings["num_speculative_tokens"] = max(length for _, _, length in schedule)
        settings["num_speculative_tokens_per_batch_size"] = schedule
    return ["--speculative-config", json.dumps(settings)]


def _sglang_words(deployment: Deployment, engines: Engines, role: str) -> list[str]:
    layout = engines.layout
    words = ["--tp-size", str(layout.gpus), "--mem-fraction-static", str(MEMORY_SHARE)]
    if layout.data_parallel:
        words += ["--dp-size", str(layout.gpus), "--enable-dp-attention", "--enable-dp-lm-head"]
        words += ["--moe-dense-tp-size", "1", "--ep-size", str(layout.gpus), "--moe-a2a-backend", "deepep"]
        if role:
            words += ["--deepep-mode", "normal" if role == "prefill" else "low_latency"]
        if layout.redundant:
            words += ["--ep-num-redundant-experts", str(layout.redundant)]
        if layout.two_batches:
            words.append("--enable-two-batch-overlap")
    if role != "prefill":
        words += ["--max-running-requests", str(deployment.batch.requests * layout.ranks)]
    return [*words, *(["--disaggregation-mode", role] if role else [])]


def _vllm_words(deployment: Deployment, engines: Engines, role: str) -> list[str]:
    layout = engines.layout
    words = ["--gpu-memory-utilization", str(MEMORY_SHARE)]
    if layout.data_parallel:
        words += ["--data-parallel-size", str(layout.gpus), "--enable-expert-parallel"]
        if layout.redundant:
            eplb = json.dumps({"num_redundant_experts": layout.redundant})
            words += ["--enable-eplb", "--eplb-config", eplb]
        if layout.two_batches:
            words.append("--enable-dbo")
        if _nodes(engines) > 1:
            mode = "deepep_high_throughput" if role == "prefill" else "deepep_low_latency"
            words += ["--all2all-backend", mode]
    else:
        words += ["--tensor-parallel-size", str(layout.gpus)]
    if role != "prefill":
        words += ["--max-num-seqs", str(deployment.batch.requests)]
    transfer = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    return [*words, *(["--kv-transfer-config", transfer] if role else [])]


def _nodes(engines: Engines) -> int:
    return max(1, engines.layout.gpus // engines.layout.node)


def _ranks(engine: str, engines: Engines) -> list[list[str]]:
    """Return further options of the first node, and of each further node."""
    layout, nodes = engines.layout, _nodes(engines)
    if nodes == 1:
        return [[]]
    if engine == "sglang":
        words = ["--nnodes", str(nodes), "--dist-init-addr", "NODE0:5000", "--node-rank"]
        return [[*words, "0"], [*words, "K"]]
    if not layout.data_parallel:
        words = ["--nnodes", str(nodes), "--master-addr", "NODE0", "--node-rank"]
        return [[*words, "0"], [*words, "K", "--headless"]]
    words = ["--data-parallel-size-local", str(layout.node), "--data-parallel-address", "NODE0"]
    words += ["--data-parallel-rpc-port", "13345"]
    return [words, [*words, "--data-parallel-start-rank", f"{layout.node}xK", "--headless"]]


def draft_schedule(table: Sequence[DecodeBatch]) -> list[tuple[int, int, int]]:
    """Return (from, to, drafts) by requests per rank, without gaps."""
    found: list[tuple[int, int, int]] = []
    for batch in table:
        if found and found[-1][2] == batch.drafts:
            found[-1] = (found[-1][0], batch.requests, batch.drafts)
        else:
            found.append((found[-1][1] + 1 if found else 1, batch.requests, batch.drafts))
    return found


def _router(engine: str, deployment: Deployment) -> list[str]:
    """Return the router or load balancer for several engines."""
    if deployment.prefill is None and deployment.decode.count == 1:
        return []
    if engine == "vllm":
        if deployment.prefill:
            return ["# in front of the prefill and decode engines: a router for disaggregated prefill"]
        return ["# in front of the engines: any load balancer"]
    words = "python -m sglang_router.launch_router"
    if deployment.prefill is None:
        urls = [f"http://ENGINE{number}:30000" for number in range(deployment.decode.count)]
        return ["# in front of the engines:", f"{words} --worker-urls {' '.join(urls)}"]
    prefill = [f"--prefill http://PREFILL{number}:30000" for number in range(deployment.prefill.count)]
    decode = [f"--decode http://DECODE{number}:30000" for number in range(deployment.decode.count)]
    return ["# in front of the engines:", f"{words} --pd-disaggregation {' '.join(prefill + decode)}"]
