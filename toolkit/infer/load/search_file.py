"""search.json in a draft directory: the settings that `toolkit search` found fastest, and the times it measured.

    holds_for                     weights, machine and options that all of it was made with; elsewhere it is not used
    found: "greedy"               by kind of requests: they differ in the drafts that are lost and in the times
             "1", "4"             by batch size: the fastest setting, the limits for adaptive drafting, the times

A search of another kind or batch size is added. Each request has the settings of its own kind. Those of a kind that
was not searched are drafted adaptively, from the times of another kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.drafters.adaptive import Plan
from toolkit.infer.drafters.estimates import StepCosts
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.request.draft_tree import ADAPTIVE, PLAIN, DraftShape, smaller_shapes
from toolkit.infer.request.request import Request
from toolkit.log import get_logger
from toolkit.targets.fixed_linear import quantization_of
from toolkit.targets.target import Target
from toolkit.threads import cpu_flags, cpu_info
from toolkit.weights import sha256_file

logger = get_logger(__name__)

SEARCH = "search.json"
GREEDY, SAMPLED = "greedy", "sampled"  # kinds of requests: at temperature 0, and above
# Engine options that change times of rounds, or what is drafted.
OPTIONS = ("torch_compile", "cuda_graph_max_bs", "tensor_parallel_size")


@dataclass(frozen=True)
class Found:
    """What search.json has for an engine's requests.

    best: by kind, GREEDY or SAMPLED, and batch size. times: by batch size, of a kind that was searched.
    """

    best: Mapping[str, Mapping[int, Mapping[str, Any]]]
    times: Sequence[Mapping[str, Any]]

    def winners(self, batch: int) -> dict[str, dict[int, str]]:
        """Returns the fastest settings of an engine with at most `batch` rows: a shape as text, PLAIN or ADAPTIVE.

        By kind and by the largest number of rows that they are for; with more rows than were searched, ADAPTIVE."""
        found: dict[str, dict[int, str]] = {}
        for kind, sizes in self.best.items():
            upto = [size for size in sorted(sizes) if all(one < batch for one in sizes if one < size)]
            found[kind] = {size: str(sizes[size]["setting"]) for size in upto}
            if upto[-1] < batch:
                found[kind][batch] = ADAPTIVE
        return found

    def shape(self, batch: int, kind: str | None = None) -> DraftShape:
        """Returns the fastest shape at the largest searched batch size up to `batch`, else at the smallest.

        kind: None: greedy requests, if they were searched."""
        sizes = self.best[kind or min(self.best)]
        size = max((one for one in sizes if one <= batch), default=min(sizes))
        return DraftShape.parse(sizes[size]["shape"])

    def shapes(self, batch: int) -> dict[int, DraftShape]:
        """Returns the fastest shapes of an engine with at most `batch` rows, by the largest number of rows that they
        are for; of greedy requests, if they were searched. Empty where plain or adaptive decoding won for some."""
        sizes = self.winners(batch)[min(self.best)]
        texts = {size: sizes[size] for size in self.best[min(self.best)] if size in sizes}
        return {} if {PLAIN, ADAPTIVE} & set(texts.values()) else {n: DraftShape.parse(one) for n, one in texts.items()}

    @property
    def largest(self) -> DraftShape:
        """The smallest shape that covers the best ones of all batch sizes: the limit of adaptive drafting."""
        return DraftShape.covering(DraftShape.parse(one["adaptive_shape"]) for one in self._entries)

    def step_costs(self, most: DraftShape) -> StepCosts:
        """Returns the times that adaptive drafting up to `most` starts from, also those of the best shapes."""
        return step_costs(most, self.times, [DraftShape.parse(one["shape"]) for one in self._entries])

    @property
    def _entries(self) -> list[Mapping[str, Any]]:
        return [one for sizes in self.best.values() for one in sizes.values()]


class Winners:
    """The plan of some rows: the winner of the smallest searched batch size that they do not exceed.

    The choice is free (None) where adaptive drafting won, with more rows than were searched, for a kind of requests
    that was not searched, and for rows of both kinds whose winners differ. settings: see `Found.winners`.
    """

    def __init__(self, settings: Mapping[str, Mapping[int, str]], most: DraftShape) -> None:
        texts = {text for sizes in settings.values() for text in sizes.values()} - {PLAIN, ADAPTIVE}
        shapes = {text: DraftShape.parse(text).within(most) for text in texts}
        self._plans = {PLAIN: Plan()} | {text: Plan(one, one.num_draft_tokens) for text, one in shapes.items()}
        self._settings = settings

    def __call__(self, requests: Sequence[Request]) -> Plan | None:
        kinds = {SAMPLED if one.params.temperature > 0 else GREEDY for one in requests if one.speculative}
        found = set()
        for sizes in (self._settings.get(kind, {}) for kind in kinds):
            size = min((one for one in sizes if one >= len(requests)), default=None)
            found.add(None if size is None else self._plans.get(sizes[size]))
        return found.pop() if len(found) == 1 else None


def conditions(draft: DraftCheckpoint, config: EngineConfig, target: Target) -> dict[str, Any]:
    """Returns what all of a draft directory's searches depend on, by name: weights, machine and options."""
    on_gpu = target.device.type == "cuda"
    assert draft.path is not None, "a draft directory has weights"
    return {
        "weights": sha256_file(draft.path / "model.safetensors"),
        "token_map": draft.token_map.sha256,
        "target": target.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": target.quantization,
        "draft_quantization": quantization_of(draft.head),
        "device": torch.cuda.get_device_name(target.device) if on_gpu else cpu_info().get("model name"),
        "cpu_flags": cpu_flags(cpu_info()),
        "torch_threads": torch.get_num_threads(),
        "deterministic": config.deterministic or None,  # earlier searches do not have it
        **{name: getattr(config, name) for name in OPTIONS},
        **({"draft_confidence": config.draft_confidence} if config.draft_confidence else {}),
        **({"disable_cuda_graph": config.disable_cuda_graph} if on_gpu else {}),
    }


