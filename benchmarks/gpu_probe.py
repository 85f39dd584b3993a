"""What a GPU machine has, and whether each thing that the engine relies on works there alone.

    python benchmarks/gpu_probe.py [--device cpu] [--out FILE]

Modules are imported, a kernel is compiled and run, and what rounds do is recorded as CUDA graphs, one operation a
graph: if a recorded round fails later, this says which operation is the reason. Launches and uploads are timed, since
they bound what a round can cost. A failure is a row and ends nothing.
Writes benchmarks/results/gpu-probe-<hardware>.json.

Exit status 3 where PyTorch sees no CUDA device, after what can be said without one; `--device cpu` then runs the same
operations on the CPU, to see that the script runs.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from results_folder import leave
from round_parts import Clock

from toolkit.bench.records import make_record
from toolkit.infer.graphs.recordings import Capture, CudaCapture, Run

IMPORTED = (
    "toolkit.infer.engine.engine", "toolkit.infer.load.llm", "toolkit.infer.server.app", "toolkit.train.step",
    "toolkit.train.loop",
)  # fmt: skip
PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "huggingface_hub", "accelerate", "deepspeed", "numpy",
    "safetensors", "gguf", "fastapi", "uvicorn", "pydantic", "datasets", "wandb", "pytest", "pytest-xdist", "ninja",
)  # fmt: skip
TOOLS = ("gcc", "g++", "nvcc", "ptxas", "ncu", "compute-sanitizer", "nvidia-smi")
SCORES = ((5, 128256), (80, 128256), (512, 128256), (5, 49152))  # rows and vocabularies
TINY = 1000  # launches of a kernel that does nearly nothing
DEFINITIONS = {
    "microseconds": "of one replay of the graph, or of one call; null: not timed",
    "seconds": "all told, compilation and recording included",
}
Probe = tuple[str, Callable[[], float | None]]


def replayed(run: Run, capture: Capture, clock: Clock) -> float:
    """Record `run`; microseconds of a replay."""
    return 1e6 * clock.median(capture(run), 20)


def operations(device: torch.device) -> Iterator[tuple[str, Run]]:
    """What a recorded round does, one operation each, at the sizes of a chain, a tree and a large batch."""
    for rows, vocabulary in SCORES if device.type == "cuda" else ((5, 64),):
        logits, of = torch.randn(rows, vocabulary, device=device), f"{rows} x {vocabulary}"
        yield f"sort {of}", lambda logits=logits: logits.sort(dim=-1, descending=True)
        yield f"max {of}", lambda logits=logits: logits.max(dim=-1)
        yield f"softmax and cumsum in fp64 {of}", lambda logits=logits: logits.softmax(-1).double().cumsum(-1)
    scores, to = torch.rand(16, 64, device=device), torch.arange(64, device=device)
    cache = torch.zeros(4000, 8, 128, device=device, dtype=torch.bfloat16)
    yield "topk", lambda: scores.topk(8, dim=1)
    yield "index_copy of index_select", lambda: cache.index_copy_(0, to, cache.index_select(0, to + 64))
    yield "eye and tril", lambda: (torch.eye(8, device=device), torch.ones(8, 8, device=device).tril())
    yield "repeat_interleave", lambda: scores.repeat_interleave(8, dim=1)
    yield f"{TINY} dependent launches", tiny_launches(device)


def tiny_launches(device: torch.device) -> Run:
    one = torch.zeros(64, device=device)

    def run() -> None:
        for _ in range(TINY):
            one.add_(1)

    return run


def kernel_runs(device: torch.device) -> None:
    """One of the engine's kernels: Triton's compiler, its C compiler and Python.h are there."""
    from toolkit.infer.kernels.dispatch import REFERENCE, triton_ops

    logits = torch.randn(5, 1000, device=device)
    assert torch.equal(triton_ops().argmax(logits), REFERENCE.argmax(logits)), "argmax differs from PyTorch's"


def calls(device: torch.device, clock: Clock) -> Iterator[Probe]:
    """Times that are the host's: launches one by one, and uploads."""
    pinned = torch.empty(64, dtype=torch.long, pin_memory=device.type == "cuda")
    run = tiny_launches(device)
    yield "eager: one launch", lambda: called(run, clock, 3) / TINY
    yield "eager: upload of a list", lambda: called(lambda: torch.tensor([1, 2, 3], device=device), clock, 500)
    yield "eager: upload of 64 pinned ids", lambda: called(lambda: pinned.to(device, non_blocking=True), clock, 500)


def called(run: Run, clock: Clock, times: int) -> float:
    """Microseconds of a call, until the device has done all of them."""
    run()
    clock.wait()
    began = time.perf_counter()
    for _ in range(times):
        run()
    clock.wait()
    return 1e6 * (time.perf_counter() - began) / times


def imports() -> Iterator[Probe]:
    for name in IMPORTED:
        yield f"import {name}", lambda name=name: importlib.import_module(name) and None


def on_device(device: torch.device) -> Iterator[Probe]:
    clock = Clock(device)
    if device.type == "cuda":
        yield "a Triton kernel", lambda: kernel_runs(device)
    for name, run in operations(device):
        # A capture that failed may have left its pool unusable, so each has its own.
        capture = CudaCapture() if device.type == "cuda" else lambda run: run
        yield f"graph: {name}", lambda run=run, capture=capture: replayed(run, capture, clock)
    yield from calls(device, clock)


def row_of(name: str, probe: Callable[[], float | None]) -> dict[str, Any]:
    began, told, microseconds = time.perf_counter(), None, None
    try:
        microseconds = probe()
    except Exception as error:  # a probe that fails is what this script is there to find
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    row = {"probe": name, "failed": told, "microseconds": microseconds, "seconds": time.perf_counter() - began}
    took = "" if microseconds is None else f"{microseconds:.1f} us"
    print(f"{'ok    ' if told is None else 'FAILED'} {name} {took if told is None else told}", flush=True)
    return row


def machine(device: torch.device) -> dict[str, Any]:
    """Tools, packages and the card."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"  # Triton compiles its launchers with it
    found: dict[str, Any] = {
        "packages": {name: installed(name) for name in PACKAGES},
        "tools": [name for name in TOOLS if shutil.which(name)] + ["Python.h"] * header.is_file(),
        "cuda": torch.version.cuda,
        "card": None,
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
        capability = f"{card.major}.{card.minor}"
        found["card"] = {"name": card.name, "capability": capability, "processors": card.multi_processor_count}
        found["card"] |= {"free_bytes": free, "total_bytes": total}
    for name, value in found.items():
        print(f"{name}: {value}", flush=True)
    return found


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, metavar="FILE")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    device = torch.device(args.device)
    absent = device.type == "cuda" and not torch.cuda.is_available()
    found = machine(torch.device("cpu") if absent else device)
    rows = [row_of(*probe) for probe in imports()]
    if absent:
        print(f"gpu_probe.py: PyTorch {torch.__version__} sees no CUDA device here", file=sys.stderr)
        return 3
    rows += [row_of(*probe) for probe in on_device(device)]
    settings = {"device": args.device}
    record = make_record("gpu-probe", ["python", *sys.argv], settings, rows, machine=found, definitions=DEFINITIONS)
    leave(record, "gpu-probe", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
