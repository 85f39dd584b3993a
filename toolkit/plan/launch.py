"""Options and commands that serve a target with a head on SGLang or vLLM.

`launch_lines` starts a planned deployment, one command per node. `settings_text` gives the best draft setting for each
batch size on one GPU, by forecast accept lengths and modelled step times.
Users replace the names in capitals: NODE0 is the first node of an engine, K the number of a further node from 1,
OUT the folder of an exported head, HEAD the folder of a head that is not trained yet.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.launch_lines import Shape, sglang_speculation, vllm_speculation
from toolkit.checkpoint.open_head import why_not_written
from toolkit.errors import PlanError
from toolkit.heads.draft_head import build_head
from toolkit.plan.deployment import MEMORY_SHARE, DecodeBatch, Deployment
from toolkit.plan.model_size import DraftCost, head_size, target_size
from toolkit.plan.step_time import NODE, Gpu, Layout, Rank
from toolkit.targets.facts import TargetFacts

EXPORTED = "OUT"  # folder of the exported head in the printed export and launch lines


def launch_lines(
    engine: str, model: Sequence[str], deployment: Deployment, draft: DraftCost | None, table: Sequence[DecodeBatch]
) -> list[str]:
    """Return comments and commands in order. model: the target's path or hub id, with further options (--revision R).

    table: the best draft length by requests per rank, which becomes vLLM's schedule.
    """
    layout, sglang = deployment.layout, engine == "sglang"
    words = ["python", "-m", "sglang.launch_server", "--model-path"] if sglang else ["vllm", "serve"]
    words += [*model, *(_sglang_words(deployment) if sglang else _vllm_words(deployment))]
    if draft is not None and deployment.batch.drafts:
        words += _speculation(engine, draft, deployment.batch.drafts, table)
    lines = [f"# {deployment.count} engine(s) of {layout.gpus} GPU(s); start each with:"]
    lines += [shlex.join([*words, *rank]) for rank in _ranks(engine, layout)]
    return [*lines, *(["# in front of the engines: any load balancer"] if deployment.count > 1 else [])]


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


def draft_schedule(table: Sequence[DecodeBatch]) -> list[tuple[int, int, int]]:
    """Return (from, to, drafts) by requests per rank, without gaps."""
    found: list[tuple[int, int, int]] = []
    for batch in table:
        if found and found[-1][2] == batch.drafts:
            found[-1] = (found[-1][0], batch.requests, batch.drafts)
        else:
            found.append((found[-1][1] + 1 if found else 1, batch.requests, batch.drafts))
    return found


def _sglang_words(deployment: Deployment) -> list[str]:
    layout = deployment.layout
    words = ["--tp-size", str(layout.gpus), "--mem-fraction-static", str(MEMORY_SHARE)]
    if layout.data_parallel:
        words += ["--dp-size", str(layout.gpus), "--enable-dp-attention", "--enable-dp-lm-head"]
        words += ["--moe-dense-tp-size", "1", "--ep-size", str(layout.gpus), "--moe-a2a-backend", "deepep"]
        words += ["--enable-two-batch-overlap"] if layout.two_batches else []
    return [*words, "--max-running-requests", str(deployment.batch.requests * layout.ranks)]


def _vllm_words(deployment: Deployment) -> list[str]:
    layout = deployment.layout
    words = ["--gpu-memory-utilization", str(MEMORY_SHARE), "--max-num-seqs", str(deployment.batch.requests)]
    if not layout.data_parallel:
        return [*words, "--tensor-parallel-size", str(layout.gpus)]
    words += ["--data-parallel-size", str(layout.gpus), "--enable-expert-parallel"]
    words += ["--enable-dbo"] if layout.two_batches else []
    return [*words, *(["--all2all-backend", "deepep_low_latency"] if layout.gpus > NODE else [])]


def _ranks(engine: str, layout: Layout) -> list[list[str]]:
    """Return further options of the first node, and of each further node."""
    nodes = layout.gpus // NODE
    if nodes <= 1:
        return [[]]
    if engine == "sglang":
        words = ["--nnodes", str(nodes), "--dist-init-addr", "NODE0:5000", "--node-rank"]
        return [[*words, "0"], [*words, "K"]]
    if not layout.data_parallel:
        words = ["--nnodes", str(nodes), "--master-addr", "NODE0", "--node-rank"]
        return [[*words, "0"], [*words, "K", "--headless"]]
    words = ["--data-parallel-size-local", str(NODE), "--data-parallel-address", "NODE0"]
    words += ["--data-parallel-rpc-port", "13345"]
    return [words, [*words, "--data-parallel-start-rank", f"{NODE}xK", "--headless"]]


def settings_text(
    engine: Literal["sglang", "vllm"],
    gpu: Gpu,
    facts: TargetFacts,
    draft: DraftCheckpoint,
    accept_lengths: Mapping[tuple[int, int, int], float],
    context: float,
    batches: Sequence[int],
    step_s: Mapping[int, float] | None = None,
) -> str:
    """Return a line for each batch size with its best setting, and the flags of the engine.

    accept_lengths: by (num_steps, top_k, num_draft_tokens). context: mean tokens before a step. step_s: measured
    seconds of a plain step, by requests. Raises `PlanError`.
    """
    size, *_ = target_size(facts.source)
    with torch.device("meta"):  # the loaded head is packed for a CPU: its parameters are no longer all there
        head = head_size(build_head(draft.head.config), size)
    if head.shared_head:  # an engine that is given the head's token map reads its rows of the target's matrix only
        head = replace(head, head=head.head * draft.token_map.size / draft.token_map.vocab_size)
    rank = Rank(gpu, Layout(1))
    if step_s is not None:
        rank = replace(rank, costs=rank.calibrated(size, step_s, context))
    source = "as given" if step_s else "by the model of `toolkit plan`"
    lines = [f"{engine} on {gpu.name}, step times {source}:"]
    in_target = draft.head.config.in_target
    for batch in batches:
        plain = batch / rank.round_s(size, requests=batch, context=context)
        speeds = {}
        for (steps, top_k, nodes), length in accept_lengths.items():
            seconds = rank.round_s(size, head, requests=batch, drafts=steps, context=context, top_k=top_k, nodes=nodes)
            speeds[steps, top_k, nodes] = batch * length / seconds
        best = max(speeds, key=lambda shape: speeds[shape])
        text = (
            f"{','.join(map(str, best))}, accept_length {accept_lengths[best]:.2f}, {speeds[best] / plain:.2f}x plain"
        )
        if speeds[best] > plain:
            lines += [f"batch {batch}: {text}", f"  {_flags(engine, draft, Shape(*best))}"]
        else:
            lines.append(f"batch {batch}: serve without drafts (the best setting: {text})")
    if draft.path is not None and any(line.startswith("  ") for line in lines):
        words = ["toolkit", "export", "--draft", str(draft.path), "--to", "native" if in_target else engine]
        served = f", and {EXPORTED} is the model to serve" if in_target else ""
        lines.append(f"the head is exported first{served}: {shlex.join([*words, '--out', EXPORTED])}")
    return "\n".join(lines)


def check_servable(engine: str, draft: DraftCheckpoint) -> None:
    """Raise `PlanError` for a head that the engine cannot serve."""
    why = None if draft.head.config.in_target else why_not_written(draft, engine)
    if why is not None:
        raise PlanError(f"{draft.path} holds a {draft.kind} head, which {engine} cannot serve: {why}")


def _flags(engine: str, draft: DraftCheckpoint, shape: Shape) -> str:
    config = draft.head.config
    path = None if config.in_target else EXPORTED
    if engine == "sglang":
        words, kept = sglang_speculation(draft.kind, path, shape, config), draft.token_map
        if not config.own_vocabulary and kept.size < kept.vocab_size:
            words += ["--speculative-token-map", f"{EXPORTED}/freq_{kept.size}.pt"]
        return shlex.join(words)
    return f"--speculative-config {shlex.quote(json.dumps(vllm_speculation(draft.kind, path, shape, config)))}"
