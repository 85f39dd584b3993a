"""The user's request for a plan, in the user's units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.plan.gpus import Gpu


@dataclass(frozen=True)
class PlanRequest:
    """target: hub id (org/name@revision), directory or config.json. input, output: tokens of a request.

    concurrency: requests in flight; or rate: requests per second. max_tpot_s: the largest acceptable seconds per token.
    node: GPUs per node. layout: the only layout to consider for decode engines, as (GPUs, data parallel). step_s:
    measured plain decode steps of that layout, in seconds, by requests per rank. weight_bits None: as in the
    configuration.

    draft: a head's directory or hub id. head: the kind of head if there is no `draft` (None: the target's MTP layers
    if it has any, else eagle3). accept_lengths: by draft length, as text (1:1.7,2:2.18); None: those measured
    with `draft`.
    """

    target: str
    input: int
    output: int
    gpu: Gpu
    concurrency: int | None = None
    rate: float | None = None
    max_tpot_s: float | None = None
    gpus: int = 8
    node: int = 8
    layout: tuple[int, bool] | None = None
    step_s: Mapping[int, float] | None = None
    weight_bits: float | None = None
    overlap: bool = True
    draft: str | None = None
    head: str | None = None
    accept_lengths: str | None = None
    engine: str = "sglang"
