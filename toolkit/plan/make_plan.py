"""Make a plan: the target's size, the head, the best deployment and its launch lines."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from toolkit.checkpoint.formats import FORMATS, Formats
from toolkit.checkpoint.open_head import open_head
from toolkit.errors import PlanError
from toolkit.plan.calibrate import calibrated
from toolkit.plan.deployment import Planner, Workload
from toolkit.plan.draft_cost import DraftCost, head_size, measured_accept_lengths, parse_accept_lengths, usual_draft
from toolkit.plan.launch import launch_lines
from toolkit.plan.model_size import ModelSize, target_size
from toolkit.plan.plan_request import PlanRequest
from toolkit.plan.plan_text import draft_table, plan_text
from toolkit.plan.step_time import Costs, Layout

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
        costs = calibrated(planner, Layout(*request.layout, node=request.node), dict(request.step_s))
        planner = Planner(size, draft, request.gpu, work, costs, request.node, request.overlap, request.layout)
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
        return DraftCost(found.kind, head_size(found.head, size), *stated, path=EXPORTED)
    if lengths is None:
        if request.head is not None:
            raise PlanError(f"--head is {request.head}, but accept lengths are missing; give --accept-lengths 1:A,2:B")
        return None
    return usual_draft(request.head, config, size, lengths)
