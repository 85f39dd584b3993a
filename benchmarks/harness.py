"""What all benchmarks share: processes of their own, records, tables.

    python benchmarks/harness.py runs/smollm2-135m/bench/acceptance.json acceptance-smollm2-135m

copies a record to benchmarks/results/acceptance-smollm2-135m-<machine>.json, without its answers: only rows are cited.
Beside the report of a complete run, the copy also gets the seconds of each stage and the bytes of the features.

What vLLM's page for CPUs tells to preload is preloaded where it is found: tcmalloc (Debian: libtcmalloc-minimal4), and
the environment's Intel OpenMP.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from toolkit.bench.records import command_line, machine_name, make_record, read_record, write_record
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.export_head import export_head
from toolkit.checkpoint.launch_lines import Shape
from toolkit.infer.load.load_draft import stated_target
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.targets.facts import target_facts
from toolkit.targets.gguf_file import DEMO_NAME
from toolkit.threads import physical_cores, users_threads

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
WORKER = REPOSITORY / "benchmarks" / "engine_worker.py"
BY_PROMPT = ("answers", "times")  # long lists, which only `toolkit bench compare` reads
Row = dict[str, Any]
Result = TypeVar("Result")

# -- arguments, records, tables ----------------------------------------------------------------------------------------


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--note", help="what else the machine did, for the record")
    parser.add_argument("--out", type=Path, metavar="FILE", help="of the record (default: in benchmarks/results/)")
    return parser


def set_threads(default: int | None = None) -> int:
    """As many as the user asks for, else `default`, else as cores; returns the number."""
    count = int(users_threads() or default or physical_cores())
    torch.set_num_threads(count)
    return count


def target_of(args: argparse.Namespace, head: DraftCheckpoint | None) -> tuple[str, str | None]:
    """Name and revision: of --target, else of the head's, else the demo's."""
    return (args.target or DEMO_NAME, None) if args.target or head is None else stated_target(head)


def settings_of(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """The arguments as a record has them."""
    kept = {key: value for key, value in vars(args).items() if key not in ("out", "note")}
    return {key: str(value) if isinstance(value, Path) else value for key, value in (kept | more).items()}


def leave(
    args: argparse.Namespace, what: str, name: str, settings: Mapping[str, Any], rows: Sequence[Row], **more: Any
) -> None:
    """Write the record of a run as --out, or as <name>-<machine>.json of the results; say where."""
    record = make_record(what, f"python benchmarks/{command_line()}", settings, rows, note=args.note, **more)
    write(record, name, args.out)


def write(record: dict[str, Any], name: str, out: Path | None = None) -> None:
    out = out or RESULTS / f"{name}-{machine_name(record['hardware'])}.json"
    write_record(out, record)
    print(f"written: {out}")


def show(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], title: str, left_out: Mapping[str, str] = {}) -> None:
    """The rows on the terminal, by the names that their record has; an interval stands behind its value."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for key in keys:
        table.add_column(key, justify="left" if key == keys[0] else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in keys))
    Console(width=None if os.isatty(1) else 160).print(table)
    for name, why in left_out.items():
        print(f"no row of {name}: {why}")


def _cell(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "-" if None in value else f"[{', '.join(map(_cell, value))}]"
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def cost_of(run: Path) -> dict[str, Any]:
    """What a run took, by its folder: `stages`, seconds by name, and `features_bytes`. Empty without a report."""
    if not (run / "report.json").is_file():
        return {}
    stages = read_record(run / "report.json")["stages"]
    return {
        "stages": {stage["stage"]: stage["seconds"] for stage in stages},
        "features_bytes": sum(path.stat().st_size for path in run.glob("features/*")),
    }


# -- functions in processes of their own -------------------------------------------------------------------------------


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
    return peak_memory_of("self") or 0


def peak_memory_of(process: int | str) -> int | None:
    """Largest resident size of a process so far; None where /proc does not say."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)


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


# -- programs in processes of their own --------------------------------------------------------------------------------


class ProgramError(RuntimeError):
    """An engine or a server could not be loaded, or its process ended; the message has its last words."""


def vllm_environment(python: str, bound: str) -> dict[str, str]:
    """Variables of vLLM's process. bound: the cores of its threads, "auto" or as `first_cores` names them."""
    openmp = Path(shutil.which(python) or python).absolute().parents[1] / "lib" / "libiomp5.so"
    ours = [ctypes.util.find_library("tcmalloc_minimal"), str(openmp) if openmp.is_file() else None]
    preloaded = [path for path in [*ours, *os.environ.get("LD_PRELOAD", "").split(":")] if path]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "LD_PRELOAD": ":".join(preloaded),
        "VLLM_CPU_OMP_THREADS_BIND": bound,
    }


