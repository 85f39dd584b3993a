"""`toolkit bench acceptance`: plain and speculative decoding side by side with one draft head."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.commands.launch import set_threads
from toolkit.commands.model_arguments import add_engine_arguments, engine_config, errors_with_flags, flag_of
from toolkit.commands.pipeline import ACCEPTANCE, ROUNDS, Run, of_temperature
from toolkit.commands.recipe_arguments import ArgumentsError, add_recipe_arguments, run_of, run_one_stage
from toolkit.recipe import BenchSettings
from toolkit.recipe_yaml import build

if TYPE_CHECKING:
    from toolkit.bench.prompts import Prompt
    from toolkit.infer.drafters.choose_drafter import Draft
    from toolkit.infer.request.draft_tree import DraftShape
    from toolkit.targets.target import Target

HELP = "measure accept_length and speed of a draft head against plain decoding"
# Options beside --draft: of the engine, with a counterpart among the recipe's bench settings, and others.
ENGINE = (
    "draft", "token_map", "target", "dtype", "verify", "quantization", "draft_quantization", "torch_compile"
)  # fmt: skip
SETTINGS = ("prompts", "limit", "shapes", "max_tokens", "temperature", "warmup")
OWN = ("seed", "batch", "no_check", "out")
VERIFY_HELP = (
    "how drafts are accepted at a temperature above 0 (default: target; the meaning of each: `toolkit serve --help`); "
    "tokens of others than target are not compared with those of plain decoding"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    acceptance = kinds.add_parser(
        "acceptance",
        help="tokens per verify step, speed, and equality of the tokens",
        description="The stage `measure` of a recipe's run folder, which also writes ckpt/measured.json (the shape "
        "that serve and chat start with) and goes on where it was cut off; or, with --draft, any head, into a record "
        "of its own: then the draft directory is left as it is.",
    )
    defaults = BenchSettings()
    add_recipe_arguments(acceptance)
    acceptance.add_argument("--force", action="store_true", help="measure again, even when the stage is up to date")
    group = acceptance.add_argument_group("any head instead of the recipe's (the options below need --draft)")
    add_engine_arguments(group, ENGINE, verify=VERIFY_HELP)
    group.add_argument(
        "--prompts",
        nargs="+",
        metavar="FILE",
        help="prompts in MT-bench's field style, each of several files a task (default: the 40 built-in ones)",
    )
    group.add_argument("--limit", type=int, metavar="N", help="so many prompts, evenly over the tasks")
    group.add_argument(
        "--shape",
        "--shapes",
        dest="shapes",
        nargs="+",
        action="extend",
        metavar="S,K,N",
        help="num_steps,top_k,num_draft_tokens; several, or the option several times, are measured side by side "
        f"(default: {' '.join(defaults.shapes)})",
    )
    group.add_argument("--max-tokens", type=int, help=f"tokens of an answer at most (default: {defaults.max_tokens})")
    group.add_argument("--temperature", type=float, help="default: 0, greedy")
    group.add_argument("--seed", type=int, help="default: 0")
    group.add_argument("--batch", type=int, help="prompts decoded at once (default: 1)")
    group.add_argument(
        "--warmup", type=int, help=f"prompts decoded before the clock starts (default: {defaults.warmup})"
    )
    group.add_argument(
        "--no-check", action="store_true", default=None, help="do not compare the tokens with plain decoding's"
    )
    group.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="record to write, and a page beside it (default: benchmarks/results/acceptance-<hardware>.json)",
    )


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table, writes the record and a page beside it."""
    if "draft" in args:
        if args.recipe or args.overrides or args.force:
            given = "--recipe" if args.recipe else args.overrides[0] if args.overrides else "--force"
            raise ArgumentsError(f"{given} and --draft are both given; measure a recipe's run folder or any head")
        return _measure_any(args)
    stray = next((flag_of(name) for name in ENGINE if name in args), None)
    stray = stray or next((flag_of(name) for name in OWN if getattr(args, name) is not None), None)
    setting = next((name for name in SETTINGS if getattr(args, name) is not None), None)
    if setting is not None:
        flag = "--shape" if setting == "shapes" else flag_of(setting)
        raise ArgumentsError(f"{flag} needs --draft; override bench.{setting}=... instead")
    if stray is not None:
        raise ArgumentsError(f"{stray} needs --draft; name the head: --draft runs/NAME/ckpt")
    job = run_of(args)
    set_threads()
    run_one_stage(job, "measure", args.force)
    return 0


