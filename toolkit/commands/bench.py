"""`toolkit bench acceptance`: plain and speculative decoding side by side with one draft head."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.commands.launch import set_threads
from toolkit.commands.pipeline import ACCEPTANCE, Run, best_device
from toolkit.commands.recipe_arguments import ArgumentsError

if TYPE_CHECKING:
    from toolkit.bench.prompts import Prompt
    from toolkit.infer.draft_tree import DraftShape
    from toolkit.target.target import Target

HELP = "measure accept_length and speed of a draft head against plain decoding"
DEFAULT_SHAPES = ("4,1,5", "4,4,16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    acceptance = kinds.add_parser("acceptance", help="tokens per verify step, speed, and equality of the tokens")
    acceptance.add_argument("--draft", type=Path, required=True, metavar="DIR", help="draft directory (runs/NAME/ckpt)")
    acceptance.add_argument("--target", metavar="MODEL", help="another target than the one the draft directory names")
    acceptance.add_argument(
        "--prompts", type=Path, metavar="FILE", help="prompts in MT-bench's field style (default: the 40 built-in ones)"
    )
    acceptance.add_argument("--limit", type=int, metavar="N", help="so many prompts, evenly over the tasks")
    acceptance.add_argument(
        "--shapes", nargs="+", default=list(DEFAULT_SHAPES), metavar="S,K,N", help="num_steps,top_k,num_draft_tokens"
    )
    acceptance.add_argument("--max-tokens", type=int, default=96, help="tokens of an answer at most (default: 96)")
    acceptance.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    acceptance.add_argument("--seed", type=int, default=0)
    acceptance.add_argument("--batch", type=int, default=1, help="prompts decoded at once (default: 1)")
    acceptance.add_argument(
        "--warmup", type=int, default=1, help="prompts decoded before the clock starts (default: 1)"
    )
    acceptance.add_argument("--no-check", action="store_true", help="do not compare the tokens with plain decoding's")
    acceptance.add_argument(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="float32 makes the comparison exact"
    )
    acceptance.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="record to write, and a page beside it (default: benchmarks/results/acceptance-<hardware>.json)",
    )


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table, writes the record and a page beside it."""
    set_threads()
    from toolkit.bench.table import print_acceptance
    from toolkit.checkpoint.draft_dir import load_draft

    # The head first: it is small, so a broken directory is found before the target is loaded.
    stated = load_draft(args.draft).meta.get("target") or {}
    name, revision = (args.target, None) if args.target else (stated.get("name"), stated.get("revision"))
    if not name:
        raise ArgumentsError(f"{args.draft} does not say which target it was trained for; name it with --target")
    from toolkit.target.load import load_target

    target = load_target(name, revision=revision, dtype=args.dtype, device=best_device())
    record = _measure(
        target,
        args.draft,
        prompts=args.prompts,
        limit=args.limit,
        shapes=args.shapes,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        batch=args.batch,
        warmup=args.warmup,
        check_tokens=not args.no_check,
    )
    print_acceptance(record)
    for path in _write(record, args.draft, args.out):
        print(path)
    return 0


def measure_run(job: Run) -> str:
    """The measure stage of a run: bench/acceptance.json and ckpt/measured.json. Returns a headline."""
    from toolkit.bench.acceptance import measured_summary
    from toolkit.bench.records import write_record
    from toolkit.bench.rows import best_row
    from toolkit.bench.table import length_text, print_acceptance, shape_name
    from toolkit.weights import write_json

    wanted, ckpt = job.recipe.bench, job.folder / "ckpt"
    record = _measure(
        job.target,
        ckpt,
        prompts=None if wanted.prompts is None else Path(wanted.prompts),
        limit=wanted.limit,
        shapes=wanted.shapes,
        max_tokens=wanted.max_tokens,
        temperature=wanted.temperature,
        seed=job.recipe.seed,
        warmup=wanted.warmup,
    )
    write_json(ckpt / "measured.json", measured_summary(record))
    write_record(job.folder / ACCEPTANCE, record)
    print_acceptance(record)
    best = best_row(record)
    speed = "" if best["speedup"] is None else f", {best['speedup']:.2f}x plain decoding"
    return (
        f"{shape_name(best)}: accept_length {length_text(best)}{speed} (temperature {best['temperature']:g}, "
        f"{best['verify_steps']} verify steps)"
    )


def _measure(
    target: Target, draft_dir: Path, *, prompts: Path | None, shapes: Sequence[str], **settings: Any
) -> dict[str, Any]:
    from toolkit.bench.acceptance import measure_acceptance
    from toolkit.checkpoint.draft_dir import load_draft
    from toolkit.commands.progress_bar import progress_bar

    asked, parsed = prompts_and_shapes(prompts, shapes)
    draft = load_draft(draft_dir, dtype=target.dtype, device=str(target.device))
    with progress_bar("measure", "answer") as show:
        return measure_acceptance(
            target,
            draft,
            asked,
            parsed,
            prompts_from="built-in" if prompts is None else prompts.name,
            on_progress=show,
            **settings,
        )


def prompts_and_shapes(prompts: Path | None, shapes: Sequence[str]) -> tuple[list[Prompt], list[DraftShape]]:
    """What a measurement is made on. Raises `PromptsError`, and `ArgumentsError` for a shape that is none."""
    from toolkit.bench.prompts import builtin_prompts, read_prompts
    from toolkit.infer.draft_tree import DraftShape

    try:
        parsed = [DraftShape.parse(one) for one in shapes]
    except ValueError as error:
        raise ArgumentsError(str(error)) from error
    return builtin_prompts() if prompts is None else read_prompts(prompts), parsed


def _write(record: dict[str, Any], draft_dir: Path, out: Path | None) -> tuple[Path, Path]:
    """The record and its page; by default benchmarks/results/acceptance-<hardware>."""
    from toolkit.bench.records import write_record
    from toolkit.bench.report import report_record
    from toolkit.bench.report_figures import draw_all
    from toolkit.bench.report_page import page
    from toolkit.bench.run_folder import RunData
    from toolkit.weights import atomic_write

    hardware = record["hardware"]
    machine = re.sub(r"[^a-z0-9]+", "-", (hardware["gpus"] or [hardware["cpu"]])[0].lower()).strip("-")
    out = out or Path("benchmarks") / "results" / f"acceptance-{machine}.json"
    write_record(out, record)
    data = RunData(draft_dir.resolve().parent, acceptance=record)
    with atomic_write(out.with_suffix(".html")) as temporary:
        temporary.write_text(page(report_record(data), data, draw_all(data)), encoding="utf-8")
    return out, out.with_suffix(".html")
