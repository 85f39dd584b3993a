"""The engine on one GPU beside its roofline: what a plain step, and each part of a speculative round, could cost.

    python benchmarks/engine_gpu.py [--batch 1 8 32] [--hows graph graph-serial] [--kernels] [--without fused]
    python benchmarks/engine_gpu.py --kind dspark --shapes 15,1,16 64 256

The shape of Llama-3.1-8B with random weights, a random head and a FORCED accept_length (gpu.py). At each batch size all
entrants take turns on one card, the first one rotating, and are then measured part by part:

    ours          plain, chain, tree   x   --hows
    hf-generate   static cache, which transformers compiles on a GPU

--kernels also counts the kernels of a round and names the longest. The card's bandwidth is measured first, by a copy
and a sum. Whatever fails, or --budget has no time for, is named and left out.
Writes benchmarks/results/engine-gpu-<hardware>.json.
"""

from __future__ import annotations

import collections
import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from gpu import (
    HEADS,
    HOWS,
    SETTLING,
    Bench,
    Clock,
    Mode,
    Ours,
    Sizes,
    Subject,
    Turn,
    bandwidth,
    gpu_parser,
)
from harness import Row, ratio, show
from torch.profiler import DeviceType, ProfilerActivity, profile
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from toolkit.bench.side_by_side import rotated
from toolkit.infer.request.draft_tree import DraftShape

# By the name of --without: module, its switch, the value that switches it off.
SWITCHES: dict[str, tuple[str, str, Any]] = {
    "fused": ("toolkit.infer.attention.fused_layer", "enabled", False),
    "skinny": ("toolkit.infer.kernels.triton.layer_ops", "skinny_rows", 0),
    "dependent": ("toolkit.infer.kernels.triton.launch", "enabled", False),
}
SHOWN, NAMED = 28, 70  # kernels of a round, letters of a kernel's name
COLUMNS = ("engine", "batch", "shape", "round_seconds", "tokens_per_s", "speedup", "interval",
           "accept_length", "overhead_of_verify", "share_of_bandwidth", "parts_by", "first_turn_seconds")  # fmt: skip
DEFINITIONS = {
    "engine": "ours: -eager; -graph: recorded, a round is launched before the host has read the last one; "
    "-graph-serial: recorded, launched after; -compiled: a graph of compiled layers",
    "weight_bits": "bits per weight as the engine holds them, over all parameters of the target",
    "forced": "the accept_length that drafts were accepted to by chance, whatever the target said",
    "context": "tokens of a row in the middle of the measured rounds, mean over rows",
    "seconds": "of `rounds` rounds in each of `repeats` turns, without prefill; entrants take turns, rotating",
    "round_seconds": "seconds of one round, host included",
    "first_turn_seconds": "of the first turn: compilations, recordings and the reading of the prompts included",
    "speedup": "tokens a second over those of `over`, for drafted rows of ours the plain one of the same settings; "
    "95 % bootstrap interval over turns, which are paired",
    "accept_length": "tokens committed per verify step and row, bonus included",
    "speedup_per_accept_length": "the share of what was accepted that became speed",
    "parts": "seconds of a recorded round by part (gpu.py says what is in each), of a turn behind the others; "
    "they add up to a round of that turn",
    "parts_by": "graphs: each part is a recorded graph; null: rounds are eager",
    "overhead_of_verify": "all parts but verify, host included, over verify",
    "bytes_per_step": "weights that a plain step reads, output matrix included and embedding left out, and the keys "
    "and values of `context`",
    "share_of_bandwidth": "bytes_per_step / round_seconds / the larger of the card's bandwidths (`card`)",
    "kernels": "kernels and copies of one round on the device; seconds: of all of them; by_name: the longest",
    "peak_memory_bytes": "largest allocation of the process so far: all entrants of a batch size are loaded together",
}


class _Ticks(StoppingCriteria):
    """When the tokens of these numbers were there; stops nothing."""

    def __init__(self, clock: Clock, numbers: Sequence[int]) -> None:
        self._clock, self._numbers, self._seen = clock, numbers, 0
        self.at: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_more: Any) -> Any:
        if self._seen in self._numbers:
            self._clock.wait()
            self.at.append(time.perf_counter())
        self._seen += 1
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class HuggingFace:
    """transformers' `generate` with a static cache. All prompts have one length: another would be compiled anew."""

    name, over, shape, version = "hf-generate-static", "ours-plain-graph", None, transformers.__version__

    def __init__(self, subject: Subject, sizes: Sizes, clock: Clock) -> None:
        self._model, self._rounds, self._clock = subject.target.model, sizes.rounds, clock
        self._settings = GenerationConfig(
            max_new_tokens=SETTLING + sizes.rounds + 1, do_sample=False, cache_implementation="static", pad_token_id=0
        )

    def turn(self, prompts: Sequence[Sequence[int]]) -> Turn:
        ids = torch.tensor(prompts, device=self._model.device)
        ticks = _Ticks(self._clock, (SETTLING, SETTLING + self._rounds))
        own = self._model.generation_config
        # `generate` fills gaps of its settings from there: the target's stop ids would come back.
        self._model.generation_config = GenerationConfig(pad_token_id=0)
        try:
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self._settings,
                stopping_criteria=StoppingCriteriaList([ticks]),
            )
        finally:
            self._model.generation_config = own
        first, last = ticks.at
        return Turn(last - first, self._rounds, len(prompts), self._rounds * len(prompts))

    def close(self) -> None:
        """It holds nothing of its own."""


