"""One run of benchmarks/engine_gpu.py: which entrants there are, their turns, their parts, and what is left out."""

from __future__ import annotations

import argparse
import contextlib
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine_folders import eagle_target, exported
from engine_process import EngineProcess
from roofline_engines import EagleOwn, Entrant, HuggingFace, Mode, Ours, Sizes, Turn
from roofline_rows import cache_bytes, rows_of
from roofline_targets import Subject
from round_parts import Clock, RoundParts

from toolkit.bench.side_by_side import rotated
from toolkit.infer.graphs.recordings import Capture, Run
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.log import get_logger

logger = get_logger(__name__)

MARGIN = 4 * 2**30  # bytes beside weights and caches: activations, graphs, workspaces


@dataclass
class Bench:
    """What one run has found so far. left_out: what has no row, and why. bandwidth: of the card, by what moved it."""

    args: argparse.Namespace
    device: torch.device
    clock: Clock
    started: float = field(default_factory=time.perf_counter)
    left_out: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
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


def again(run: Run) -> Run:
    run()
    return run


def modes(bench: Bench, batch: int) -> list[Mode]:
    """Ours at this batch size."""
    shapes = [None, *(DraftShape.parse(text) for text in bench.args.shapes)]
    hows = ["eager", "graph"] + (["compiled"] if batch <= bench.args.torch_compile_max_bs else [])
    return [Mode(shape, how) for how in hows for shape in shapes]


def measure(bench: Bench, subject: Subject, eagle: EngineProcess | None) -> None:
    """All rows of one target."""
    longest = max(len(prompt) for prompt in subject.prompts)
    for batch in sorted(bench.args.batch):
        what = f"{subject.name}, batch {batch}"
        sizes = Sizes(batch, longest, bench.args.rounds, "eager" if bench.args.smoke else "inductor")
        wanted = modes(bench, batch)
        needed = MARGIN + sum(sizes.cached(subject, mode) for mode in wanted) * cache_bytes(subject)
        if not bench.late(what) and bench.holds(what, needed):
            with bench.surviving(what):
                measure_batch(bench, subject, wanted, sizes, eagle)


def measure_batch(
    bench: Bench, subject: Subject, wanted: Sequence[Mode], sizes: Sizes, eagle: EngineProcess | None
) -> None:
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
        if eagle is not None and sizes.batch == 1:
            tree = DraftShape.parse(bench.args.shapes[-1])
            enter(EagleOwn.name, lambda: EagleOwn(eagle, tree, 2 * sizes.rounds))
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


def open_eagle(bench: Bench, subject: Subject, stack: contextlib.ExitStack) -> EngineProcess | None:
    """EAGLE's own engine on this target and head; the reason is left where it has none."""
    name, draft = f"{EagleOwn.name}, {subject.name}", subject.draft
    if subject.forced is not None:
        bench.drop(name, "its acceptance cannot be forced, and it reads weights from files, which these are not in")
    elif bench.args.eagle_python is None:
        bench.drop(name, "no --eagle-python was given")
    elif draft.path is None or draft.kind not in ("eagle3", "eagle2"):
        bench.drop(name, "it needs --draft with a head of kind eagle3 or eagle2")
    else:
        with bench.surviving(name):
            return _start_eagle(bench, subject, stack)
    return None


def _start_eagle(bench: Bench, subject: Subject, stack: contextlib.ExitStack) -> EngineProcess:
    target, tree = subject.target, DraftShape.parse(bench.args.shapes[-1])
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="engine-gpu-")))
    settings = {
        "engine": "eagle", "device": str(bench.device), "threads": torch.get_num_threads(),
        "draft": exported(subject.draft, "eagle", folder / "head", target.name, target.revision, tree),
        "directory": eagle_target(target.tokenizer.name_or_path, folder / "target"),
        "eagle3": subject.draft.kind == "eagle3", "torch_dtype": str(target.dtype).removeprefix("torch."),
        "num_steps": tree.num_steps, "top_k": tree.top_k, "num_draft_tokens": tree.num_draft_tokens,
        "context_length": max(map(len, subject.prompts)) + 4 * bench.args.rounds + 64,
    }  # fmt: skip
    process = stack.enter_context(EngineProcess(settings, torch.get_num_threads(), bench.args.eagle_python))
    process.wait_until_loaded()
    return process
