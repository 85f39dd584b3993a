"""Where rounds on a GPU fall off a cliff, and how fast prompts are read.

    python benchmarks/cliffs_gpu.py [--target llama] [--budget 120]

Targets of random weights with a forced accept_length (gpu.py); lengths are multiples of --context.

rounds    eight greedy requests, one of them with log-probabilities or a penalty, all of them drawn; one request, also
          behind long prompts; sixteen
prefill   prompts of 1/4, 2 and 16 contexts, and sixteen of 1/8 to 4; the engine's own chunks, no prefix cache

A row that fails or lasts too long costs itself alone: its engine is opened again. Writes
benchmarks/results/cliffs-<target>-<hardware>.json.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu import Bench, Mode, Sizes, Subject, gpu_parser, open_mode, started
from harness import Row, show

from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams

Group = tuple[str, int, dict[str, tuple[Any, ...]]]
HOT, DRAWN = {"temperature": 0.8, "top_p": 0.95, "seed": 7}, "temperature 0.8, top_p 0.95"
EIGHT, SPREAD = (1,) * 8, tuple(0.125 + 3.875 * one / 15 for one in range(16))
# Engines: part, contexts it has room for, cases: contexts of the prompts, settings of all requests and of the first.
GROUPS: tuple[Group, ...] = (
    ("rounds", 1, {"greedy": (EIGHT, {}), "one with log-probabilities": (EIGHT, {}, {"logprobs": 5}),
                   "one with a penalty": (EIGHT, {}, {"repetition_penalty": 1.05}), DRAWN: (EIGHT, HOT)}),
    ("rounds", 1, {"greedy": ((1,), {}), DRAWN: ((1,), HOT)}),
    ("rounds", 64, {"1 context in room for 64": ((1,), {}), "16 contexts": ((16,), {}), "64 contexts": ((64,), {})}),
    ("rounds", 1, {"greedy": ((1,) * 16, {})}),
    ("prefill", 20, {"1/4": ((0.25,), {}), "2": ((2,), {}), "16 mixed": (SPREAD, {}), "16": ((16,), {})}),
)  # fmt: skip
COLUMNS = ("case", "part", "batch", "shape", "seconds", "ttft", "over", "tokens_per_s")
SHAPES, LIMIT = (DraftShape.parse("3,1,4"), None), 30  # seconds of a row
DEFINITIONS = {
    "seconds": "median of turns. rounds: of one, host included; prefill: from the requests to the last first token",
    "over": "seconds, over those of the engine's first case",
    "tokens": "of all prompts; tokens_per_s: written (rounds) or read (prefill)",
    "ttft": "seconds to the first token, of the mean request",
}


class Cliffs(Bench):
    """One run."""

    def opened(self, subject: Subject, group: Group, shape: DraftShape | None) -> Engine:
        part, room, cases = group
        rows, rounds = max(len(case[0]) for case in cases.values()), (self.args.repeats + 1) * self.args.rounds
        whole = part == "rounds" and room == 1  # else as a server reads prompts
        sizes = Sizes(rows, room * self.args.context, rounds, whole_prompts=whole)
        return open_mode(subject, Mode(shape, "graph"), sizes, self.capture)

    def prompts(self, engine: Engine, counts: Sequence[int], seed: int) -> list[list[int]]:
        generator, ids = torch.Generator().manual_seed(seed), engine.target.vocab_size
        return [torch.randint(2, ids, (count,), generator=generator).tolist() for count in counts]

    def rounds(self, engine: Engine, counts: Sequence[int], every: Any, first: Any) -> Row:
        """All turns are of the same requests, so that long prompts are read once."""
        params, took = SamplingParams(max_tokens=engine.context_length, ignore_eos=True, **every), []
        settings = [replace(params, **first), *[params] * len(counts)]
        requests = [engine.add_request(*one) for one in zip(self.prompts(engine, counts, 0), settings, strict=False)]
        written = -started(engine, requests)
        for _ in range(self.args.repeats):
            self.clock.wait()
            began = time.perf_counter()
            for _ in range(self.args.rounds):
                engine.step()
            self.clock.wait()
            took.append((time.perf_counter() - began) / self.args.rounds)
        assert not any(request.finished for request in requests), "an answer ended while it was measured"
        written += sum(len(request.output_ids) for request in requests)
        for request in requests:
            engine.abort(request)
        tokens, seconds = written / (self.args.rounds * self.args.repeats), statistics.median(took)  # tokens: a round's
        return {"seconds": seconds, "tokens_per_s": tokens / seconds, "accept_length": tokens / len(requests)}

    def prefill(self, engine: Engine, counts: Sequence[int], every: Any, first: Any) -> Row:
        """Other texts in every turn; the first turn does not count."""
        params, took, waits = SamplingParams(max_tokens=1, ignore_eos=True, **every), [], []
        for turn in range(1 + self.args.repeats):
            texts, began = self.prompts(engine, counts, turn), time.perf_counter()
            requests = [engine.add_request(text, params) for text in texts]
            while not all(request.finished for request in requests):
                engine.step()
            self.clock.wait()
            took.append(time.perf_counter() - began)
            waits.append(statistics.mean((request.first_token_at or 0) - began for request in requests))
        seconds, ttft = statistics.median(took[1:]), statistics.median(waits[1:])
        return {"seconds": seconds, "tokens_per_s": sum(counts) / seconds, "ttft": ttft}

    def measure(self, subject: Subject, group: Group, shape: DraftShape | None) -> None:
        """The rows of one engine. A row that fails costs itself and the engine."""
        engine: Engine | None = None
        (part, _, cases), base = group, None
        for case, (lengths, every, *first) in cases.items():
            counts = [int(length * self.args.context) for length in lengths]
            row = {"part": part, "case": case, "batch": len(counts), "shape": "plain" if shape is None else shape.name}
            what = ", ".join(map(str, row.values()))
            engine = engine or self.attempt(what, partial(self.opened, subject, group, shape), LIMIT)
            if engine is None:
                continue
            call: Callable[[], Row] = partial(getattr(self, part), engine, counts, every, dict(*first))
            found = self.attempt(what, call, LIMIT)
            if found is None:
                engine.close()
                engine = None
                continue
            base = base or found["seconds"]
            row |= {"tokens": sum(counts), "ttft": None, "accept_length": None, **found}
            self.rows.append({**row, "over": row["seconds"] / base})
            print(f"{what}: {1e3 * row['seconds']:.3f} ms", flush=True)
        if engine is not None:
            engine.close()


def main(argv: Sequence[str] | None = None) -> int:
    args = gpu_parser(__doc__, 150, context=512, rounds=16, repeats=3).parse_args(argv)
    cliffs = Cliffs.of(args)
    subject = Subject.of(args.target, cliffs.device, args.context)
    for group in GROUPS:
        for shape in SHAPES:
            cliffs.measure(subject, group, shape)
    show(cliffs.rows, COLUMNS, subject.name, cliffs.left_out)
    return cliffs.leave("cliffs", f"cliffs-{args.target}", DEFINITIONS)


if __name__ == "__main__":
    sys.exit(main())
