"""`toolkit build-token-map` beside its tokenizer alone: the same text, the same cores, on a CPU.

    python benchmarks/token_map.py --text FILE [--bytes 1e9] [--num-proc 2]

FILE is repeated until there are so many bytes. One process after the other runs:

tokenizer        `tokenizers` encodes the documents, which are in memory, on as many threads as workers count below;
                 nothing is counted. Twice, before and after the others
toolkit          the command, from its start to its end
toolkit-again    the command again: all is counted, so this is what starting it and writing its files takes
toolkit-resumed  the command is killed (SIGKILL to all its processes) in the middle and typed again; the time is the
                 second one's. Its counts must be equal to those of `toolkit`
toolkit-weighted the first half of FILE with a weight of 3 and the second half. Its counts must be equal to those of a
                 file that holds the first half three times and the second once, which is not timed

Exits with 1 when counts differ. Writes benchmarks/results/token-map-<hardware>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from results_folder import leave
from rich.console import Console
from rich.table import Table

from toolkit.bench.records import command_line, make_record
from toolkit.targets.demo import DEMO_NAME
from toolkit.tokenmap.corpus import may_cut, shards_of
from toolkit.tokenmap.counts import load_counts
from toolkit.tokenmap.documents import documents_of
from toolkit.weights import WeightsError, read_json

# Threads of the tokenizer take a document each: enough of them in a batch that no thread waits.
BATCH = 256
DEFINITIONS = {
    "seconds": "of the whole command, imports included; of the tokenizer alone: of encoding",
    "share": "the tokenizer's seconds (the mean of both) over this row's",
    "share_of_counting": "the same, without the seconds that the command takes when all is counted",
    "processor_seconds": "of all processes and threads: what else runs on the machine changes it little",
    "share_of_processor": "as share_of_counting, by processor seconds",
    "kept_shards": "shards that were counted before the kill",
    "equal": "whether the counts are those of one pass that was not killed",
}


def own_rate(path: Path, tokenizer: str) -> dict[str, Any]:
    """Seconds and tokens of encoding a file's documents. Runs in a process of its own, which has the threads."""
    from toolkit.targets.load import load_tokenizer

    encoder = load_tokenizer(tokenizer).backend_tokenizer
    texts = [str(one.content) for shard in shards_of([path]) for piece in shard for one in documents_of(piece, ())]
    seconds, processor, tokens = 0.0, 0.0, 0
    for start in range(0, len(texts), BATCH):
        began, before = time.perf_counter(), time.process_time()
        encoded = encoder.encode_batch_fast(texts[start : start + BATCH], add_special_tokens=False)
        seconds += time.perf_counter() - began
        processor += time.process_time() - before
        tokens += sum(map(len, encoded))
    return {"seconds": seconds, "processor_seconds": processor, "tokens": tokens}


