"""`toolkit plan`: a deployment on SGLang or vLLM, with launch lines and a predicted throughput."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toolkit.commands.recipe_arguments import ArgumentsError, numbers_by_count
from toolkit.errors import PlanError
from toolkit.head_kinds import HEAD_KINDS
from toolkit.plan.step_time import FIGURES, Costs, Layout, Rank, gpu_named

if TYPE_CHECKING:  # the parser is built without torch
    from toolkit.plan.model_size import DraftCost, ModelSize

HELP = "plan a deployment on SGLang or vLLM: layout, draft length by batch, launch lines, predicted throughput"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="the model to serve: hub id (org/name@revision), directory or config.json",
    )
    parser.add_argument(
        "--published", action="store_true", help="list the published figures that the model is compared with"
    )
    parser.add_argument(
        "--train",
        metavar="RECIPE",
        help="instead: the memory that the training of this recipe needs on --gpus, for TARGET (default: the recipe's)",
    )
    work = parser.add_argument_group("requests")
    work.add_argument("--input", type=int, metavar="TOKENS", help="tokens of a prompt")
    work.add_argument("--output", type=int, metavar="TOKENS", help="tokens of an answer")
    work.add_argument("--concurrency", type=int, metavar="N", help="requests that run at once")
    work.add_argument("--rate", type=float, metavar="R", help="requests a second, in place of --concurrency")
    work.add_argument(
        "--max-tpot-ms", type=float, metavar="MS", help="the most milliseconds that a token of an answer may take"
    )
    _gpu_arguments(parser)
    head = parser.add_argument_group("head")
    head.add_argument(
        "--draft",
        metavar="DIR",
        help="a head's directory or hub id; its measured accept_lengths of chains are used, if it has any",
    )
    head.add_argument(
        "--head",
        choices=tuple(name for name, kind in HEAD_KINDS.items() if not kind.block),
        help="without --draft: assume a head of this kind and of usual size; mtp: the target's own layers",
    )
    head.add_argument(
        "--accept-lengths", metavar="N:A,...", help="accept_length A of a chain of N drafted tokens, e.g. 1:1.7,2:2.18"
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--engine", default="sglang", choices=("sglang", "vllm"), help="the engine of the deployment (default: sglang)"
    )
    engine.add_argument(
        "--layout",
        metavar="L",
        help="the layout of the engines: tp8 (tensor parallel, 8 GPUs), dp16 (data parallel attention, 16 GPUs) "
        "(default: all are tried)",
    )
    engine.add_argument(
        "--step-ms",
        metavar="B:MS,...",
        help="measured milliseconds MS of a plain step with B requests a rank, under --layout, e.g. 1:7.1,32:9",
    )
    engine.add_argument(
        "--weight-bits", type=float, metavar="N", help="bits of a weight of the target's layers (default: its config's)"
    )
    parser.epilog = (
        "Only chains are planned, and engines that both read prompts and decode. The model is in "
        "toolkit/plan/step_time.py, its queue in deployment.py."
    )


def _gpu_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("GPUs")
    group.add_argument(
        "--gpu", default="H100", metavar="NAME", help="A100, H20, H100, H200, B200, L40S, or any other (default: H100)"
    )
    group.add_argument("--gpus", type=int, default=8, metavar="N", help="GPUs in all (default: 8)")
    for name, (_, _, unit) in FIGURES.items():
        group.add_argument(f"--gpu-{name}", type=float, metavar="X", help=f"{unit} (default: the table's)")


def run(args: argparse.Namespace) -> int:
    """Prints the plan with its launch lines, or the published cases. Raises `ArgumentsError`, `PlanError`."""
    if args.published:
        from toolkit.plan.published import published_text  # loads torch

        print(published_text())
        return 0
    if args.train is not None:
        print(_training(args))
        return 0
    if args.target is None or args.input is None or args.output is None:
        raise ArgumentsError("a TARGET, --input and --output are needed (and --concurrency or --rate)")
    if args.gpus < 1:
        raise ArgumentsError("--gpus needs at least 1")
    if args.draft is not None and args.head is not None:
        raise ArgumentsError("--draft and --head are both given; leave --head out, the directory states its kind")
    only = None if args.layout is None else _layout(args.layout)
    if args.step_ms is not None and only is None:
        raise ArgumentsError("--step-ms is measured with one layout; name it with --layout, such as tp8")
    from toolkit.plan.deployment import Planner, Workload, plan_text
    from toolkit.plan.launch import EXPORTED, launch_lines
    from toolkit.plan.model_size import target_size

    gpu = gpu_named(args.gpu, {name: getattr(args, f"gpu_{name}") for name in FIGURES})
    limit = None if args.max_tpot_ms is None else args.max_tpot_ms / 1000
    work = Workload(args.input, args.output, args.concurrency, args.rate, limit)
    size, config, source, revision = target_size(args.target, args.weight_bits)
    draft, costs = _draft(args, size, config, source, revision), Costs()
    if args.step_ms is not None and only is not None:
        steps = {requests: ms / 1000 for requests, ms in numbers_by_count("--step-ms", args.step_ms).items()}
        costs = Rank(gpu, Layout(*only)).calibrated(size, steps, work.input + work.output / 2)
    planner = Planner(size, draft, gpu, work, costs, only)
    best = planner.best(args.gpus)
    table = planner.table(best)
    parts = [plan_text(planner, best, table)]
    if args.draft is not None and best.batch.drafts:
        words = ["toolkit", "export", "--draft", args.draft, "--to", args.engine, "--out", EXPORTED, "--target", source]
        parts.append(f"the head is exported first: {shlex.join(words)}")
    model = [source, *([] if revision is None else ["--revision", revision])]
    print("\n\n".join([*parts, "\n".join(launch_lines(args.engine, model, best, draft, table))]))
    return 0


def _training(args: argparse.Namespace) -> str:
    """The memory of a training in bfloat16, by part. Raises `PlanError`, `RecipeError`, `TargetError`."""
    from toolkit.plan.model_size import weight_bits_of
    from toolkit.recipe import load_recipe
    from toolkit.targets.facts import target_facts
    from toolkit.train.needed_memory import TrainingMemory

    recipe = load_recipe(args.train)
    gpu = gpu_named(args.gpu, {name: getattr(args, f"gpu_{name}") for name in FIGURES})
    facts = target_facts(args.target or recipe.target.model)
    bits = weight_bits_of(facts.quantization, facts.name, args.weight_bits)
    found = TrainingMemory(facts, 2, recipe.token_map.size, gpu.memory, bits=bits)
    return found.told(replace(recipe.train, precision="bf16"), args.gpus)


def _draft(
    args: argparse.Namespace, size: ModelSize, config: Any, source: str, revision: str | None
) -> DraftCost | None:
    """Return the head of the plan, if any. source, revision: the target's, on which a head's layers may depend."""
    from toolkit.checkpoint.open_head import open_head
    from toolkit.plan.launch import EXPORTED, check_servable
    from toolkit.plan.model_size import DraftCost, check_accept_lengths, head_size, measured_accept_lengths, usual_draft

    lengths = None
    if args.accept_lengths is not None:
        lengths = check_accept_lengths(numbers_by_count("--accept-lengths", args.accept_lengths))
    if args.draft is not None:
        found = open_head(args.draft, target=source, revision=revision)
        check_servable(args.engine, found)
        for what, theirs in (("hidden_size", size.hidden_size), ("vocab_size", config.vocab_size)):
            own = getattr(found.head.config, what)
            if own != theirs:
                raise PlanError(
                    f"the head in {args.draft} has {what} {own}, {size.name} {theirs}: it belongs to another target"
                )
        stated = (lengths, "as stated") if lengths else measured_accept_lengths(found.meta.get("measured"))
        return DraftCost(found.kind, head_size(found.head, size), *stated, path=EXPORTED, config=found.head.config)
    if lengths is not None:
        return usual_draft(args.head, config, size, lengths)
    if args.head is not None:
        raise PlanError(f"--head is {args.head}, but accept lengths are missing; give --accept-lengths 1:A,2:B")
    return None


def _layout(text: str) -> tuple[int, bool]:
    """tp8, dp16."""
    kind, number = text[:2].lower(), text[2:]
    if kind not in ("tp", "dp") or not number.isdigit() or int(number) < 1:
        raise ArgumentsError(f"--layout {text}: tpN (tensor parallel) or dpN (data-parallel attention) is needed")
    return int(number), kind == "dp"
