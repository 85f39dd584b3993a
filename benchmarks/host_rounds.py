"""The host's share of a recorded round: scheduling, pages, launch, results and commits. Needs no GPU.

    python benchmarks/host_rounds.py --rows 16 --context 131072

A tiny random target and its head read the prompts with an attention that computes nothing. Then rounds are recorded and
replayed, and a replay does nothing either: every round has the results of the recording. What is left of a step is the
host's work, with page tables as long as those of real contexts. `whole_tables_seconds` is what a round would take more
if it uploaded all tables, as a measure for the rest. Writes benchmarks/results/host-rounds-<hardware>.json.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from results_folder import leave
from roofline_targets import TINY, tiny_subject
from torch import Tensor

from toolkit.bench.records import make_record
from toolkit.infer.cache import round_state
from toolkit.infer.cache.cache_manager import MemorySettings
from toolkit.infer.engine import engine as engine_module
from toolkit.infer.engine.engine import Engine
from toolkit.infer.graphs.recordings import GraphSettings, Run
from toolkit.infer.kernels import dispatch
from toolkit.infer.kernels.dispatch import REFERENCE
from toolkit.infer.kernels.paged_reference import Pages
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.verify.forced import ForcedAcceptance

CPU = torch.device("cpu")
CHUNK = 8192  # tokens of a prompt that are read at once
# Of the target and the head: 160 bytes of keys and values a token, and prompts of 2 million tokens are read in seconds.
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 1}
DEFINITIONS = {
    "step_seconds": "of Engine.step without the device's work; median",
    "slowest_step_seconds": "the longest one",
    "uploaded_numbers": "page numbers and their places that a round uploads; mean",
    "pages": "of all rows",
    "whole_tables_seconds": "of the upload of all page tables; median",
}


def once(run: Run) -> Run:
    """A capture whose replay does nothing."""
    run()
    return lambda: None


def _nothing(q: Tensor, _keys: Tensor, v: Tensor, **_more: Any) -> Tensor:
    return q.new_zeros(*q.shape[:3], v.shape[3])


def _attends_nothing(q: Tensor, pages: Pages, *_more: Any) -> Tensor:
    rows, heads, new, _ = q.shape
    return q.new_zeros(rows, new, heads, pages.values.shape[2])


@contextmanager
def without_attention() -> Iterator[None]:
    """Keys are not kept, and attention is zero."""
    ops = replace(
        REFERENCE, write_kv=lambda *_given: None, attend_causal=_attends_nothing, attend_tree=_attends_nothing,
        paged_width=256,
    )  # fmt: skip
    before = dispatch.ops_for("cpu")
    dispatch.install("cpu", ops)
    try:
        with (
            patch.object(engine_module, "install_native_ops", lambda _device: None),  # would compute attention again
            patch.object(F, "scaled_dot_product_attention", _nothing),  # a prompt's first tokens, the target's own
        ):
            yield
    finally:
        dispatch.install("cpu", before)


@contextmanager
def counted_uploads() -> Iterator[list[int]]:
    """How many numbers of page tables each upload has."""
    found: list[int] = []
    upload = round_state.upload

    def counting(numbers: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        found.append(sum(map(len, numbers)))
        return upload(numbers, device)

    with patch.object(round_state, "upload", counting):
        yield found


def seconds_of(run: Callable[[], Any], times: int) -> list[float]:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return found


def measure(rows: int, context: int, shape: DraftShape | None, rounds: int, overlap: bool) -> dict[str, Any]:
    """One row of the record."""
    gc.collect()  # the caches of the engine before
    with patch.dict(TINY, SIZES, max_position_embeddings=context):
        subject = tiny_subject(CPU, 32, ForcedAcceptance.parse("2.5"))
    # A round runs beside each chunk of the later prompts.
    before = rows * (context // CHUNK + 2)
    answer = (1 if shape is None else shape.num_steps + 1) * (before + rounds + 1)
    length = context - answer
    assert length > 0, f"a context of {context} tokens has no room for {rounds} rounds"
    memory = MemorySettings(rows * (context + CHUNK), chunked_prefill_size=CHUNK, scattered_pages=True)
    engine = Engine(
        subject.target, None if shape is None else subject.draft, shape, max_running_requests=rows,
        context_length=context, memory=memory, graphs=GraphSettings(rows, once, overlap=overlap),
    )  # fmt: skip
    assert dispatch.ops_for("cpu").attend_causal is _attends_nothing, "a mask of a chunk and a context is gigabytes"
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    for row in range(rows):  # prompts that differ from their first token on: none is found in the prefix cache
        engine.add_request([(row + at) % 500 + 2 for at in range(length)], params)
    while len(engine.scheduler.running) < rows:
        engine.step()
    engine.step()
    with counted_uploads() as uploads:
        steps = seconds_of(engine.step, rounds)
    pool = engine.scheduler.memory.pool
    found = {
        "rows": rows, "context": context, "shape": "plain" if shape is None else shape.name,
        "how": "graph" if overlap else "graph-serial",
        "step_seconds": statistics.median(steps), "slowest_step_seconds": max(steps),
        "uploaded_numbers": sum(uploads) / rounds, "pages": sum(map(len, pool.tables)),
        "whole_tables_seconds": statistics.median(
            seconds_of(lambda: pool.table(0, rows, pool.pages_per_row, CPU), min(rounds, 20))
        ),
    }  # fmt: skip
    engine.close()
    return found


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 131072], help="tokens of a row")
    parser.add_argument("--shapes", nargs="*", default=["3,1,4"], metavar="S,K,N", help="beside plain decoding")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, metavar="FILE")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    shapes = [None, *map(DraftShape.parse, args.shapes)]
    with without_attention():
        rows = [
            measure(args.rows, context, shape, args.rounds, overlap)
            for context in args.context
            for shape in shapes
            for overlap in (True, False)
        ]
    for row in rows:
        print(
            f"{row['rows']} rows of {row['context']} tokens, {row['shape']}, {row['how']}: "
            f"{1e3 * row['step_seconds']:.3f} ms a round (at most {1e3 * row['slowest_step_seconds']:.3f}), "
            f"{row['uploaded_numbers']:.1f} numbers uploaded of {row['pages']} pages "
            f"(all tables: {1e3 * row['whole_tables_seconds']:.3f} ms)"
        )
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    leave(make_record("host-rounds", ["python", *sys.argv], settings, rows, definitions=DEFINITIONS), "host-rounds",
          args.out)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
