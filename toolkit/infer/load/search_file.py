"""search.json in a draft directory: the settings that `toolkit search` found fastest, and the times it measured.

It holds for the weights, the machine, the options and the requests (greedy or sampled) that it was made with;
elsewhere it is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.drafters.adaptive import smaller_shapes
from toolkit.infer.drafters.step_costs import ArmTime
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.request.draft_tree import ADAPTIVE, DraftShape
from toolkit.log import get_logger
from toolkit.targets.fixed_linear import is_int8
from toolkit.targets.target import Target
from toolkit.threads import cpu_flags, cpu_info
from toolkit.weights import sha256_file

logger = get_logger(__name__)

SEARCH = "search.json"
# Engine options that change times of rounds, or what is drafted.
OPTIONS = ("torch_compile", "cuda_graph_max_bs", "tensor_parallel_size", "dynamic_rows")


def conditions(
    draft: DraftCheckpoint, config: EngineConfig, target: Target, temperature: float = 0.0
) -> dict[str, Any]:
    """Returns what a search of a draft directory depends on, by name: weights, machine, options and requests.

    temperature: of the requests."""
    on_gpu = target.device.type == "cuda"
    assert draft.path is not None, "a draft directory has weights"
    return {
        "weights": sha256_file(draft.path / "model.safetensors"),
        "token_map": draft.token_map.sha256,
        "target": target.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": target.quantization,
        "draft_quantization": "int8" if is_int8(draft.head) else None,
        "device": torch.cuda.get_device_name(target.device) if on_gpu else cpu_info().get("model name"),
        "cpu_flags": cpu_flags(cpu_info()),
        "torch_threads": torch.get_num_threads(),
        "requests": _requests(temperature, config.verify),
        **{name: getattr(config, name) for name in OPTIONS},
    }


def _requests(temperature: float, verify: str) -> str:
    """Returns the kind of requests: sampling takes time, loses drafts, and its rule decides how many."""
    if temperature == 0:
        return "greedy"
    # A search runs by the rule `target`, as `auto` does for trees and for requests that state a seed.
    return f"sampled, verify {'target' if verify == 'auto' else verify}"


def search_of(
    draft: DraftCheckpoint, config: EngineConfig, target: Target, temperature: float = 0.0
) -> dict[str, Any] | None:
    """Returns the content of search.json if it holds here, else None; the log says why it does not."""
    found = draft.meta.get("search")
    if found is None:
        return None
    then, here = found.get("holds_for") or {}, conditions(draft, config, target, temperature)
    differing = [
        f"{name} {_short(then.get(name))}, here {_short(value)}"
        for name, value in here.items()
        if then.get(name) != value
    ]
    if differing:
        logger.info("%s/%s is not used, since it was made with %s", draft.path, SEARCH, "; ".join(differing))
        return None
    return dict(found)


def _short(value: Any) -> str:
    return f"{value:.12}.." if isinstance(value, str) and len(value) == 64 else str(value)  # a sha256


def found_setting(search: Mapping[str, Any], batch: int) -> str:
    """Returns the setting that was the fastest at every batch size up to `batch`: a shape as text, or PLAIN.

    ADAPTIVE if adaptive drafting was, if the fastest differ, or if the search has no batch of this size."""
    sizes = sorted(int(size) for size in search["best"])
    covering = next((size for size in sizes if size >= batch), None)
    found = {search["best"][str(size)]["setting"] for size in sizes if covering is not None and size <= covering}
    return found.pop() if len(found) == 1 else ADAPTIVE


def found_shape(search: Mapping[str, Any], batch: int) -> DraftShape:
    """Returns the fastest shape at the largest searched batch size up to `batch`, else at the smallest."""
    sizes = sorted(int(size) for size in search["best"])
    size = max((one for one in sizes if one <= batch), default=sizes[0])
    return DraftShape.parse(search["best"][str(size)]["shape"])


def largest_found(search: Mapping[str, Any]) -> DraftShape:
    """Returns the smallest shape that covers the best ones of all batch sizes: the limit of adaptive drafting."""
    return DraftShape.covering(DraftShape.parse(one["adaptive_shape"]) for one in search["best"].values())


def found_times(search: Mapping[str, Any], most: DraftShape) -> list[ArmTime]:
    """Returns the times that adaptive drafting up to `most` starts from, also those of the best shapes."""
    return arm_times(most, search["times"], [DraftShape.parse(one["shape"]) for one in search["best"].values()])


def arm_times(most: DraftShape, times: Sequence[Mapping[str, Any]], best: Iterable[DraftShape] = ()) -> list[ArmTime]:
    """Returns the times of plain decoding and of the shapes that adaptive drafting up to `most` chooses from: the
    usual ones and `best`.

    times: by batch size: {batch, plain_s, drafts: {"num_steps,top_k": seconds}, verifies: {"chain,nodes": seconds}} (or
    "tree,nodes"). Shapes with parts that were not measured are left out.
    """
    shapes = dict.fromkeys([*smaller_shapes(most), *best])
    found: list[ArmTime] = []
    for one in times:
        found.append(ArmTime(one["batch"], None, 0.0, one["plain_s"]))
        for shape in shapes:
            drafted = one["drafts"].get(f"{shape.num_steps},{shape.top_k}")
            verified = one["verifies"].get(f"{'chain' if shape.is_chain else 'tree'},{shape.num_draft_tokens}")
            if drafted is not None and verified is not None:
                found.append(ArmTime(one["batch"], shape, drafted, verified))
    return found
