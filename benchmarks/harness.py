"""Where the records of benchmarks lie, and how the record of a run gets there.

    python benchmarks/harness.py runs/smollm2-135m/bench/acceptance.json acceptance-smollm2-135m

copies a record to benchmarks/results/acceptance-smollm2-135m-<machine>.json, without its answers: only rows are cited.
Beside the report of a complete run, the copy also gets the seconds of each stage and the bytes of the features.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from toolkit.bench.records import machine_name, read_record, write_record

RESULTS = Path(__file__).resolve().parent / "results"


Result = TypeVar("Result")


def leave(record: dict[str, Any], name: str, out: Path | None = None) -> None:
    """Write a record as `out`, or where nobody named a file as <name>-<machine>.json of the results; say where."""
    out = out or RESULTS / f"{name}-{machine_name(record['hardware'])}.json"
    write_record(out, record)
    print(f"written: {out}")


def cost_of(run: Path) -> dict[str, Any]:
    """What a run took, by its folder: `stages`, seconds by name, and `features_bytes`. Empty without a report."""
    if not (run / "report.json").is_file():
        return {}
    stages = read_record(run / "report.json")["stages"]
    return {
        "stages": {stage["stage"]: stage["seconds"] for stage in stages},
        "features_bytes": sum(path.stat().st_size for path in run.glob("features/*")),
    }


def restart_peak(device: torch.device) -> int:
    """Bytes held now; the peak counts from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return peak(device)


def peak(device: torch.device) -> int:
    """Most bytes held since the start or `restart_peak`: on a CPU, the process's resident memory (Linux)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def end_with_parent() -> None:
    """This process ends when the one that started it does, however that was: it would go on for minutes, unheard."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by another process"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def in_process_of_its_own(call: Callable[..., Result], *arguments: Any) -> Result:
    """What `call` returns, from a process whose memory ends with it."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=end_with_parent) as process:
        return process.submit(call, *arguments).result()


BY_PROMPT = ("answers", "times")  # long lists, which only `toolkit bench compare` reads


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("name", help="of the file, before the machine's name")
    args = parser.parse_args()
    record = {key: value for key, value in read_record(args.record).items() if key not in BY_PROMPT}
    leave({**record, **cost_of(args.record.parent.parent)}, args.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
