"""Model families on a CUDA device that is not there. A program, since it patches torch:

    python -m tests.pretend_cuda.family_cases llama gpt2 ..

Prints one JSON object: by family, what differs from the CPU's answers, and what rounds without prompts read and
uploaded.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from typing import Any

import torch

from tests.checkpoint.native_targets import SERVES_HYBRIDS
from tests.infer.attention.test_hybrid_targets import FAMILIES as HYBRIDS
from tests.infer.attention.test_target_families import FAMILIES, VOCABULARY, build, build_head
from tests.infer.conftest import build_small_target
from tests.pretend_cuda.device import pretended_cuda
from tests.pretend_cuda.engine_cases import Rounds
from tests.pretend_cuda.seen import seen
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.cache.cache_manager import MemorySettings
from toolkit.infer.engine.engine import Engine
from toolkit.infer.graphs.recordings import GraphSettings
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.targets.target import Target

ROWS = 2
SHORT, LONG = ([factor] * 8 for factor in (1.0, 2.0))
SCALED: dict[str, dict[str, Any]] = {  # rotations that change with the length; heads have none such
    "phi3-longrope": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG},
    "llama-dynamic": {"rope_type": "dynamic", "factor": 2.0},
}
LINEAR = HYBRIDS if SERVES_HYBRIDS else {}  # chains only, and no recorded rounds
EVERY = {
    **FAMILIES,
    **LINEAR,
    **{
        name: {"rope_parameters": {"rope_theta": 10000.0, "original_max_position_embeddings": 128, **rope}}
        for name, rope in SCALED.items()
    },
}


def answers(
    target: Target, draft: DraftCheckpoint | None, shape: str, graphs: GraphSettings | None
) -> tuple[list[Any], Rounds]:
    """Three ragged prompts in two rows, some of them read in chunks."""
    engine = Engine(
        target, draft, None if draft is None else DraftShape.parse(shape), max_running_requests=ROWS,
        context_length=128, graphs=graphs,
        memory=MemorySettings(464, chunked_prefill_size=12),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    requests = [
        engine.add_request(
            torch.randint(3, VOCABULARY, (length,), generator=generator).tolist(), SamplingParams(max_tokens=12)
        )
        for length in (14, 5, 21)
    ]
    rounds = Rounds(engine)
    while engine.has_work():
        rounds.step()
    engine.close()
    return [[one.output_ids, [event.accepted for event in one.events]] for one in requests], rounds


def compare(families: list[str]) -> dict[str, dict[str, Any]]:
    tokenizer, found = build_small_target().tokenizer, {}
    for family in families:
        target = build(family, EVERY[family], tokenizer)
        draft = None if family in SCALED else build_head(target)
        shape = "3,1,4" if family in LINEAR else "3,3,8"
        graphs = None if family in LINEAR else GraphSettings(ROWS, at_start=False)
        wanted, _ = answers(target, draft, shape, None)
        with pretended_cuda():
            there = replace(target, model=copy.deepcopy(target.model).to("cuda"))
            moved = None if draft is None else replace(draft, head=copy.deepcopy(draft.head).to("cuda"))
            replays = seen.replays
            got, rounds = answers(there, moved, shape, graphs)
        found[family] = {
            "different": [] if got == wanted else [got, wanted],
            "reads": rounds.reads,
            "uploads": rounds.uploads,
            "lines": sorted(rounds.lines),
            "replays": seen.replays - replays,
        }
    return found


if __name__ == "__main__":
    print(json.dumps(compare(sys.argv[1:] or list(EVERY))))
