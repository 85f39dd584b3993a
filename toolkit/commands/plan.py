"""`toolkit plan`: a deployment on SGLang or vLLM, with launch lines and a predicted throughput."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.commands.recipe_arguments import ArgumentsError

if TYPE_CHECKING:
    from toolkit.plan.deployment import Planner
    from toolkit.plan.draft_cost import Draft
    from toolkit.plan.model_size import ModelSize

HELP = "plan a deployment on SGLang or vLLM: layout, draft length by batch, launch lines, predicted throughput"
FIGURES = {
    "memory": "GB",
    "bandwidth": "GB/s",
    "tflops": "TFLOPS of bf16, dense",
    "fp8-tflops": "TFLOPS of fp8, dense",
    "link": "GB/s to a GPU of the same node, one way",
    "network": "GB/s to other nodes, a GPU",
}
EXPORTED = "OUT"  # where the printed export line puts the head, and launch lines look for it
GPU_FIELDS = {"tflops": "flops", "fp8-tflops": "flops_8"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", nargs="?", metavar="TARGET", help="hub id (org/name@revision), directory, config.json"
    )
    parser.add_argument("--published", action="store_true", help="list the published figures the model is held against")
    work = parser.add_argument_group("requests")
    work.add_argument("--input", type=int, metavar="TOKENS", help="tokens of a prompt")
    work.add_argument("--output", type=int, metavar="TOKENS", help="tokens of an answer")
    work.add_argument("--concurrency", type=int, metavar="N", help="requests in flight")
    work.add_argument("--rate", type=float, metavar="R", help="requests a second, in place of --concurrency")
    work.add_argument("--max-tpot-ms", type=float, metavar="MS", help="longest time a token while an answer is written")
    _gpu_arguments(parser)
    head = parser.add_argument_group("head")
    head.add_argument("--draft", metavar="DIR", help="a head's directory or hub id; its measured chains, if it has any")
    head.add_argument(
        "--head", choices=("eagle3", "mtp"), help="without --draft: a usual EAGLE-3 head, or the target's MTP layers"
    )
    head.add_argument("--accept-lengths", metavar="N:A,...", help="accept_length by tokens drafted: 1:1.7,2:2.18")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--engine", default="sglang", choices=("sglang", "vllm"), help="default: sglang")
    engine.add_argument("--layout", metavar="L", help="tp8 or dp16: consider only such decoding engines")
    engine.add_argument(
        "--step-ms", metavar="B:MS,...", help="measured plain decode steps of --layout, by requests a rank: 1:7.1,32:9"
    )
    engine.add_argument("--weight-bits", type=float, metavar="N", help="of the layers' weights (default: its config's)")
    engine.add_argument("--no-overlap", action="store_true", help="the engine schedules and computes in turn")
    parser.epilog = "Only chains are planned. The model is in toolkit/plan/step_time.py, its queue in deployment.py."


def _gpu_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("GPUs")
    group.add_argument("--gpu", default="H100", metavar="NAME", help="A100, H20, H100, H200, B200, L40S, or any other")
    group.add_argument("--gpus", type=int, default=8, metavar="N", help="default: 8")
    group.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default: 8")
    for name, unit in FIGURES.items():
        group.add_argument(f"--gpu-{name}", type=float, metavar="X", help=f"{unit} (default: the table's)")


def run(args: argparse.Namespace) -> int:
    """Prints the plan, or the published cases."""
    from toolkit.plan.launch import launch_lines
    from toolkit.plan.plan_text import draft_table, plan_text, published_text

    if args.published:
        _check_alone(args)
        print(published_text())
        return 0
    planner, model = _planner(args)
    best, other = planner.best(args.gpus)
    table = draft_table(planner, best)
    print(plan_text(planner, best, other, table))
    if args.draft is not None and best.batch.drafts:
        words = ["toolkit", "export", "--draft", args.draft, "--to", args.engine, "--out", EXPORTED]
        target = str(Path(args.target).parent) if args.target.endswith(".json") else args.target
        line = shlex.join([*words, "--target", target])
        print(f"\nthe head is exported first: {line}")
    print("\n" + "\n".join(launch_lines(args.engine, model, best, planner.draft, table)))
    return 0


def _check_alone(args: argparse.Namespace) -> None:
    """--published lists the same figures whatever else is typed."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args(["--published"]))
    typed = [name for name, default in defaults.items() if getattr(args, name) != default]
    if typed:
        names = ", ".join("TARGET" if name == "target" else f"--{name.replace('_', '-')}" for name in typed)
        raise ArgumentsError(f"--published and {names} came together; --published stands alone")


