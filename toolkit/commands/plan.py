"""`toolkit plan`: a deployment on SGLang or vLLM, with launch lines and a predicted throughput."""

from __future__ import annotations

import argparse

from toolkit.commands.model_arguments import errors_with_flags
from toolkit.commands.recipe_arguments import ArgumentsError, step_seconds
from toolkit.head_kinds import HEAD_KINDS
from toolkit.plan.gpus import gpu_named
from toolkit.plan.plan_request import PlanRequest

HELP = "plan a deployment on SGLang or vLLM: layout, draft length by batch, launch lines, predicted throughput"
FIGURES = {
    "memory": "GB",
    "bandwidth": "GB/s",
    "tflops": "TFLOPS of bf16, dense",
    "fp8-tflops": "TFLOPS of fp8, dense",
    "link": "GB/s to a GPU of the same node, one way",
    "network": "GB/s to other nodes, a GPU",
}
GPU_FIELDS = {"tflops": "flops", "fp8-tflops": "flops_8"}


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
        help="the layout of decoding engines: tp8 (tensor parallel, 8 GPUs), dp16 (data parallel attention, 16 GPUs) "
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
    engine.add_argument(
        "--no-overlap",
        action="store_true",
        help="the engine does not schedule the next step while the GPU computes this one",
    )
    parser.epilog = "Only chains are planned. The model is in toolkit/plan/step_time.py, its queue in deployment.py."


def _gpu_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("GPUs")
    group.add_argument(
        "--gpu", default="H100", metavar="NAME", help="A100, H20, H100, H200, B200, L40S, or any other (default: H100)"
    )
    group.add_argument("--gpus", type=int, default=8, metavar="N", help="GPUs in all (default: 8)")
    group.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of a machine (default: 8)")
    for name, unit in FIGURES.items():
        group.add_argument(f"--gpu-{name}", type=float, metavar="X", help=f"{unit} (default: the table's)")


def run(args: argparse.Namespace) -> int:
    """Prints the plan, or the published cases."""
    if args.published:
        _check_alone(args)
        from toolkit.plan.plan_text import published_text  # loads torch

        print(published_text())
        return 0
    request = _request(args)
    from toolkit.plan.make_plan import make_plan  # loads torch

    with errors_with_flags():
        text = make_plan(request)
    print(text)
    return 0


def _check_alone(args: argparse.Namespace) -> None:
    """--published lists the same figures whatever else is typed."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args(["--published"]))
    typed = [name for name, default in defaults.items() if getattr(args, name) != default]
    if typed:
        names = ", ".join("TARGET" if name == "target" else f"--{name.replace('_', '-')}" for name in typed)
        raise ArgumentsError(f"--published takes no other argument, and {names} are given; leave them out")


def _request(args: argparse.Namespace) -> PlanRequest:
    """The arguments as a request. Raises `ArgumentsError`, `PlanError`."""
    if args.target is None or args.input is None or args.output is None:
        raise ArgumentsError("a TARGET, --input and --output are needed (and --concurrency or --rate)")
    for name in ("gpus", "gpus_per_node"):
        if getattr(args, name) < 1:
            raise ArgumentsError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 1 is needed")
    if args.draft is not None and args.head is not None:
        raise ArgumentsError(
            "--draft and --head are both given; leave --head out, the directory states the kind of its head"
        )
    layout = None if args.layout is None else _layout(args.layout)
    steps = None if args.step_ms is None else step_seconds(args.step_ms)
    if steps is not None and layout is None:
        raise ArgumentsError("--step-ms is measured with one layout; name it with --layout, such as tp8")
    figures = {name: value for name in FIGURES if (value := getattr(args, f"gpu_{name.replace('-', '_')}")) is not None}
    return PlanRequest(
        args.target,
        args.input,
        args.output,
        gpu_named(args.gpu, {GPU_FIELDS.get(name, name): value for name, value in figures.items()}),
        concurrency=args.concurrency,
        rate=args.rate,
        max_tpot_s=None if args.max_tpot_ms is None else args.max_tpot_ms / 1000,
        gpus=args.gpus,
        node=args.gpus_per_node,
        layout=layout,
        step_s=steps,
        weight_bits=args.weight_bits,
        overlap=not args.no_overlap,
        draft=args.draft,
        head=args.head,
        accept_lengths=args.accept_lengths,
        engine=args.engine,
    )


def _layout(text: str) -> tuple[int, bool]:
    """tp8, dp16."""
    kind, number = text[:2].lower(), text[2:]
    if kind not in ("tp", "dp") or not number.isdigit() or int(number) < 1:
        raise ArgumentsError(f"--layout {text}: tpN (tensor parallel) or dpN (data-parallel attention) is needed")
    return int(number), kind == "dp"