def first_cores(count: int) -> str:
    """As many of the cores that this process may use, with commas between them."""
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:count])


def exported(head: DraftCheckpoint, to: str, out: Path, target: str, revision: str | None, shape: DraftShape) -> str:
    """`toolkit export` of the head into a new folder. Raises what export_head raises."""
    export_head(head, to, out, target_facts(target, revision), Shape(*map(int, shape.as_text().split(","))))
    return str(out.resolve())


class Program:
    """A program in a process of its own, with its last words.

    words: its command behind the interpreter. python: the interpreter that has it (None: this one, with our package).
    more: variables of its environment. piped: it is talked to by its standard input and output.
    """

    def __init__(
        self, words: Sequence[str], threads: int, python: str | None, more: Mapping[str, str], piped: bool = False
    ) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **more}
        environment.pop("PYTHONPATH", None)  # our packages are not that interpreter's
        if python is None:
            paths = (str(REPOSITORY), os.environ.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        pipe = subprocess.PIPE if piped else None
        self.process = subprocess.Popen(
            [python or sys.executable, *words], stdin=pipe, stdout=pipe or self.log, stderr=self.log, env=environment,
            text=True,
        )  # fmt: skip

    def last_words(self) -> str:
        """How it ended, and the last line that it wrote."""
        status = self.process.poll()
        self.log.seek(0)
        lines = [line.strip() for line in self.log if line.strip()]
        how = "it was not ready in time" if status is None else f"its process ended with {status}"
        return f"{how}: {lines[-1] if lines else 'without a word'}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """It ends at the end of its input, or when it is told to."""
        pipes = [pipe for pipe in (self.process.stdin, self.process.stdout) if pipe is not None]
        for pipe in pipes:
            try:
                pipe.close()
            except BrokenPipeError:  # it is gone, and what was still to be written with it
                pass
        if not pipes:
            self.process.terminate()
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


class EngineProcess(Program):
    """An engine by engine_worker.py. settings: the worker's."""

    version: str | None = None
    weight_bits: float | None = None
    most: int | None = None
    settings: str | None = None

    def __init__(
        self, settings: Mapping[str, Any], threads: int, python: str | None = None, more: Mapping[str, str] = {}
    ) -> None:
        super().__init__([str(WORKER), json.dumps(dict(settings))], threads, python, more, piped=True)

    def wait_until_loaded(self) -> None:
        """Raises ProgramError when the engine cannot be had."""
        ready = self._reply()
        self.version, self.weight_bits, self.most = ready["version"], ready["weight_bits"], ready["most"]
        self.settings = ready["settings"]

    def answer(self, prompt_ids: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """The worker's reply. Raises ProgramError."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"prompt_ids": prompt_ids, "max_tokens": max_tokens}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise ProgramError(self._ended()) from error
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ProgramError(self._ended())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ProgramError(reply["error"])
        return reply

    def _ended(self) -> str:
        self.process.wait()
        return self.last_words()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("name", help="of the file, before the machine's name")
    args = parser.parse_args()
    record = {key: value for key, value in read_record(args.record).items() if key not in BY_PROMPT}
    write({**record, **cost_of(args.record.parent.parent)}, args.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
