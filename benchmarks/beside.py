"""Decoding, rollouts and training beside other processes that use the CPUs: what the limit on threads gains there.

    python benchmarks/beside.py [--draft runs/NAME/ckpt] [--run runs/smollm2-135m] [--work decode training]

Every work runs in turns of some seconds with all threads, with one thread, and with all but the limit of
toolkit/thread_limit.py; alone, and beside busy processes that this program starts. Run nothing else beside it.
Writes benchmarks/results/threads-beside-<hardware>.json.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from results_folder import leave
from training_jobs import borrow_features

from toolkit.bench.prompts import builtin_prompts
from toolkit.bench.records import make_record
from toolkit.data.chat_template import prompt_ids
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.load.load_engine import LoadedEngine, load_engine
from toolkit.infer.request.params import SamplingParams
from toolkit.pipeline.run import ROLLOUTS, TOKEN_MAP
from toolkit.recipe import DEMO_RECIPE, load_recipe
from toolkit.thread_limit import ThreadLimit
from toolkit.threads import physical_cores, users_threads
from toolkit.train.loop import Trainer

BUSY = [sys.executable, "-c", "while True: pass"]
BESIDE = {"nothing": [], "one": [BUSY], "one, nice 19": [["nice", "-n", "19", *BUSY]], "two": [BUSY, BUSY]}
DEFINITIONS = {
    "work": "decode: one request; rollouts: a full batch of plain decoding; training: the recipe's steps, with stored "
    "features and one unrolled step, from random weights",
    "beside": "busy processes (nice 0 unless named) while it ran",
    "threads": "all: as many as cores; one; limited: all, and fewer while other processes use the CPUs, the time until "
    "they are noticed included",
    "per_s": "tokens (training: steps) a second, prompts excluded; over all turns",
    "of_one": "per_s over that of one thread, same work and same processes beside it",
    "of_all": "per_s over that of all threads",
}
Limited = Callable[[], AbstractContextManager[None]]
Work = Callable[[Limited, float], tuple[float, float]]
"""(context of a round or step, seconds) -> tokens or steps, seconds."""


def decode(loaded: LoadedEngine, rows: int) -> Work:
    """Rows that are answered at once, without end; every turn begins with the same prompts."""
    engine, tokenizer = loaded.engine, loaded.target.tokenizer
    texts = [one.turns[0] for one in builtin_prompts()][:rows]
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]

    def turn(limited: Limited, seconds: float) -> tuple[float, float]:
        engine._limited = limited
        requests = [engine.add_request(one, SamplingParams(max_tokens=1500, ignore_eos=True)) for one in prompts]
        while any(not request.output_ids for request in requests):
            engine.step()
        before, began = sum(len(one.output_ids) for one in requests), time.perf_counter()
        while time.perf_counter() - began < seconds:
            engine.step()
        passed = time.perf_counter() - began
        written = sum(len(one.output_ids) for one in requests) - before
        for request in reversed(requests):
            engine.abort(request)
        return written, passed

    return turn


def train(run: Path, folder: Path) -> Work:
    """Steps of the demo recipe over the stored features of a run."""
    recipe = load_recipe(DEMO_RECIPE, ["train.head.init=random", "rollouts.keep_features=false"])
    borrow_features(run / "features", folder / "features")
    trainer = Trainer(recipe, run / ROLLOUTS, run / TOKEN_MAP, folder / "train")
    batches = itertools.cycle(list(trainer.data.plan.epoch(0))[:256])

    def turn(limited: Limited, seconds: float) -> tuple[float, float]:
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            with limited():
                trainer.optimise(steps, next(batches))
            steps += 1
        return steps, time.perf_counter() - began

    return turn


@contextmanager
def running(commands: Sequence[Sequence[str]]) -> Iterator[None]:
    """Busy processes inside the block."""
    processes = [subprocess.Popen(command) for command in commands]
    try:
        time.sleep(0.5 if processes else 0.0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(name: str, work: Work, args: argparse.Namespace, threads: int) -> Iterator[dict[str, Any]]:
    """A row for each number of threads and what runs beside it."""
    work(nullcontext, 1.0)  # the first forwards of a process are slow
    for beside in args.beside:
        limits: dict[str, tuple[int, Limited]] = {
            "all": (threads, nullcontext), "one": (1, nullcontext), "limited": (threads, ThreadLimit().limited)
        }  # fmt: skip
        sums = {mode: [0.0, 0.0] for mode in limits}
        with running(BESIDE[beside]):
            for _ in range(args.repeats):
                for mode, (count, limited) in limits.items():
                    torch.set_num_threads(count)
                    for at, value in enumerate(work(limited, args.seconds)):
                        sums[mode][at] += value
                limits = dict(reversed(limits.items()))
        torch.set_num_threads(threads)
        speeds = {mode: done / seconds for mode, (done, seconds) in sums.items()}
        for mode, speed in speeds.items():
            row = {"work": name, "beside": beside, "threads": mode, "per_s": speed, "seconds": sums[mode][1]}
            print(f"{name:20} beside {beside:14} {mode:8} {speed:7.2f}/s  {speed / speeds['one']:.2f} of one thread")
            yield row | {"of_one": speed / speeds["one"], "of_all": speed / speeds["all"]}


def works(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Work]]:
    for name in args.work:
        if name == "training":
            yield name, train(args.run, folder)
            continue
        draft = str(args.draft or args.run / "ckpt") if name == "head" else "none"
        rows = args.batch if name == "rollouts" else 1
        loaded = load_engine(EngineConfig(target="smollm2-135m", draft=draft, max_running_requests=rows))
        yield {"head": "decode, adaptive", "plain": "decode, plain"}.get(name, name), decode(loaded, rows)
        loaded.engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/smollm2-135m"), help="a finished run of the demo recipe")
    parser.add_argument("--draft", type=Path, help="draft directory (default: the run's)")
    choices = ("plain", "head", "rollouts", "training")
    parser.add_argument("--work", nargs="+", choices=choices, default=choices)
    parser.add_argument("--beside", nargs="+", choices=tuple(BESIDE), default=tuple(BESIDE))
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--repeats", type=int, default=2, help="turns a row")
    parser.add_argument("--batch", type=int, default=32, help="rows of rollouts")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    threads = int(users_threads() or physical_cores())
    torch.set_num_threads(threads)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, work in works(args, Path(folder)):
            rows += measure(name, work, args, threads)
    settings = {
        key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items() if key != "out"
    }
    command = ["python", *sys.argv]
    leave(make_record("threads", command, settings, rows, definitions=DEFINITIONS), "threads-beside", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
