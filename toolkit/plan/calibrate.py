"""Derive the fixed time per layer from measured steps."""

from __future__ import annotations

from dataclasses import replace

from toolkit.errors import PlanError
from toolkit.plan.deployment import Planner
from toolkit.plan.step_time import Costs, Layout, round_s


def calibrated(planner: Planner, layout: Layout, step_s: dict[int, float]) -> Costs:
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