def _planner(args: argparse.Namespace) -> tuple[Planner, list[str]]:
    """Everything that is planned with, and the target's words on a launch line."""
    from toolkit.plan.calibrate import calibrated
    from toolkit.plan.deployment import Planner, Workload
    from toolkit.plan.gpus import gpu_named
    from toolkit.plan.model_size import target_size
    from toolkit.plan.step_time import Costs, Layout

    if args.target is None or args.input is None or args.output is None:
        raise ArgumentsError("a TARGET, --input and --output are needed (and --concurrency or --rate)")
    for name in ("gpus", "gpus_per_node"):
        if getattr(args, name) < 1:
            raise ArgumentsError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 1 is needed")
    tpot = None if args.max_tpot_ms is None else args.max_tpot_ms / 1000
    work = Workload(args.input, args.output, args.concurrency, args.rate, tpot)
    figures = {name: value for name in FIGURES if (value := getattr(args, f"gpu_{name.replace('-', '_')}")) is not None}
    gpu = gpu_named(args.gpu, {GPU_FIELDS.get(name, name): value for name, value in figures.items()})
    only = None if args.layout is None else _layout(args.layout)
    steps = None if args.step_ms is None else _steps(args.step_ms)
    if steps is not None and only is None:
        raise ArgumentsError("--step-ms are of one layout; name it with --layout, such as tp8")
    size, config, source, revision = target_size(args.target, args.weight_bits)
    draft = _draft(args, size, config, source, revision)
    planner = Planner(size, draft, gpu, work, Costs(), args.gpus_per_node, not args.no_overlap, only)
    if steps is not None and only is not None:
        costs = calibrated(planner, Layout(*only, node=args.gpus_per_node), steps)
        planner = Planner(size, draft, gpu, work, costs, args.gpus_per_node, not args.no_overlap, only)
    return planner, [source, *([] if revision is None else ["--revision", revision])]


def _draft(args: argparse.Namespace, size: ModelSize, config: Any, source: str, revision: str | None) -> Draft | None:
    """The head that is planned with, if any. source, revision: the target's, on which a head's layers may depend."""
    from toolkit.plan.draft_cost import Draft, head_size, measured_accept_lengths, parse_accept_lengths, usual_draft

    lengths = None if args.accept_lengths is None else parse_accept_lengths(args.accept_lengths)
    if args.draft is not None:
        from toolkit.checkpoint.formats import FORMATS, Formats
        from toolkit.checkpoint.open_head import open_head

        if args.head is not None:
            raise ArgumentsError("--draft and --head came together; the head in the directory says what it is")
        found = open_head(args.draft, target=source, revision=revision)
        formats = FORMATS.get(found.kind, Formats())
        if args.engine not in formats.builders:
            raise ArgumentsError(
                f"{args.draft} holds a {found.kind} head, which {args.engine} cannot serve: {formats.why_not}; "
                "--head mtp plans with the target's own MTP layers"
            )
        for what, theirs in (("hidden_size", size.hidden_size), ("vocab_size", config.vocab_size)):
            own = getattr(found.head.config, what)
            if own != theirs:
                raise ArgumentsError(
                    f"the head in {args.draft} has {what} {own}, {size.name} {theirs}: it belongs to another target"
                )
        stated = (lengths, "as stated") if lengths else measured_accept_lengths(found.meta.get("measured"))
        return Draft(found.kind, head_size(found.head, size), *stated, path=EXPORTED)
    if lengths is None:
        if args.head is not None:
            raise ArgumentsError(f"--head {args.head}: its accept lengths are needed too, --accept-lengths 1:A,2:B")
        return None
    return usual_draft(args.head, config, size, lengths)


def _layout(text: str) -> tuple[int, bool]:
    """tp8, dp16."""
    kind, number = text[:2].lower(), text[2:]
    if kind not in ("tp", "dp") or not number.isdigit() or int(number) < 1:
        raise ArgumentsError(f"--layout {text}: tpN (tensor parallel) or dpN (data-parallel attention) is needed")
    return int(number), kind == "dp"


def _steps(text: str) -> dict[int, float]:
    """1:7.1,32:9 -> seconds by requests a rank."""
    found = {}
    for pair in text.split(","):
        requests, colon, value = pair.partition(":")
        try:
            found[int(requests)] = float(value) / 1000
        except ValueError:
            colon = ""
        if not colon or int(requests) < 1 or found[int(requests)] <= 0:
            raise ArgumentsError(f"--step-ms {pair!r}: REQUESTS:MS is needed, both above 0, such as 1:7.1,32:9")
    return found
