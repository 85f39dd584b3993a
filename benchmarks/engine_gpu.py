"""The engine on one GPU beside its roofline: what a plain step, and each part of a speculative round, could cost.

    python benchmarks/engine_gpu.py [--draft runs/smollm2-135m/ckpt]

Two targets (gpu.py): the demo with its trained head, and the shape of Llama-3.1-8B with random weights, a random head
and a FORCED accept_length. At each batch size all entrants take turns on one card, the first one rotating, and are then
measured part by part:

    ours          plain, chain, tree   x   eager, graph, compiled (a graph of compiled layers)
    hf-generate   static cache, which transformers compiles on a GPU

The card's bandwidth is measured first, by a copy and a sum. Whatever the card cannot hold, or --budget has no time for,
is named and left out. Writes benchmarks/results/engine-gpu-<hardware>.json.

`--device cpu --smoke` runs all of it in seconds, on tiny random models: to see that it runs, not how fast.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from gpu import (
    SETTLING,
    Clock,
    Mode,
    Ours,
    RoundParts,
    Sizes,
    Subject,
    Turn,
    again,
    bandwidth,
    demo_subject,
    shaped_subject,
    tiny_subjects,
)
from harness import Row, leave, parser_of, settings_of, show
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from toolkit.bench.bootstrap import ratio_interval
from toolkit.bench.side_by_side import rotated
from toolkit.infer.graphs.recordings import Capture
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.verify.verifiers import ForcedAcceptance
from toolkit.log import get_logger

logger = get_logger(__name__)

MARGIN = 4 * 2**30  # bytes beside weights and caches: activations, graphs, workspaces
COPIED, COPIED_IN_SMOKE = 2**31, 2**22  # bytes
LLAMA_BYTES = 22e9  # to make the 8B shape and its head
COLUMNS = ("engine", "batch", "shape", "round_seconds", "tokens_per_s", "speedup", "interval", "accept_length",
           "overhead_of_verify", "share_of_bandwidth", "parts_by")  # fmt: skip
DEFINITIONS = {
    "weight_bits": "bits per weight as the engine holds them, over all parameters of the target",
    "forced": "the accept_length that drafts were accepted to by chance, whatever the target said (the tokens mean "
    "nothing then); null: the target decided",
    "context": "tokens of a row in the middle of the measured rounds, mean over rows",
    "seconds": "of `rounds` rounds in each of `repeats` turns, without prefill; entrants take turns, rotating",
    "round_seconds": "seconds of one round, host included",
    "speedup": "tokens a second over those of `over`, for drafted rows of ours the plain one of the same settings; "
    "95 % bootstrap interval over turns, which are paired",
    "accept_length": "tokens committed per verify step and row, bonus included",
    "speedup_per_accept_length": "the share of what was accepted that became speed",
    "parts": "seconds of a round by part, of an engine that was measured part by part behind the turns (gpu.py says "
    "what is in each); they add up to a round of that measurement",
    "parts_by": "graphs: a recorded graph for each part; stamps: of eager rounds",
    "overhead_of_verify": "all parts but verify, host included, over verify",
    "bytes_per_step": "weights that a plain step reads, output matrix included and embedding left out, and the keys "
    "and values of `context`",
    "share_of_bandwidth": "bytes_per_step / round_seconds / the larger of the card's bandwidths (`card`)",
    "peak_memory_bytes": "largest allocation of the process so far: all entrants of a batch size are loaded together",
}


class Entrant(Protocol):
    """One row of the table. over: the entrant that its speedup is over."""

    name: str
    over: str
    shape: DraftShape | None
    version: str

    def turn(self, prompts: Sequence[Sequence[int]]) -> Turn: ...


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
    """transformers' `generate` with a static cache. Prompts are padded on the left to one length: another length
    would be compiled anew."""

    name, over, shape, version = "hf-generate-static", "ours-plain-graph", None, transformers.__version__

    def __init__(self, subject: Subject, sizes: Sizes, clock: Clock) -> None:
        self._model, self._sizes, self._clock = subject.target.model, sizes, clock
        self._settings = GenerationConfig(
            max_new_tokens=SETTLING + sizes.rounds + 1, do_sample=False, cache_implementation="static", pad_token_id=0
        )

    def turn(self, prompts: Sequence[Sequence[int]]) -> Turn:
        longest, device = self._sizes.longest, self._model.device
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        ticks = _Ticks(self._clock, (SETTLING, SETTLING + self._sizes.rounds))
        own = self._model.generation_config
        # `generate` fills gaps of its settings from there: the target's stop ids would come back.
        self._model.generation_config = GenerationConfig(pad_token_id=0)
        try:
            self._model.generate(
                ids,
                attention_mask=mask,
                generation_config=self._settings,
                stopping_criteria=StoppingCriteriaList([ticks]),
            )
        finally:
            self._model.generation_config = own
        first, last = ticks.at
        return Turn(last - first, self._sizes.rounds, len(prompts), self._sizes.rounds * len(prompts))


def shape_text(entrant: Entrant) -> str:
    shape = entrant.shape
    if shape is None:
        return "plain"
    kind = "chain" if shape.is_chain else "tree"
    return f"{kind} {shape.num_steps}/{shape.top_k}/{shape.num_draft_tokens}"


def weight_bytes(subject: Subject) -> int:
    """What a step of the target reads of its weights."""
    target = subject.target
    parts = [*target.layers, target.final_norm, target.lm_head]
    return sum(tensor.nbytes for part in parts for tensor in part.parameters())


def cache_bytes(subject: Subject) -> int:
    """Keys and values of one token."""
    config = subject.target.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = (subject.target.dtype or next(subject.target.model.parameters()).dtype).itemsize
    return 2 * subject.target.n_layers * config.num_key_value_heads * width * size


def rows_of(
    subject: Subject,
    sizes: Sizes,
    turns: Mapping[str, Sequence[Turn]],
    entrants: Sequence[Entrant],
    parts: Mapping[str, tuple[str, dict[str, float]]],
    bandwidth: float,
    peak: int | None,
) -> list[dict[str, Any]]:
    """One row an entrant. parts: by entrant, how they were measured and seconds of a round; absent: not measured."""
    rows = []
    for entrant in entrants:
        mine, plain = turns[entrant.name], turns.get(entrant.over, [])
        seconds, rounds = sum(one.seconds for one in mine), sum(one.rounds for one in mine)
        tokens = sum(one.tokens for one in mine)
        length = tokens / (rounds * sizes.batch)
        round_seconds = seconds / rounds
        context = _context(subject, sizes, len(mine), length, rounds / len(mine))
        how, by_part = parts.get(entrant.name, (None, {}))
        row = {
            "engine": entrant.name,
            "version": entrant.version,
            "weight_bits": subject.target.weight_bits,
            "target": subject.name,
            "head": None if entrant.shape is None else subject.head,
            "forced": None if entrant.shape is None or not _is_ours(entrant) else subject.forced_length,
            "shape": shape_text(entrant),
            "batch": sizes.batch,
            "context": context,
            "repeats": len(mine),
            "rounds": rounds,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "round_seconds": round_seconds,
            "accept_length": None if entrant.shape is None else length,
            "over": entrant.over,
            **_speedup(mine, plain, None if entrant.shape is None else length),
            "parts": by_part,
            "parts_by": how,
            "overhead_of_verify": sum(by_part.values()) / by_part["verify"] - 1 if by_part else None,
            **_roofline(subject, sizes.batch, entrant, context, round_seconds, bandwidth),
            "peak_memory_bytes": peak,
        }
        rows.append(row)
    return rows


def _is_ours(entrant: Entrant) -> bool:
    return entrant.name.startswith("ours")


def _context(subject: Subject, sizes: Sizes, repeats: int, length: float, rounds: float) -> float:
    prompts = [len(prompt) for repeat in range(repeats) for prompt in subject.group(sizes.batch, repeat)]
    return sum(prompts) / len(prompts) + (SETTLING + rounds / 2) * length


def _speedup(mine: Sequence[Turn], plain: Sequence[Turn], length: float | None) -> dict[str, Any]:
    """Paired: a turn of ours and the plain one beside it are one unit."""
    if len(plain) != len(mine):
        return {"speedup": None, "interval": [None, None], "speedup_per_accept_length": None}
    theirs, ours = ([one.seconds / one.tokens for one in turns] for turns in (plain, mine))
    speedup = sum(theirs) / sum(ours)
    interval = ratio_interval(theirs, ours)
    return {
        "speedup": speedup,
        "interval": [None, None] if interval is None else list(interval),
        "speedup_per_accept_length": None if length is None else speedup / length,
    }


def _roofline(
    subject: Subject, batch: int, entrant: Entrant, context: float, seconds: float, bandwidth: float
) -> dict[str, Any]:
    if entrant.shape is not None:
        return {"bytes_per_step": None, "share_of_bandwidth": None}
    moved = weight_bytes(subject) + batch * context * cache_bytes(subject)
    return {"bytes_per_step": int(moved), "share_of_bandwidth": moved / seconds / bandwidth}


@dataclass
class Bench:
    """What one run has found so far. left_out: what has no row, and why. bandwidth: of the card, by what moved it."""

    args: argparse.Namespace
    device: torch.device
    clock: Clock
    forced: ForcedAcceptance
    started: float = field(default_factory=time.perf_counter)
    left_out: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    bandwidth: dict[str, float] = field(default_factory=dict)

    @property
    def capture(self) -> Capture | None:
        """How rounds are recorded: without a GPU they only run again."""
        return None if self.device.type == "cuda" else again

    def drop(self, what: str, why: object) -> None:
        logger.warning("%s is left out: %s", what, why)
        self.left_out[what] = " ".join(str(why).split())[:500]

    def holds(self, what: str, needed: float) -> bool:
        """Whether the card has that many bytes free; else `what` is left out."""
        if not self.clock.on_device:
            return True
        gc.collect()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0]
        if needed > free:
            self.drop(what, f"it needs {needed / 1e9:.1f} GB of the card's memory, {free / 1e9:.1f} GB are free")
        return needed <= free

    def late(self, what: str) -> bool:
        """Whether the budget is over; then `what` is left out."""
        over = time.perf_counter() - self.started > self.args.budget
        if over:
            self.drop(what, f"the {self.args.budget:g} s of --budget were over")
        return over

    @contextlib.contextmanager
    def surviving(self, what: str) -> Iterator[None]:
        """An entrant, a batch size or a target that fails costs its own rows."""
        try:
            yield
        except Exception as error:  # process edge: the record says why it has no row
            if self.args.smoke:  # which is there to find what fails
                raise
            self.drop(what, f"{type(error).__name__}: {error}")


def modes(bench: Bench, batch: int) -> list[Mode]:
    """Ours at this batch size."""
    shapes = [None, *(DraftShape.parse(text) for text in bench.args.shapes)]
    hows = ["eager", "graph"] + (["compiled"] if batch <= bench.args.torch_compile_max_bs else [])
    return [Mode(shape, how) for how in hows for shape in shapes]


def measure(bench: Bench, subject: Subject) -> None:
    """All rows of one target."""
    longest = max(len(prompt) for prompt in subject.prompts)
    for batch in sorted(bench.args.batch):
        what = f"{subject.name}, batch {batch}"
        sizes = Sizes(batch, longest, bench.args.rounds, "eager" if bench.args.smoke else "inductor")
        wanted = modes(bench, batch)
        needed = MARGIN + sum(sizes.cached(subject, mode) for mode in wanted) * cache_bytes(subject)
        if not bench.late(what) and bench.holds(what, needed):
            with bench.surviving(what):
                measure_batch(bench, subject, wanted, sizes)


def measure_batch(bench: Bench, subject: Subject, wanted: Sequence[Mode], sizes: Sizes) -> None:
    """All entrants of one batch size: turns first, then parts."""
    what = f"{subject.name}, batch {sizes.batch}"
    turns: dict[str, list[Turn]] = {}
    entrants: dict[str, Entrant] = {}

    def enter(name: str, build: Callable[[], Any]) -> None:
        """Its first turn does not count: it compiles and records."""
        if bench.late(f"{name}, {what}"):
            return
        with bench.surviving(f"{name}, {what}"):
            logger.info("%s: %s, %.0f s", what, name, time.perf_counter() - bench.started)
            entrant = build()
            if isinstance(entrant, Ours):
                stack.callback(entrant.close)
            entrant.turn(subject.group(sizes.batch, 0))
            entrants[name], turns[name] = entrant, []

    with contextlib.ExitStack() as stack:
        # Before ours, whose hooks on the target would be compiled with it.
        if sizes.batch in bench.args.hf_batch:
            enter(HuggingFace.name, lambda: HuggingFace(subject, sizes, bench.clock))
        else:
            bench.left_out[f"{HuggingFace.name}, {what}"] = "not among --hf-batch: each size compiles for a minute"
        for mode in wanted:
            enter(mode.name, partial(Ours, subject, mode, sizes, bench.clock, bench.capture))
        for repeat in range(bench.args.repeats):
            for name in rotated(list(entrants), repeat):
                with bench.surviving(f"{name}, {what}"):
                    turns[name].append(entrants[name].turn(subject.group(sizes.batch, repeat)))
    peak = torch.cuda.max_memory_allocated() if bench.clock.on_device else None
    whole = [one for name, one in entrants.items() if len(turns[name]) == bench.args.repeats]
    parts: dict[str, tuple[str, dict[str, float]]] = {}
    for mode in wanted:
        if mode.name in entrants and not bench.late(f"parts of {mode.name}, {what}"):
            with bench.surviving(f"parts of {mode.name}, {what}"):
                parts[mode.name] = measure_parts(bench, subject, mode, sizes)
    bench.rows += rows_of(subject, sizes, turns, whole, parts, max(bench.bandwidth.values()), peak)


def measure_parts(bench: Bench, subject: Subject, mode: Mode, sizes: Sizes) -> tuple[str, dict[str, float]]:
    """How, and seconds of a round by part. Recorded rounds fall back on stamps where parts cannot be recorded."""
    found = RoundParts(bench.clock)
    with found.wrapped():
        engine = Ours(subject, mode, sizes, bench.clock, found)
        try:
            engine.turn(subject.group(sizes.batch, 0))
            engine.turn(subject.group(sizes.batch, 0), found.restart, found.stop)
        finally:
            engine.close()
    by = "graphs" if found.recorded and bench.clock.on_device else "stamps"
    return by, {part: seconds / sizes.rounds for part, seconds in found.seconds().items()}


def subjects(bench: Bench) -> Iterator[tuple[str, Callable[[], Subject]]]:
    """What builds each target; one is let go before the next is built. First the one that targets are stated for."""
    args, device = bench.args, bench.device
    if args.smoke:
        for one in tiny_subjects(device, args.context, bench.forced):
            yield one.name, partial(_ready, one)
        return
    if "llama" in args.only and bench.holds("llama", LLAMA_BYTES):
        yield "llama", lambda: shaped_subject(device, args.context, bench.forced)
    if "demo" in args.only:
        yield "demo", lambda: demo_subject(args.target, args.draft, device)


def _ready(subject: Subject) -> Subject:
    return subject


def run(bench: Bench) -> None:
    size = COPIED_IN_SMOKE if bench.args.smoke else COPIED
    bench.bandwidth = bandwidth(bench.clock, bench.device, size)
    for name, build in subjects(bench):
        if bench.late(name):
            continue
        with bench.surviving(name):
            subject = build()
            measure(bench, subject)
            rows = [row for row in bench.rows if row["target"] == subject.name]
            show(rows, COLUMNS, f"{subject.name}; {subject.head}; {subject.acceptance}")
            del subject
        torch.compiler.reset()  # what was compiled for a target holds it
        gc.collect()


def arguments() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--draft", type=Path, metavar="DIR", help="draft directory of the demo's head (else untrained)")
    parser.add_argument("--target", help="default: the one that --draft names, else the demo")
    parser.add_argument("--only", nargs="+", choices=("demo", "llama"), default=["demo", "llama"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--shapes", nargs="+", default=["3,1,4", "7,8,32"], metavar="S,K,N", help="a chain and a tree")
    parser.add_argument("--context", type=int, default=512, help="tokens of random prompts (default: 512)")
    parser.add_argument("--force-accept-length", default="2.5", metavar="X", help="as of toolkit bench acceptance")
    parser.add_argument("--rounds", type=int, default=24, help="measured in each turn (default: 24)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of every entrant (default: 5)")
    parser.add_argument("--hf-batch", type=int, nargs="*", default=[1], metavar="N", help="with Hugging Face (1)")
    parser.add_argument("--torch-compile-max-bs", type=int, default=1, metavar="N", help="with compiled layers (1)")
    parser.add_argument("--budget", type=float, default=400, help="seconds after which nothing new begins (400)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny random models, to see that the script runs")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    device = torch.device(args.device)
    if not (args.smoke and device.type == "cpu") and not (device.type == "cuda" and torch.cuda.is_available()):
        print("engine_gpu.py measures one NVIDIA GPU, and PyTorch sees none here. To see that the script runs: "
              "--device cpu --smoke", file=sys.stderr)  # fmt: skip
        return 2
    if args.smoke:
        args.context, args.rounds, args.repeats = min(args.context, 20), min(args.rounds, 4), min(args.repeats, 2)
    forced = ForcedAcceptance.parse(args.force_accept_length)
    forced.check_shapes([DraftShape.parse(text) for text in args.shapes])
    torch.manual_seed(0)
    bench = Bench(args, device, Clock(device), forced)
    run(bench)
    seconds = time.perf_counter() - bench.started
    card = {"bytes_per_s": bench.bandwidth, "seconds_of_the_run": seconds}
    settings = settings_of(args, force_accept_length=forced.accept_length)
    more = {"card": card, "left_out": bench.left_out, "definitions": DEFINITIONS}
    leave(args, "engine", "engine-gpu-smoke" if args.smoke else "engine-gpu", settings, bench.rows, **more)
    for left, why in bench.left_out.items():
        print(f"no row of {left}: {why}")
    return 0 if bench.rows else 1


if __name__ == "__main__":
    sys.exit(main())