def shape_text(shape: DraftShape | None) -> str:
    if shape is None:
        return "plain"
    if shape.budget:
        return f"tree of {shape.num_draft_tokens}"
    return f"{'chain' if shape.is_chain else 'tree'} {shape.num_steps}/{shape.top_k}/{shape.num_draft_tokens}"


def bytes_per_step(subject: Subject, batch: int, context: float) -> float:
    """What a plain step reads: of the target's weights, and keys and values of `context` tokens a row."""
    target, config = subject.target, subject.target.config
    parts = [*target.layers, target.final_norm, target.lm_head]
    weights = sum(tensor.nbytes for part in parts for tensor in part.parameters())
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = (target.dtype or next(target.model.parameters()).dtype).itemsize
    return weights + batch * context * 2 * target.n_layers * config.num_key_value_heads * width * size


def row_of(
    subject: Subject, entrant: Ours | HuggingFace, batch: int, mine: Sequence[Turn], plain: Sequence[Turn], card: float
) -> Row:
    """Of all turns of an entrant. plain: the turns beside them of `over`. card: its bytes a second."""
    seconds, rounds, tokens = (sum(getattr(one, of) for one in mine) for of in ("seconds", "rounds", "tokens"))
    length, drafts = tokens / (rounds * batch), entrant.shape is not None
    context = len(subject.prompts[0]) + (SETTLING + rounds / len(mine) / 2) * length
    speedup, interval = None, [None, None]
    if len(plain) == len(mine):  # a turn of ours and the plain one beside it are one unit
        theirs, ours = ([one.seconds / one.tokens for one in turns] for turns in (plain, mine))
        speedup, interval = ratio(theirs, ours)
    moved = None if drafts else bytes_per_step(subject, batch, context)
    return {
        "engine": entrant.name,
        "version": entrant.version,
        "weight_bits": subject.target.weight_bits,
        "target": subject.name,
        "head": f"random {subject.draft.kind} head" if drafts else None,
        "forced": subject.forced.accept_length if drafts else None,
        "shape": shape_text(entrant.shape),
        "batch": batch,
        "context": context,
        "repeats": len(mine),
        "rounds": rounds,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "round_seconds": seconds / rounds,
        "accept_length": length if drafts else None,
        "over": entrant.over,
        "speedup": speedup,
        "interval": interval,
        "speedup_per_accept_length": speedup / length if drafts and speedup is not None else None,
        "bytes_per_step": None if moved is None else int(moved),
        "share_of_bandwidth": None if moved is None else moved / (seconds / rounds) / card,
    }


def kernels_of(engine: Ours, prompts: Sequence[Sequence[int]], rounds: int, clock: Clock) -> dict[str, Any]:
    """Kernels and copies of one round. On a CPU, torch's operations stand for them."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if clock.on_device else [])
    profiler = profile(activities=kinds)

    def end() -> None:
        clock.wait()
        profiler.__exit__(None, None, None)

    engine.turn(prompts, profiler.__enter__, end)
    wanted = DeviceType.CUDA if clock.on_device else DeviceType.CPU
    events = [event for event in profiler.events() if event.device_type == wanted]
    count, spent = collections.Counter[str](), collections.Counter[str]()
    for event in events:
        name = event.name[:NAMED]
        count[name] += 1
        spent[name] += event.device_time if clock.on_device else event.self_cpu_time_total  # microseconds
    longest = {
        name: {"count": count[name] / rounds, "seconds": spent[name] / rounds / 1e6}
        for name, _ in spent.most_common(SHOWN)
    }
    return {"count": len(events) / rounds, "seconds": sum(spent.values()) / rounds / 1e6, "by_name": longest}


def parts_of(entrant: Ours, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The columns of a turn measured part by part; none of eager rounds."""
    parts = entrant.parts(prompts)
    if not parts:
        return {}
    return {"parts": parts, "parts_by": "graphs", "overhead_of_verify": sum(parts.values()) / parts["verify"] - 1}


def opened(build: Callable[[], Any], prompts: Sequence[Sequence[int]]) -> tuple[Any, float]:
    """An entrant behind its first turn, which compiles and records, and the seconds of both."""
    began, entrant = time.perf_counter(), build()
    try:
        entrant.turn(prompts)
    except BaseException:
        entrant.close()
        raise
    return entrant, time.perf_counter() - began


