"""One of two ranks of a test, run by path: opens engines over both in turn and writes down what they answer.

    python rank_at_work.py WORK.json RANK ANSWERS.json

Without a driver: both ranks are handed the same requests.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.infer.graphs.conftest import Recording
from toolkit.infer.cpu import attention
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.load_engine import device_of, load_models, load_rank
from toolkit.infer.parallel.rank_engine import engine_of
from toolkit.infer.parallel.ranks import ParallelError, Ranks
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import EngineError, SamplingParams

MAX_TOKENS, SEED = 12, 5


class Pair(Ranks):
    """Both ranks, which share a file."""

    def __init__(self, rank: int, file: Path) -> None:
        self.rank, self.size, self._file = rank, 2, file

    def join(self) -> None:
        if not dist.is_initialized():
            self.connect(dist.FileStore(str(self._file), self.size))

    def agree(self, decide: Any) -> Any:
        value = [decide() if self.rank == 0 else None]
        dist.broadcast_object_list(value)
        return value[0]


def opened(case: dict[str, Any], ranks: Ranks | None) -> Engine:
    """The engine of a case. Of one with `fails`, ranks record their rounds, and rank 1 fails with so many in three."""
    config = EngineConfig(**case["options"])
    if ranks is None or "fails" not in case:
        return load_rank(config, ranks).engine
    recording, attempts = Recording(), itertools.count()
    attention.row_attention = lambda *_: None  # operations of torch are recorded

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        replay = recording(run)
        if ranks.rank == 1 and next(attempts) % 3 < case["fails"]:
            raise EngineError("no memory")
        return replay

    target, draft = load_models(config, device_of(config), ranks)
    return engine_of(ranks)(target, draft, None, config, capture=capture)


def answers(case: dict[str, Any], ranks: Ranks | None) -> dict[str, Any]:
    """Tokens by what was asked: (shape or None for plain decoding, temperature, how many prompts at once)."""
    try:
        engine = opened(case, ranks)
    except ParallelError as error:
        return {"refused": str(error)}
    found: dict[str, Any] = {"pages": engine._memory.pool.page_count, "accepted": 0, "tokens": {}}
    found["key_heads"] = [engine._cache.shape.kv_heads]
    if hasattr(engine.drafter, "reader"):
        found["key_heads"].append(engine.drafter.reader.caches[0].shape.kv_heads)
    for shape, temperature, count in case["asks"]:
        if shape is not None:
            engine.set_shape(DraftShape.parse(shape))
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=SEED)
        requests = engine.generate(case["prompts"][:count], params, speculative=shape is not None)
        engine.check_integrity()
        found["tokens"][f"{shape}, temperature {temperature}, {count}"] = [request.output_ids for request in requests]
        found["accepted"] += sum(event.accepted for request in requests for event in request.events)
    graphs = engine._rounds.graphs
    if graphs is not None:
        found |= {"parts": [part.name for part in graphs.made], "eager_rounds": engine.eager_rounds}
    engine.close()
    return found


if __name__ == "__main__":
    work, rank = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), int(sys.argv[2])
    pair = Pair(rank, Path(sys.argv[1]).with_name("store"))
    Path(sys.argv[3]).write_text(
        json.dumps({name: answers(case, pair) for name, case in work.items()}), encoding="utf-8"
    )
    dist.destroy_process_group()