def tokenizer_row(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The row of the tokenizer alone."""
    command = [sys.executable, __file__, "--own-rate", "--text", str(path), "--tokenizer", args.tokenizer]
    threads = {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(args.num_proc)}
    done = subprocess.run(command, env={**os.environ, **threads}, check=True, capture_output=True, text=True)
    return {"variant": "tokenizer", **json.loads(done.stdout.splitlines()[-1])}


def command_of(corpora: Sequence[str], out: Path, args: argparse.Namespace) -> list[str]:
    """The command line of a count."""
    given = ["--corpus", *corpora, "--tokenizer", args.tokenizer, "--num-proc", str(args.num_proc)]
    size = ["--size", str(args.size), "--out", str(out)]
    return [sys.executable, "-m", "toolkit", "build-token-map", *given, *size]


def timed(corpora: Sequence[str], out: Path, args: argparse.Namespace, variant: str) -> dict[str, Any]:
    """The row of one call of the command."""
    began, before = time.perf_counter(), processor_seconds()
    subprocess.run(command_of(corpora, out, args), check=True, stdout=subprocess.DEVNULL)
    spent = {"seconds": time.perf_counter() - began, "processor_seconds": processor_seconds() - before}
    report = read_json(out / "coverage.json")
    return {"variant": variant, **spent, "tokens": report["tokens"], "coverage": report["coverage"]}


def processor_seconds() -> float:
    """Of all processes that were started here and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def killed(path: Path, out: Path, args: argparse.Namespace) -> int:
    """Start the command and kill it in its middle. Returns how many shards are counted, as its file says."""
    wanted = max(1, len(shards_of([path])) // 2)
    process = subprocess.Popen(command_of([str(path)], out, args), stdout=subprocess.DEVNULL, start_new_session=True)
    finished = 0
    while finished < wanted and process.poll() is None:
        time.sleep(0.01)
        finished = finished_shards(out)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return finished_shards(out)


def finished_shards(out: Path) -> int:
    """How many shards the file of an unfinished count names."""
    files = list((out / "counting").glob("*.safetensors"))
    try:
        return len(load_counts(files[0]).about["finished"]) if files else 0
    except WeightsError:
        return 0


def same_counts(a: Path, b: Path) -> bool:
    """Whether the weighted counts of two folders are equal."""
    return torch.equal(load_counts(a).total(), load_counts(b).total())


def generate(source: Path, wanted: int, path: Path) -> None:
    """Repeat a text until it has `wanted` bytes; the last line may be cut."""
    block = (source.read_text(encoding="utf-8").rstrip("\n") + "\n").encode()
    with path.open("wb") as file:
        for _ in range(wanted // len(block)):
            file.write(block)
        file.write(block[: wanted % len(block)].decode(errors="ignore").encode())


def halves(source: Path, folder: Path) -> tuple[Path, Path, Path]:
    """Write the halves of a text, cut where no tokenizer joins lines, and the repeated text that their weights mean."""
    lines = [f"{line}\n" for line in source.read_text(encoding="utf-8").strip().split("\n")]
    middle = next(at for at in range(len(lines) // 2, len(lines)) if may_cut(lines[at - 1], lines[at]))
    first, second = "".join(lines[:middle]), "".join(lines[middle:])
    paths = (folder / "first.txt", folder / "second.txt", folder / "repeated.txt")
    for path, text in zip(paths, (first, second, first * 3 + second), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All rows, in the order in which they ran."""
    path = folder / "corpus.txt"
    generate(args.text, args.bytes, path)
    one = [str(path)]
    rows = [tokenizer_row(path, args)]
    rows += [timed(one, folder / "whole", args, name) for name in ("toolkit", "toolkit-again")]
    kept = killed(path, folder / "killed", args)
    resumed = timed(one, folder / "killed", args, "toolkit-resumed")
    rows.append({**resumed, "kept_shards": kept, "equal": same_counts(folder / "whole", folder / "killed")})
    rows.append(tokenizer_row(path, args))
    own, own_processor = ((rows[0][name] + rows[-1][name]) / 2 for name in ("seconds", "processor_seconds"))
    counting, counting_processor = (rows[1][name] - rows[2][name] for name in ("seconds", "processor_seconds"))
    for row in rows:
        row |= {"bytes": path.stat().st_size, "shards": len(shards_of([path]))}
        if row["variant"] in ("tokenizer", "toolkit"):
            row |= {"tokens_per_s": row["tokens"] / row["seconds"], "share": own / row["seconds"]}
    rows[1] |= {"share_of_counting": own / counting, "share_of_processor": own_processor / counting_processor}
    first, second, repeated = halves(args.text, folder)
    weighted = timed([f"{first}:3", str(second)], folder / "weighted", args, "toolkit-weighted")
    timed([str(repeated)], folder / "repeated", args, "")
    rows.append({**weighted, "equal": same_counts(folder / "weighted", folder / "repeated")})
    return [
        {"corpus": args.text.name, "size": args.size, "head_seconds": None, "accept_length": None} | row for row in rows
    ]


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="counting tokens")
    columns = (
        "variant",
        "seconds",
        "tokens",
        "tokens_per_s",
        "share",
        "share_of_counting",
        "share_of_processor",
        "kept_shards",
        "equal",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        cells = (row.get(name) for name in columns)
        table.add_row(*("" if one is None else f"{one:.3g}" if isinstance(one, float) else str(one) for one in cells))
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--bytes", type=lambda text: int(float(text)), default=10**9)
    parser.add_argument("--tokenizer", default=DEMO_NAME)
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--folder", type=Path, help="for the text and the counts; default: a temporary one")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--own-rate", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.own_rate:
        print(json.dumps(own_rate(args.text, args.tokenizer)))
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = measure(args, Path(folder))
    show(rows)
    settings = {
        "bytes": args.bytes,
        "tokenizer": Path(args.tokenizer).name,
        "num_proc": args.num_proc,
        "size": args.size,
    }
    record = make_record("token_map", ["python", command_line()], settings, rows, definitions=DEFINITIONS)
    leave(record, "token-map", args.out)
    return 0 if all(row.get("equal", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
