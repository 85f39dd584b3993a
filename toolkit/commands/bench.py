"""`toolkit bench acceptance`: plain and speculative decoding side by side with one draft head; `toolkit bench compare`:
two of its records side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.commands.model_arguments import OPTIONS, add_engine_arguments, engine_config, errors_with_flags, flag_of
from toolkit.commands.recipe_arguments import ArgumentsError, add_recipe_arguments, run_of, run_one_stage
from toolkit.pipeline.launch import set_threads
from toolkit.recipe import BenchSettings
from toolkit.recipe_yaml import build

# Options beside --draft: of the engine, with a counterpart among the recipe's bench settings, and others.
ENGINE = (
    "draft", "token_map", "draft_confidence", "target", "dtype", "verify", "quantization",
    "draft_quantization", "deterministic", "torch_compile", "chat_template",
)  # fmt: skip
SETTINGS = ("prompts", "limit", "shapes", "max_tokens", "temperature", "warmup")
OWN = ("seed", "no_check", "force_accept_length", "out")
DRAFT_HELP = (
    "the head to measure: a draft directory or another project's head; ngram (lookup) or native (the target's own MTP "
    "module), with --target"
)
TARGET_HELP = "target model (default: the one that --draft names)"
VERIFY_HELP = (
    "how drafts are accepted at a temperature above 0 (default: target; the meaning of each: `toolkit serve --help`); "
    "tokens of others than target are not compared with those of plain decoding"
)


def add_arguments(parser: argparse.ArgumentParser) -> object:
    """Return the subcommands."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    _add_acceptance(kinds)
    compare = kinds.add_parser(
        "compare",
        allow_abbrev=False,
        help="two records side by side, with intervals of the differences",
        description="Two records of `toolkit bench acceptance` side by side, paired by prompt: accept_length and its "
        "difference, speed over plain decoding and its ratio, each with a 95 % interval. Records of other prompts, "
        "another target or other settings of the answers are refused. Speeds are compared on one machine only.",
    )
    compare.add_argument("first", type=Path, metavar="A.json", help="a record")
    compare.add_argument("second", type=Path, metavar="B.json", help="the record to compare with it")
    return kinds


def _add_acceptance(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    acceptance = kinds.add_parser(
        "acceptance",
        allow_abbrev=False,
        help="tokens per verify step, speed, and equality of the tokens",
        description="Without --draft: the stage `measure` of a recipe's run folder. It resumes after an interruption "
        "and writes ckpt/measured.json, from which serve and chat take their default shape. With --draft: any head. "
        "The result is a separate record, and the draft directory is not changed.",
    )
    defaults = BenchSettings()
    add_recipe_arguments(acceptance)
    acceptance.add_argument("--force", action="store_true", help="measure again, even when the stage is up to date")
    group = acceptance.add_argument_group("any head instead of the recipe's (the options below need --draft)")
    add_engine_arguments(group, ENGINE, verify=VERIFY_HELP, draft=DRAFT_HELP, target=TARGET_HELP)
    group.add_argument(
        "--prompts",
        nargs="+",
        metavar="FILE",
        help="prompts in MT-bench's form or conversations (messages), or mt-bench, humaneval, gsm8k, speed-bench (from "
        "Hugging Face's hub), each of several a task (default: the 40 built-in ones)",
    )
    group.add_argument("--limit", type=int, metavar="N", help="measure N prompts, evenly over the tasks")
    group.add_argument(
        "--shape",
        "--shapes",
        dest="shapes",
        nargs="+",
        action="extend",
        metavar="S,K,N",
        help="num_steps,top_k,num_draft_tokens, or num_draft_tokens alone, or adaptive (at most the largest of the "
        "others, as serve drafts); several, or the option several times, are measured side by side "
        "(default: what `toolkit search` found, where its search.json in the draft directory holds here, else "
        f"{' '.join(defaults.shapes)})",
    )
    group.add_argument("--max-tokens", type=int, help=f"tokens of an answer at most (default: {defaults.max_tokens})")
    group.add_argument("--temperature", type=float, help="temperature of the answers (default: 0, greedy)")
    group.add_argument("--seed", type=int, help="seed of the answers (default: 0)")
    group.add_argument(
        "--batch",
        "--max-running-requests",
        dest="max_running_requests",
        type=int,
        default=argparse.SUPPRESS,
        help="prompts decoded at once (default: 1)",
    )
    group.add_argument(
        "--warmup", type=int, help=f"prompts decoded before the clock starts (default: {defaults.warmup})"
    )
    group.add_argument(
        "--no-check", action="store_true", default=None, help="do not compare the tokens with plain decoding's"
    )
    group.add_argument(
        "--force-accept-length",
        metavar="X",
        help="for benchmarks of hardware: accept drafts by chance, so that a verify step commits X tokens in the mean, "
        "the bonus token included (2.6), or by conditional rates of each depth (0.8,0.6). The tokens mean nothing and "
        "are not compared; needs --shape without adaptive",
    )
    group.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="record to write, and a page beside it (default: runs/acceptance-<hardware>.json)",
    )


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table, writes the record and a page beside it; or compares two records."""
    if args.kind == "compare":
        from toolkit.bench.compare import compare_records

        compare_records(args.first, args.second)
        return 0
    if "draft" in args:
        if args.recipe or args.overrides or args.force:
            given = "--recipe" if args.recipe else args.overrides[0] if args.overrides else "--force"
            raise ArgumentsError(f"{given} and --draft are both given; measure a recipe's run folder or any head")
        _measure_any(args)
        return 0
    stray = next((name for name in (*SETTINGS, *OPTIONS, *OWN) if getattr(args, name, None) is not None), None)
    if stray is not None:
        flag = "--shape" if stray == "shapes" else flag_of(stray)
        instead = f"override bench.{stray}=... instead" if stray in SETTINGS else "such as --draft runs/NAME/ckpt"
        raise ArgumentsError(f"{flag} needs --draft; {instead}")
    job = run_of(args)
    set_threads()
    run_one_stage(job, "measure", args.force)
    return 0


def _measure_any(args: argparse.Namespace) -> None:
    given = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    wanted = build(BenchSettings, given, "bench.")
    set_threads()  # before torch loads
    from toolkit.pipeline.measure import measure_head

    with errors_with_flags():
        paths = measure_head(
            engine_config(args, verify="target", max_running_requests=1),
            wanted,
            seed=args.seed or 0,
            check_tokens=not args.no_check,
            force_accept_length=args.force_accept_length,
            searched=args.shapes is None,
            out=args.out,
        )
    for path in paths:
        print(path)
