"""Make a plan: the target's size, the head, the best deployment and its launch lines."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.checkpoint.open_head import FORMATS, Formats, open_head
from toolkit.errors import PlanError
from toolkit.plan.deployment import Planner, Workload
from toolkit.plan.draft_cost import DraftCost, head_size, measured_accept_lengths, parse_accept_lengths, usual_draft
from toolkit.plan.launch import launch_lines
from toolkit.plan.model_size import ModelSize, target_size
from toolkit.plan.plan_request import PlanRequest
from toolkit.plan.plan_text import draft_table, plan_text
from toolkit.plan.step_time import Costs, Layout, round_s

EXPORTED = "OUT"  # folder of the exported head in the printed export and launch lines


def make_plan(request: PlanRequest) -> str:
    """Return the text of the plan with its launch lines. Raises `PlanError`, `TargetError`, `DraftDirError`."""
    planner, model = _planner(request)
    best, other = planner.best(request.gpus)
    table = draft_table(planner, best)
    parts = [plan_text(planner, best, other, table)]
    if request.draft is not None and best.batch.drafts:
        words = ["toolkit", "export", "--draft", request.draft, "--to", request.engine, "--out", EXPORTED]
        target = str(Path(request.target).parent) if request.target.endswith(".json") else request.target
        parts.append(f"the head is exported first: {shlex.join([*words, '--target', target])}")
    parts.append("\n".join(launch_lines(request.engine, model, best, planner.draft, table)))
    return "\n\n".join(parts)


def _planner(request: PlanRequest) -> tuple[Planner, list[str]]:
    """Return the inputs of the plan, and the target's arguments in a launch line."""
    work = Workload(request.input, request.output, request.concurrency, request.rate, request.max_tpot_s)
    size, config, source, revision = target_size(request.target, request.weight_bits)
    draft = _draft(request, size, config, source, revision)
    planner = Planner(size, draft, request.gpu, work, Costs(), request.node, request.overlap, request.layout)
    if request.step_s is not None and request.layout is not None:
        layout = Layout(*request.layout, node=request.node)
        planner = replace(planner, costs=calibrated(planner, layout, request.step_s))
    return planner, [source, *([] if revision is None else ["--revision", revision])]


def _draft(request: PlanRequest, size: ModelSize, config: Any, source: str, revision: str | None) -> DraftCost | None:
    """Return the head of the plan, if any. source, revision: the target's, on which a head's layers may depend."""
    lengths = None if request.accept_lengths is None else parse_accept_lengths(request.accept_lengths)
    if request.draft is not None:
        found = open_head(request.draft, target=source, revision=revision)
        formats = FORMATS.get(found.kind, Formats())
        if request.engine not in formats.builders:
            raise PlanError(
                f"{request.draft} holds a {found.kind} head, which {request.engine} cannot serve: {formats.why_not}; "
                "--head mtp plans with the target's own MTP layers"
            )
        for what, theirs in (("hidden_size", size.hidden_size), ("vocab_size", config.vocab_size)):
            own = getattr(found.head.config, what)
            if own != theirs:
                raise PlanError(
                    f"the head in {request.draft} has {what} {own}, {size.name} {theirs}: it belongs to another target"
                )
        stated = (lengths, "as stated") if lengths else measured_accept_lengths(found.meta.get("measured"))
        return DraftCost(found.kind, head_size(found.head, size), *stated, path=EXPORTED, config=found.head.config)
    if lengths is None:
        if request.head is not None:
            raise PlanError(f"--head is {request.head}, but accept lengths are missing; give --accept-lengths 1:A,2:B")
        return None
    return usual_draft(request.head, config, size, lengths)


def calibrated(planner: Planner, layout: Layout, step_s: Mapping[int, float]) -> Costs:
    """Return costs whose fixed time per layer makes plain steps of `layout` as long as measured.

    step_s: measured seconds of a step, by requests per rank; several measurements are averaged. Without overlap a
    measured step includes the host's time, `costs.host_s`, which is not changed.
    Raises `PlanError` when a measured step is shorter than the time of its reads and computations.
    """
    bare = replace(planner.costs, layer_s=0.0)
    context = planner.work.input + planner.work.output / 2
    host = "" if planner.overlap else f", including {1000 * bare.host_s:.3g} ms of the host without overlap"
    rest = []
    for requests, seconds in step_s.items():
        floor = round_s(
            planner.size,
            None,
            planner.gpu,
            layout,
            bare,
            requests=requests,
            drafts=0,
            context=context,
            overlap=planner.overlap,
        )
        if seconds < floor:
            raise PlanError(
                f"the step of {1000 * seconds:.3g} ms with {requests} request(s) per rank is shorter than its reads "
                f"and computations on {planner.gpu.name} take ({1000 * floor:.3g} ms{host}, at {context:.0f} tokens of "
                "context); give a step that was measured with this model, GPU and layout"
            )
        rest.append(seconds - floor)
    per_layer = sum(rest) / len(rest) / planner.size.layers / (2 if layout.two_batches else 1)
    return replace(planner.costs, layer_s=per_layer)
