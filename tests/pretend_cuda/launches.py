"""How many kernels each part of a recorded round launches, with the numbers of a CUDA device that is not there.

    python -m tests.pretend_cuda.launches [json]

prints a table: a column for each round, a line for each part. "outside" is all but the target's layers. The target has
7 layers and the head one; what is done a layer grows with them.
"""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from tests.conftest import build_draft, build_target
from tests.pretend_cuda.device import pretended_cuda
from tests.pretend_cuda.seen import seen
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.infer.drafters import draft_rollout, head_drafter
from toolkit.infer.drafters.draft_rollout import DraftRollout
from toolkit.infer.drafters.drafting_head import HeadReader
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.engine import round
from toolkit.infer.engine.engine import Engine
from toolkit.infer.graphs.graph_rounds import Kind
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap

ROWS = 2
TARGET = "target"
# (where a function is looked up, its name) -> the part of a round that its launches belong to, without those of the
# parts that it calls.
PARTS: list[tuple[Any, str, str]] = [
    (HeadDrafter, "draft", "draft bookkeeping"),
    (HeadReader, "read", "head layers"),
    (draft_rollout, "tree_metadata", "draft plan"),
    (DraftRollout, "logits", "draft logits"),
    (head_drafter, "chain_tree", "build tree"),
    (head_drafter, "rerank", "build tree"),
    (round, "tree_metadata", "target plan"),
    (round, "forward_tree", TARGET),
    (round, "choose_tokens", "choose"),
    (round, "follow", "walk"),
    (HeadDrafter, "keep_features", "keep features"),
    (round, "compact", "compaction"),
    (round, "advance", "advance"),
]
REST = "the rest"
OUTSIDE = "outside"
KINDS = {None: "greedy", False: "drawn", True: "cut"}


class Round(NamedTuple):
    """head: None for plain decoding. cut: as in `Kind`."""

    head: str | None = None
    shape: str = ""
    cut: bool | None = None
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        words = (self.head or "plain", self.shape, KINDS[self.cut], "bf16" if self.dtype == torch.bfloat16 else "")
        return " ".join(word for word in words if word)


ROUNDS = [
    Round(cut=True),
    Round("eagle3", "3,1,4"),
    Round("eagle3", "7,8,32"),
    Round("mtp", "7,8,32"),
    Round("eagle3", "7,8,32", dtype=torch.bfloat16),
]


class ByPart:
    """Attributes launches to the part that runs."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._running = [REST]
        self._before = 0

    def restart(self) -> None:
        self.counts.clear()
        self._before = seen.launches.total()

    def settle(self) -> None:
        """Give what was launched since to the part that runs."""
        now = seen.launches.total()
        self.counts[self._running[-1]] += now - self._before
        self._before = now

    def within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose launches are those of `part`."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.settle()
            self._running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.settle()
                self._running.pop()

        return run


@contextmanager
def counting_parts() -> Iterator[ByPart]:
    """Count by part, until the end of the block."""
    parts = ByPart()
    with ExitStack() as stack:
        for owner, name, part in PARTS:
            stack.enter_context(patch.object(owner, name, parts.within(part, getattr(owner, name))))
        yield parts


class CountedCapture:
    """The capture of a part: as on a GPU it runs once before, for its tables. Counts the run after it."""

    def __init__(self, parts: ByPart) -> None:
        self._parts, self.counts = parts, Counter[str]()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self._parts.restart()
        run()
        self._parts.settle()
        self.counts += self._parts.counts
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


def launches_of(target: Target, one: Round) -> Counter[str]:
    """Launches of a recorded round of ROWS rows by part; target: on the pretended device."""
    with counting_parts() as parts:
        engine = Engine(
            target, draft_of(one.head, target), None if one.head is None else DraftShape.parse(one.shape),
            max_running_requests=ROWS, context_length=128, max_total_tokens=1024, short_lived=True,
            capture=(capture := CountedCapture(parts)),
        )  # fmt: skip
        graphs = engine._rounds.graphs
        assert graphs is not None
        with torch.inference_mode():
            recorded = [graphs._part(part) for part in Kind(ROWS, engine.shape, one.cut).parts]
        engine.close()
    assert all(recorded), "a part was not recorded; the log says why"
    counts = Counter({part: count for part, count in capture.counts.items() if count})
    counts[OUTSIDE] = counts.total() - counts[TARGET]
    return counts


def counted(rounds: Sequence[Round] = ROUNDS) -> dict[str, Counter[str]]:
    """Launches by name of the round and part."""
    with pretended_cuda():
        host = build_target()
        of_dtype = {
            dtype: replace(host, model=copy.deepcopy(host.model).to("cuda", dtype), dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16)
        }
        return {one.name: launches_of(of_dtype[one.dtype], one) for one in rounds}


def table(columns: dict[str, Counter[str]]) -> str:
    """The counts as text."""
    order = [*dict.fromkeys(part for _, _, part in PARTS), REST, OUTSIDE]
    lines = [f"{'':<18}" + "  ".join(columns)]
    for part in order:
        counts = (f"{column[part]:>{len(name)}}" for name, column in columns.items())
        lines.append(f"{part:<18}" + "  ".join(counts))
    return "\n".join(lines)


if __name__ == "__main__":
    columns = counted()
    print(json.dumps(columns) if sys.argv[1:] == ["json"] else table(columns))