def _measure_any(args: argparse.Namespace) -> int:
    given = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    wanted = build(BenchSettings, given, "bench")
    set_threads()
    from toolkit.bench.table import print_acceptance
    from toolkit.infer.load.load_engine import device_of, load_models

    shapes = prompts_and_shapes(wanted)[1]  # a mistake in these is found before the target is loaded
    with errors_with_flags():
        config = engine_config(args, verify="target")
        device = device_of(config)
        config.check(device.type)
        target, draft = load_models(config, device, shapes, config.verify)
    assert draft is not None, "--draft was given"
    record = _measure(
        target,
        draft,
        wanted,
        seed=args.seed or 0,
        batch=1 if args.batch is None else args.batch,
        check_tokens=not args.no_check,
        verify=config.verify,
        token_map=None if config.token_map is None else Path(config.token_map),
        torch_compile=config.torch_compile,
    )
    print_acceptance(record)
    for path in _write(record, args.draft, args.out):
        print(path)
    return 0


def measure_run(job: Run) -> str:
    """The measure stage of a run: bench/acceptance.json and ckpt/measured.json, and a record of each further
    temperature. Returns a headline."""
    from toolkit.bench.acceptance import measured_summary
    from toolkit.bench.records import write_record
    from toolkit.bench.rows import best_row
    from toolkit.bench.table import length_text, print_acceptance, shape_name
    from toolkit.checkpoint.draft_dir import load_draft
    from toolkit.infer.load.load_draft import pack
    from toolkit.weights import write_json

    job.release_target()
    ckpt, target = job.folder / "ckpt", job.load_target("serving")
    draft = load_draft(ckpt, dtype=target.dtype, device=str(target.device))
    pack(target, draft)
    record = _measure(target, draft, job.recipe.bench, seed=job.recipe.seed, keep=job.folder / ROUNDS)
    write_json(ckpt / "measured.json", measured_summary(record))
    write_record(job.folder / ACCEPTANCE, record)
    print_acceptance(record)
    for earlier in (job.folder / ACCEPTANCE).parent.glob("acceptance-T*.json"):
        earlier.unlink()  # perhaps of another head, and the report shows what lies there
    for temperature in job.recipe.bench.further_temperatures:
        wanted = replace(job.recipe.bench, temperature=temperature, further_temperatures=())
        rounds, out = (job.folder / of_temperature(name, temperature) for name in (ROUNDS, ACCEPTANCE))
        other = _measure(target, draft, wanted, seed=job.recipe.seed, keep=rounds)
        write_record(out, other)
        print_acceptance(other)
    best = best_row(record)
    speed = "" if best["speedup"] is None else f", {best['speedup']:.2f}x plain decoding"
    return (
        f"{shape_name(best)}: accept_length {length_text(best)}{speed} (temperature {best['temperature']:g}, "
        f"{best['verify_steps']} verify steps)"
    )


def _measure(target: Target, draft: Draft, wanted: BenchSettings, **settings: Any) -> dict[str, Any]:
    from toolkit.bench.acceptance import measure_acceptance
    from toolkit.commands.progress_bar import progress_bar

    prompts, shapes = prompts_and_shapes(wanted)
    with progress_bar("measure", "answer") as show:
        return measure_acceptance(
            target,
            draft,
            prompts,
            shapes,
            prompts_from="built-in" if wanted.prompts is None else ", ".join(Path(one).name for one in wanted.prompts),
            limit=wanted.limit,
            max_tokens=wanted.max_tokens,
            temperature=wanted.temperature,
            warmup=wanted.warmup,
            on_progress=show,
            **settings,
        )


def prompts_and_shapes(wanted: BenchSettings) -> tuple[list[Prompt], list[DraftShape]]:
    """What a measurement is made on. Raises `PromptsError`, and `DraftShapeError` for a shape that cannot be."""
    from toolkit.bench.prompts import builtin_prompts, read_prompt_files
    from toolkit.infer.request.draft_tree import DraftShape

    shapes = [DraftShape.parse(one) for one in wanted.shapes]
    return builtin_prompts() if wanted.prompts is None else read_prompt_files(wanted.prompts), shapes


def _write(record: dict[str, Any], draft: str, out: Path | None) -> tuple[Path, Path]:
    """The record and its page; by default benchmarks/results/acceptance-<hardware>."""
    from toolkit.bench.records import machine_name, write_record
    from toolkit.bench.report import report_record
    from toolkit.bench.report_figures import draw_all
    from toolkit.bench.report_page import page
    from toolkit.bench.run_folder import RunData
    from toolkit.weights import atomic_write

    out = out or Path("benchmarks") / "results" / f"acceptance-{machine_name(record['hardware'])}.json"
    write_record(out, record)
    # n-gram lookup has no run folder: its page is named after it, not after the folder somebody stood in.
    run = Path(draft) if draft == "ngram" else Path(draft).resolve().parent
    data = RunData(run, acceptance=record)
    with atomic_write(out.with_suffix(".html")) as temporary:
        temporary.write_text(page(report_record(data), data, draw_all(data)), encoding="utf-8")
    return out, out.with_suffix(".html")
