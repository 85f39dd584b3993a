"""How many kernels each part of a recorded round launches, with the numbers of a CUDA device that is not there.

    python -m tests.pretend_cuda.run launches

The target has 7 layers and the head one; what is done a layer grows with them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from tests.conftest import build_draft, build_target
from tests.pretend_cuda.device import pretended_cuda
from tests.pretend_cuda.seen import seen
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.infer.engine.engine import Engine
from toolkit.infer.graphs.graph_rounds import Kind
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap

ROWS = 2


class Round(NamedTuple):
    """head: None for plain decoding. cut: as in `Kind`."""

    head: str | None = None
    shape: str = ""
    cut: bool | None = None
    dtype: torch.dtype = torch.float32


ROUNDS = {
    "plain cut": Round(cut=True),
    "eagle3 3,1,4": Round("eagle3", "3,1,4"),
    "eagle3 7,8,32": Round("eagle3", "7,8,32"),
    "mtp 7,8,32": Round("mtp", "7,8,32"),
    "eagle3 7,8,32 bf16": Round("eagle3", "7,8,32", dtype=torch.bfloat16),
}


class CountedCapture:
    """The capture of a part: as on a GPU it runs once before, for its tables. Counts the launches of the run after."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        before = seen.launches.total()
        run()
        self.counts.append(seen.launches.total() - before)
        return run


def draft_of(name: str | None, target: Target) -> DraftCheckpoint | None:
    """An untrained head for the target, on its device and in its dtype."""
    if name is None:
        return None
    if name == "eagle3":
        draft = build_draft(target)
    else:
        torch.manual_seed(3)
        config = MtpConfig.from_target_config(target.config, vocab_size=target.vocab_size)
        every = TokenMap.from_ids(list(range(target.vocab_size)), target.vocab_size)
        draft = DraftCheckpoint(MtpHead(config).eval().requires_grad_(False), every)
    return replace(draft, head=copy.deepcopy(draft.head).to(target.device, target.dtype))


def launches_of(target: Target, one: Round) -> dict[str, int]:
    """Launches of a recorded round of ROWS rows by part; target: on the pretended device."""
    engine = Engine(
        target, draft_of(one.head, target), None if one.head is None else DraftShape.parse(one.shape),
        max_running_requests=ROWS, context_length=128, max_total_tokens=1024, short_lived=True,
        capture=(capture := CountedCapture()),
    )  # fmt: skip
    graphs = engine._rounds.graphs
    assert graphs is not None
    with torch.inference_mode():
        parts = Kind(ROWS, engine.shape, one.cut).parts
        assert all([graphs._part(part) for part in parts]), "a part was not recorded; the log says why"
    engine.close()
    return {part.what: count for part, count in zip(parts, capture.counts, strict=True)}


def counted() -> dict[str, dict[str, int]]:
    """Launches by name of the round and part."""
    with pretended_cuda():
        host = build_target()
        of_dtype = {
            dtype: replace(host, model=copy.deepcopy(host.model).to("cuda", dtype), dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16)
        }
        return {name: launches_of(of_dtype[one.dtype], one) for name, one in ROUNDS.items()}