def measure(bench: Bench, subject: Subject, sizes: Sizes, card: float) -> None:
    """All rows of one batch size: turns first, then kernels, then parts."""
    args, batch, what = bench.args, sizes.batch, f"batch {sizes.batch}"
    shapes = [None, *(DraftShape.parse(text) for text in args.shapes)]
    modes = {mode.name: mode for mode in (Mode(shape, how) for how in args.hows for shape in shapes)}
    builds: dict[str, Callable[[], Any]] = {}
    if batch in args.hf_batch:
        # Before ours, whose hooks on the target would be compiled with it.
        builds[HuggingFace.name] = partial(HuggingFace, subject, sizes, bench.clock)
    for name, mode in modes.items():
        builds[name] = partial(Ours, subject, mode, sizes, bench.clock, bench.capture)
    entrants: dict[str, Any] = {}
    first: dict[str, float] = {}
    for name, build in builds.items():
        found = bench.attempt(f"{name}, {what}", partial(opened, build, subject.group(batch, 0)))
        if found is not None:
            entrants[name], first[name] = found
    turns: dict[str, list[Turn]] = {name: [] for name in entrants}
    for repeat in range(args.repeats):
        for name in rotated(list(entrants), repeat) if entrants else ():
            call = partial(entrants[name].turn, subject.group(batch, repeat))
            if (turn := bench.attempt(f"{name}, {what}", call)) is not None:
                turns[name].append(turn)
            else:
                entrants.pop(name).close()
    for name, entrant in entrants.items():
        row = row_of(subject, entrant, batch, turns[name], turns.get(entrant.over, []), card)
        row |= {"first_turn_seconds": first[name], "peak_memory_bytes": bench.peak, "kernels": None}
        row |= {"parts": {}, "parts_by": None, "overhead_of_verify": None}
        if name in modes:
            prompts = subject.group(batch, 0)
            if args.kernels:
                call = partial(kernels_of, entrant, prompts, args.rounds, bench.clock)
                row["kernels"] = bench.attempt(f"kernels of {name}, {what}", call)
            row |= bench.attempt(f"parts of {name}, {what}", partial(parts_of, entrant, prompts)) or {}
        entrant.close()
        bench.rows.append(row)


def print_kernels(found: Sequence[Row]) -> None:
    for row in found:
        kernels: Mapping[str, Any] | None = row["kernels"]
        if kernels is not None:
            print(f"{row['engine']}, batch {row['batch']}: {kernels['count']:.0f} kernels a round, "
                  f"{1e3 * kernels['seconds']:.3f} ms")  # fmt: skip
            for name, one in kernels["by_name"].items():
                print(f"  {1e6 * one['seconds']:9.1f} us {one['count']:7.1f} x  {name}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = gpu_parser(__doc__, 400, batch=[1], context=512, rounds=24, repeats=5)
    parser.add_argument("--hows", nargs="+", choices=HOWS, default=["eager", "graph", "compiled"])
    parser.add_argument("--shapes", nargs="+", default=["3,1,4", "7,8,32"], metavar="S,K,N", help="a chain and a tree")
    parser.add_argument(
        "--kind", choices=tuple(HEADS), default="eagle3", help="of the head; dspark: a causal block of 16"
    )
    parser.add_argument("--force-accept-length", default="2.5", metavar="X", help="as of toolkit bench acceptance")
    parser.add_argument("--hf-batch", type=int, nargs="*", default=[1], metavar="N", help="with Hugging Face (1)")
    parser.add_argument("--kernels", action="store_true", help="profile a turn: kernels by number and time")
    told = "switch off fused layers, our products or dependent launches"
    parser.add_argument("--without", nargs="+", choices=tuple(SWITCHES), default=[], help=told)
    args = parser.parse_args(argv)
    bench = Bench.of(args)
    for module, switch, off in map(SWITCHES.__getitem__, args.without):
        setattr(importlib.import_module(module), switch, off)
    subject = Subject.of(args.target, bench.device, args.context, args.force_accept_length, args.kind)
    subject.forced.check_shapes([DraftShape.parse(text) for text in args.shapes])
    rates = bandwidth(bench.clock, bench.device, 2**31 if bench.clock.on_device else 2**22)
    for batch in sorted(args.batch):
        measure(bench, subject, Sizes(batch, args.context, args.rounds), max(rates.values()))
    print_kernels(bench.rows)
    title = f"{subject.name}; random {args.kind} head; forced accept_length {subject.forced.accept_length:.2f}"
    show(bench.rows, COLUMNS, title, bench.left_out)
    card = {"bytes_per_s": rates, "seconds_of_the_run": time.perf_counter() - bench.started}
    return bench.leave("engine", "engine-gpu", DEFINITIONS, card=card)


if __name__ == "__main__":
    sys.exit(main())
