"""Where rounds on a GPU fall off a cliff, and how fast prompts are read.

    python benchmarks/cliffs_gpu.py --target llama --parts rounds prefill --budget 110 40

Targets of random weights with a forced accept_length, as in rounds_gpu.py; lengths are multiples of --context.

rounds    eight greedy requests, one of them with log-probabilities or a penalty, all of them drawn; one request, also
          behind long prompts; sixteen
prefill   prompts of 1/4, 2 and 16 contexts, and sixteen of 1/8 to 4; the engine's own chunks, no prefix cache

A row that fails or lasts too long costs itself alone: its engine is opened again. Writes
benchmarks/results/cliffs-<target>-<hardware>.json.
"""

from __future__ import annotations

import argparse
import gc
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from gpu import FORCED, SETTLING, Clock, Mode, Sizes, Subject, again, device_of, open_mode
from harness import leave, parser_of, settings_of, show

from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.verify.verifiers import ForcedAcceptance

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


def late(*_: Any) -> None:
    raise TimeoutError("its seconds were over")


@dataclass
class Cliffs:
    """One run. left_out: what has no row, and why."""

    args: argparse.Namespace
    subject: Subject
    clock: Clock
    left_out: dict[str, str] = field(default_factory=dict)

    def opened(self, group: Group, shape: DraftShape | None) -> Engine:
        gc.collect()  # the last one's memory
        part, room, cases = group
        rows, rounds = max(len(case[0]) for case in cases.values()), (self.args.turns + 1) * self.args.rounds
        whole = part == "rounds" and room == 1  # else as a server reads prompts
        sizes = Sizes(rows, room * self.args.context, rounds, whole_prompts=whole)
        return open_mode(self.subject, Mode(shape, "graph"), sizes, None if self.clock.on_device else again)

    def prompts(self, counts: Sequence[int], seed: int) -> list[list[int]]:
        generator, ids = torch.Generator().manual_seed(seed), self.subject.target.vocab_size
        return [torch.randint(2, ids, (count,), generator=generator).tolist() for count in counts]

    def rounds(self, engine: Engine, counts: Any, every: Any, **first: Any) -> dict[str, Any]:
        """All turns are of the same requests, so that long prompts are read once."""
        params, took = SamplingParams(max_tokens=engine.context_length, ignore_eos=True, **every), []
        settings = [replace(params, **first), *[params] * len(counts)]
        requests = [engine.add_request(*one) for one in zip(self.prompts(counts, 0), settings, strict=False)]
        while not all(request.ready for request in requests):
            engine.step()
        for _ in range(SETTLING):
            engine.step()
        written = -sum(len(request.output_ids) for request in requests)
        for _ in range(self.args.turns):
            self.clock.wait()
            started = time.perf_counter()
            for _ in range(self.args.rounds):
                engine.step()
            self.clock.wait()
            took.append((time.perf_counter() - started) / self.args.rounds)
        assert not any(request.finished for request in requests), "an answer ended while it was measured"
        written += sum(len(request.output_ids) for request in requests)
        for request in requests:
            engine.abort(request)
        tokens, seconds = written / (self.args.rounds * self.args.turns), statistics.median(took)  # tokens: of a round
        return {"seconds": seconds, "tokens_per_s": tokens / seconds, "accept_length": tokens / len(requests)}

    def prefill(self, engine: Engine, counts: Any, every: Any) -> dict[str, Any]:
        """Other texts in every turn; the first turn does not count."""
        params, took, waits = SamplingParams(max_tokens=1, ignore_eos=True, **every), [], []
        for turn in range(1 + self.args.turns):
            texts, started = self.prompts(counts, turn), time.perf_counter()
            requests = [engine.add_request(text, params) for text in texts]
            while not all(request.finished for request in requests):
                engine.step()
            self.clock.wait()
            took.append(time.perf_counter() - started)
            waits.append(statistics.mean((request.first_token_at or 0) - started for request in requests))
        seconds, ttft = statistics.median(took[1:]), statistics.median(waits[1:])
        return {"seconds": seconds, "tokens_per_s": sum(counts) / seconds, "ttft": ttft}

    def rows(self, group: Group, shape: DraftShape | None, ends: float) -> Iterator[dict[str, Any]]:
        """Of one engine. A row that fails costs itself and the engine."""
        engine: Engine | None = None
        (part, _, cases), drafts, base = group, "plain" if shape is None else shape.name, None
        for case, (lengths, every, *first) in cases.items():
            counts, left = [int(length * self.args.context) for length in lengths], ends - time.perf_counter()
            row: dict[str, Any] = {"part": part, "case": case, "batch": len(counts), "shape": drafts}
            name = ", ".join(map(str, row.values()))
            row |= {"tokens": sum(counts), "ttft": None, "accept_length": None}
            try:
                assert left > 1, "no time left"
                signal.setitimer(signal.ITIMER_REAL, min(LIMIT, left))
                engine = engine or self.opened(group, shape)
                row |= getattr(self, part)(engine, counts, every, **dict(*first))
            except Exception as error:  # process edge: the record says why there is no row
                self.left_out[name] = f"{type(error).__name__}: {error}"[:500]
                print(f"no row of {name}: {error}", flush=True)
                if engine is not None:
                    engine.close()
                engine = None
                continue
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            base = base or row["seconds"]
            print(f"{name}: {1e3 * row['seconds']:.3f} ms; {left:.0f} s were left before it", flush=True)
            yield {**row, "over": row["seconds"] / base}
        if engine is not None:
            engine.close()


def arguments() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--target", choices=tuple(FORCED), default="llama")
    parser.add_argument("--parts", nargs="+", choices=("rounds", "prefill"), default=["rounds", "prefill"])
    parser.add_argument("--budget", type=float, nargs="+", default=[110, 40], help="seconds of each part")
    parser.add_argument("--context", type=int, default=512, help="tokens (default: 512)")
    parser.add_argument("--rounds", type=int, default=16, help="of a turn (default: 16)")
    parser.add_argument("--turns", type=int, default=3, help="of which the median counts (default: 3)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    device, forced = device_of(args, "cliffs_gpu.py"), ForcedAcceptance.parse("2.5")
    if device is None:
        return 2
    signal.signal(signal.SIGALRM, late)
    cliffs, found = Cliffs(args, FORCED[args.target](device, args.context, forced), Clock(device)), list[Any]()
    for part, budget in zip(args.parts, args.budget, strict=True):
        ends = time.perf_counter() + budget
        for group in (one for one in GROUPS if one[0] == part):
            for shape in SHAPES:
                found += cliffs.rows(group, shape, ends)
    show(found, COLUMNS, cliffs.subject.name, cliffs.left_out)
    more = {"left_out": cliffs.left_out, "definitions": DEFINITIONS}
    leave(args, "cliffs", f"cliffs-{args.target}", settings_of(args), found, **more)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
