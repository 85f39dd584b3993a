"""What all benchmarks share: arguments, processes of their own, statistics, records, tables.

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
from engine_worker import peak_memory_bytes
from rich import box
from rich.console import Console
from rich.table import Table

from toolkit.bench.bootstrap import LEAST_GROUPS, ratio_interval
from toolkit.bench.prompts import Prompt, builtin_prompts, limited, read_prompts
from toolkit.bench.records import command_line, machine_name, make_record, read_record, write_record
from toolkit.bench.side_by_side import BenchError
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.export_head import export_head
from toolkit.checkpoint.launch_lines import Shape
from toolkit.errors import is_for_users
from toolkit.infer.load.load_draft import stated_target
from toolkit.infer.request.chat_prompt import chat_ids
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

SIZES = {
    "batch": "prompts together",
    "limit": "prompts",
    "max_tokens": "tokens of an answer, at most",
    "repeats": "times that all is measured",
    "rounds": "rounds of a turn",
    "context": "tokens of random prompts",
}


def parser_of(text: str | None, **sizes: int | list[int]) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes. sizes: those of SIZES that it has, with their defaults."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in sizes.items():
        flag, told = f"--{name.replace('_', '-')}", f"{SIZES[name]} (default: %(default)s)"
        number = "+" if isinstance(default, list) else None
        parser.add_argument(flag, type=positive, nargs=number, default=default, metavar="N", help=told)
    parser.add_argument("--note", help="what else the machine did, for the record")
    parser.add_argument("--out", type=Path, metavar="FILE", help="of the record (default: in benchmarks/results/)")
    return parser


def positive(text: str) -> int:
    """A number of an option."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1 is needed")
    return int(text)


def set_threads(default: int | None = None) -> int:
    """As many as the user asks for, else `default`, else as cores; returns the number."""
    count = int(users_threads() or default or physical_cores())
    torch.set_num_threads(count)
    return count


def target_of(args: argparse.Namespace, head: DraftCheckpoint | None) -> tuple[str, str | None]:
    """Name and revision: of --target, else of the head's, else the demo's."""
    return (args.target or DEMO_NAME, None) if args.target or head is None else stated_target(head)


def prompts_of(limit: int, most: int = 1, file: str | None = None) -> list[Prompt]:
    """Those of a file in MT-bench's field style, or the built-in ones, `limit` of them evenly over tasks.

    most: the largest batch. Raises BenchError where they do not fill one, and DataError.
    """
    found = limited(builtin_prompts() if file is None else read_prompts(file), limit)
    if most > len(found):
        raise BenchError(f"--batch {most} needs so many prompts, {len(found)} came; raise --limit")
    return found


def questions(limit: int, most: int = 1, file: str | None = None) -> list[str]:
    """The first turns of `prompts_of`."""
    return [prompt.turns[0] for prompt in prompts_of(limit, most, file)]


def asked_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Each text as a conversation, by the chat template. Raises ChatPromptError."""
    return [chat_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]


def settings_of(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """The arguments as a record has them."""
    kept = {key: value for key, value in vars(args).items() if key not in ("out", "note")}
    return {key: str(value) if isinstance(value, Path) else value for key, value in (kept | more).items()}


def ratio(tops: Sequence[float], bottoms: Sequence[float]) -> tuple[float, list[float | None]]:
    """Sum over sum, and its 95 % bootstrap interval over the pairs; of fewer than LEAST_GROUPS, whose spread says
    little, two nulls."""
    interval = ratio_interval(tops, bottoms, least_units=LEAST_GROUPS)
    return sum(tops) / sum(bottoms), [None, None] if interval is None else list(interval)


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
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_memory_bytes() or 0


def end_with_parent() -> None:
    """This process ends when the one that started it does, however that was: it would go on for minutes, unheard."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by another process"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def processes(count: int) -> ProcessPoolExecutor:
    """So many processes at a time, a new one for each call: its memory ends with it, and its peak is its own."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, mp_context=spawn, initializer=end_with_parent, max_tasks_per_child=1)


def in_process_of_its_own(call: Callable[..., Result], *arguments: Any) -> Result:
    """What `call` returns, from a process whose memory ends with it."""
    with processes(1) as one:
        return one.submit(call, *arguments).result()


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


def exported(
    head: DraftCheckpoint | None, to: str, out: Path, target: Mapping[str, Any], chain: DraftShape, row: str,
    absent: dict[str, str],
) -> str | None:  # fmt: skip
    """`toolkit export` of an EAGLE-3 head into a new folder. None where there is none, or it cannot be exported:
    `absent` then says why it has no `row`. target: its name and revision."""
    if head is None or head.kind != "eagle3":
        kind = "no --draft was given" if head is None else f"it takes a head of kind eagle3; --draft has {head.kind}"
        absent[row] = kind
        return None
    facts = target_facts(target["target"], target["revision"])
    try:
        export_head(head, to, out, facts, Shape(*map(int, chain.as_text().split(","))))
    except Exception as error:
        if not is_for_users(error):
            raise
        absent[row] = str(error)
        return None
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