def kind_of_requests(temperature: float, verify: str) -> str:
    """Returns "greedy", or "sampled" with the verify rule: sampling takes time, and its rule decides what is lost."""
    if temperature == 0:
        return GREEDY
    # A search runs by the rule `target`, as `auto` does for trees and for requests that state a seed.
    return f"sampled, verify {'target' if verify == 'auto' else verify}"


def merged(earlier: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content `new` with what `earlier` found for other kinds of requests and other batch sizes.

    Without that if `earlier` was made under other conditions, and the log says which."""
    if earlier is None:
        return dict(new)
    if differing := _differing(earlier, new["holds_for"]):
        logger.warning("the earlier searches in %s are replaced: they were made with %s", SEARCH, differing)
        return dict(new)
    found = {kind: dict(sizes) for kind, sizes in earlier["found"].items()}
    for kind, sizes in new["found"].items():
        found[kind] = found.get(kind, {}) | sizes
    return {**new, "found": found}


def search_of(draft: DraftCheckpoint, config: EngineConfig, target: Target) -> Found | None:
    """Returns what search.json found; None without it, or if it was made under other conditions, which the log says.

    Sampled requests have what was found by the engine's verify rule. One that needs chains takes no kind with trees."""
    search = draft.meta.get("search")
    if search is None:
        return None
    if differing := _differing(search, conditions(draft, config, target)):
        logger.info("%s/%s is not used, since it was made with %s", draft.path, SEARCH, differing)
        return None
    found = search["found"]
    best: dict[str, dict[int, Mapping[str, Any]]] = {}
    for kind, name in ((GREEDY, GREEDY), (SAMPLED, kind_of_requests(1.0, config.verify))):
        sizes = found.get(name, {})
        shapes = [DraftShape.parse(one[key]) for one in sizes.values() for key in ("shape", "adaptive_shape")]
        if sizes and (config.verify in ("auto", "target") or all(one.is_chain for one in shapes)):
            best[kind] = {int(size): one for size, one in sizes.items()}
    timed = found[min(found)]
    return Found(best, [one["times"] for one in timed.values()])


def _differing(search: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Returns the conditions of `search` that are not those of `here`; empty if all agree."""
    then = search["holds_for"]
    return "; ".join(
        f"{name} {str(then.get(name))[:24]}, here {str(value)[:24]}"
        for name, value in here.items()
        if then.get(name) != value
    )


def step_costs(most: DraftShape, times: Sequence[Mapping[str, Any]], best: Iterable[DraftShape] = ()) -> StepCosts:
    """Returns the times of plain decoding and of the shapes that adaptive drafting up to `most` chooses from: the
    usual ones and `best`.

    times: by batch size: {batch, plain_s, drafts: {"num_steps,top_k": seconds}, verifies: {`verified`: seconds}}.
    Shapes with parts that were not measured are left out.
    """
    shapes = dict.fromkeys([*smaller_shapes(most), *best])
    costs = StepCosts()
    for one in times:
        for shape in shapes:
            draft_s = one["drafts"].get(f"{shape.num_steps},{shape.top_k}")
            verify_s = one["verifies"].get(verified(shape))
            if draft_s is not None and verify_s is not None:
                # Each beside a plain round of the same moment.
                costs.add(one["batch"], None, 1, 0.0, one["plain_s"])
                costs.add(one["batch"], shape, shape.num_draft_tokens, draft_s, verify_s)
    return costs


def verified(shape: DraftShape) -> str:
    """Returns what the time of a shape's verification depends on: "chain,4", "tree,8", "tree,6 after one step"."""
    kind = "chain" if shape.is_chain else "tree"
    return f"{kind},{shape.num_draft_tokens}{' after one step' if shape.num_steps == 1 else ''}"
