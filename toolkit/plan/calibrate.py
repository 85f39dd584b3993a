"""The fixed time a layer from steps that somebody measured."""

from __future__ import annotations

from dataclasses import replace

from toolkit.plan.deployment import Planner
from toolkit.plan.errors import PlanError
from toolkit.plan.step_time import Costs, Layout, round_s


def calibrated(planner: Planner, layout: Layout, step_s: dict[int, float]) -> Costs:
    """Costs whose fixed time a layer makes plain steps of `layout` as long as measured, by requests a rank.

    With several measurements: on average. Without overlap a measured step has the host's time in it, which stays
    `costs.host_s`.

    Raises `PlanError` when a measured step is shorter than what it has to read and compute.
    """
    bare = replace(planner.costs, layer_s=0.0)
    context = planner.work.input + planner.work.output / 2
    host = "" if planner.overlap else f", of which {1000 * bare.host_s:.3g} ms the host's without overlap"
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
                f"a step of {1000 * seconds:.3g} ms with {requests} request(s) a rank is shorter than what it must "
                f"read and compute on {planner.gpu.name} ({1000 * floor:.3g} ms{host}, {context:.0f} tokens of "
                "context): is it of this model, GPU and layout?"
            )
        rest.append(seconds - floor)
    per_layer = sum(rest) / len(rest) / planner.size.layers / (2 if layout.two_batches else 1)
    return replace(planner.costs, layer_s=per_layer)
