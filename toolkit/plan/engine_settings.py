"""The best draft setting for each batch size in another engine, by forecast accept lengths and modelled step times."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.formats import FORMATS, Formats
from toolkit.checkpoint.launch_lines import Shape, sglang_speculation, vllm_speculation
from toolkit.errors import PlanError
from toolkit.heads.draft_head import build_head
from toolkit.plan.deployment import Planner, Workload
from toolkit.plan.draft_cost import head_size
from toolkit.plan.gpus import Gpu
from toolkit.plan.make_plan import EXPORTED, calibrated
from toolkit.plan.model_size import target_size
from toolkit.plan.step_time import Costs, Layout, round_s
from toolkit.targets.facts import TargetFacts


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
    layout, costs = Layout(1), Costs()
    if step_s is not None:
        work = Workload(max(1, round(context)), 1, concurrency=1)
        costs = calibrated(Planner(size, None, gpu, work, costs), layout, step_s)
    source = "as given" if step_s else "by the model of `toolkit plan`"
    lines = [f"{engine} on {gpu.name}, step times {source}:"]
    for batch in batches:
        plain = batch / round_s(size, None, gpu, layout, costs, requests=batch, drafts=0, context=context)
        speeds = {}
        for (steps, top_k, nodes), length in accept_lengths.items():
            seconds = round_s(
                size, head, gpu, layout, costs,
                requests=batch, drafts=steps, context=context, top_k=top_k, nodes=nodes,
            )  # fmt: skip
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
        to = "native" if draft.head.config.in_target else engine
        words = ["toolkit", "export", "--draft", str(draft.path), "--to", to, "--out", EXPORTED]
        served = f", and {EXPORTED} is the model to serve" if draft.head.config.in_target else ""
        lines.append(f"the head is exported first{served}: {shlex.join(words)}")
    return "\n".join(lines)


def check_servable(engine: str, draft: DraftCheckpoint) -> None:
    """Raise `PlanError` for a head that the engine cannot serve."""
    formats = FORMATS.get(draft.kind, Formats())
    if engine not in formats.builders and not draft.head.config.in_target:
        raise PlanError(f"{draft.path} holds a {draft.kind} head, which {engine} cannot serve: {formats.why_not}")


def _flags(engine: str, draft: DraftCheckpoint, shape: Shape) -> str:
    config = draft.head.config
    path = None if config.in_target else EXPORTED
    if engine == "sglang":
        words, kept = sglang_speculation(draft.kind, path, shape, config), draft.token_map
        if not config.own_vocabulary and kept.size < kept.vocab_size:
            words += ["--speculative-token-map", f"{EXPORTED}/freq_{kept.size}.pt"]
        return shlex.join(words)
    return f"--speculative-config {shlex.quote(json.dumps(vllm_speculation(draft.kind, path, shape, config)))}"
