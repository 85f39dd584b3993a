"""search.json in a draft directory: the settings that `toolkit search` found fastest, and the times it measured.

It holds for the machine and the options that it was measured with; elsewhere it is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from toolkit.infer.drafters.adaptive import smaller_shapes
from toolkit.infer.drafters.step_costs import ArmTime
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.threads import cpu_info

SEARCH = "search.json"
SAME_OPTIONS = ("torch_compile", "draft_quantization")  # a search holds for the engine options that it ran with


def search_of(meta: Mapping[str, Any], config: EngineConfig, target: Any) -> dict[str, Any] | None:
    """Returns the content of search.json if it holds here: the same processor or GPU, threads, target weights and
    options."""
    found = meta.get("search")
    if not isinstance(found, dict):
        return None
    here = machine()
    settings, stated = found.get("settings", {}), found.get("target", {})
    same = all(found.get("hardware", {}).get(name) == value for name, value in here.items())
    same &= all(settings.get(name) == getattr(config, name) for name in SAME_OPTIONS)
    dtype = str(target.dtype).removeprefix("torch.")
    same &= stated.get("dtype") == dtype and stated.get("quantization") == target.quantization
    return found if same else None


def machine() -> dict[str, Any]:
    """Returns what the times of rounds depend on, under the names that records have."""
    return {
        "cpu": cpu_info().get("model name"),
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def found_shape(search: Mapping[str, Any], batch: int) -> DraftShape:
    """Returns the fastest shape at the largest searched batch size up to `batch`, else at the smallest."""
    sizes = sorted(int(size) for size in search["best"])
    size = max((one for one in sizes if one <= batch), default=sizes[0])
    return DraftShape.parse(search["best"][str(size)]["shape"])


def largest_found(search: Mapping[str, Any]) -> DraftShape:
    """Returns the smallest shape that covers the best ones of all batch sizes: the limit of adaptive drafting."""
    return DraftShape.covering(DraftShape.parse(one["adaptive_shape"]) for one in search["best"].values())


def arm_times(most: DraftShape, times: Sequence[Mapping[str, Any]]) -> list[ArmTime]:
    """Returns the times of plain decoding and of the shapes that adaptive drafting up to `most` chooses from.

    times: by batch size: {batch, plain_s, drafts: {"num_steps,top_k": seconds}, verifies: {"chain,nodes": seconds}} (or
    "tree,nodes").
    Shapes with parts that were not measured are left out.
    """
    found: list[ArmTime] = []
    for one in times:
        found.append(ArmTime(one["batch"], None, 0.0, one["plain_s"]))
        for shape in smaller_shapes(most):
            drafted = one["drafts"].get(f"{shape.num_steps},{shape.top_k}")
            verified = one["verifies"].get(f"{'chain' if shape.is_chain else 'tree'},{shape.num_draft_tokens}")
            if drafted is not None and verified is not None:
                found.append(ArmTime(one["batch"], shape, drafted, verified))
    return found
