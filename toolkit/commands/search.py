"""`toolkit search`: the fastest draft setting of a head for each batch size."""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.commands.model_arguments import engine_config, errors_with_flags, flag_of
from toolkit.commands.recipe_arguments import (
    ArgumentsError,
    add_head_arguments,
    add_prompt_arguments,
    add_size_arguments,
    numbers_by_count,
    prompt_settings,
)
from toolkit.pipeline.launch import set_threads
from toolkit.plan.step_time import gpu_named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_head_arguments(parser)
    add_prompt_arguments(parser)
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1], metavar="B", help="requests decoded at once, one or several sizes"
    )
    parser.add_argument("--top-k", type=int, nargs="+", metavar="K", help="branches per node (default: 1 2 4 8)")
    add_size_arguments(parser)
    other = parser.add_argument_group("settings for another engine, by the forecast here and its step times")
    other.add_argument(
        "--for",
        dest="engine",
        choices=("sglang", "vllm"),
        help="print the flags of this engine; nothing is timed here, and the draft directory is not changed",
    )
    other.add_argument("--gpu", metavar="NAME", help="the GPU that serves: A100, H20, H100, ... (default: H100)")
    other.add_argument(
        "--step-ms",
        metavar="B:MS,...",
        help="measured milliseconds of its plain steps with B requests, e.g. 1:7.1,32:9 (default: the model of "
        "`toolkit plan`)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="record to write (default: runs/search-<hardware>.json)"
    )
    parser.epilog = (
        "The forecast of every shape (`toolkit forecast`) times measured seconds of a round give predicted speeds; the "
        "best are run end to end. The winners and the times are written into the draft directory (search.json), from "
        "which serve, chat, LLM and bench start on the same machine: for greedy requests, or with --temperature for "
        "sampled ones. Searches of both kinds and of several batch sizes are kept side by side."
    )


def run(args: argparse.Namespace) -> int:
    """Prints the best settings, writes the record and search.json."""
    if min(args.batch) < 1:
        raise ArgumentsError(f"--batch is {min(args.batch)}; at least 1 is needed")
    stray = next((name for name in ("gpu", "step_ms") if getattr(args, name) is not None), None)
    if args.engine is None and stray is not None:
        raise ArgumentsError(f"{flag_of(stray)} is for another engine; name it with --for")
    if args.engine is not None and args.out is not None:
        raise ArgumentsError("--out is for a search here; with --for, flags are printed")
    steps = None
    if args.step_ms is not None:
        steps = {requests: ms / 1000 for requests, ms in numbers_by_count("--step-ms", args.step_ms).items()}
    gpu = gpu_named(args.gpu or "H100")
    wanted = prompt_settings(args)
    set_threads()  # before torch loads
    from toolkit.pipeline.measure import largest_shapes
    from toolkit.pipeline.search import search_elsewhere, search_head

    top_ks, batches = args.top_k or ([1] if args.engine == "vllm" else None), sorted(set(args.batch))
    with errors_with_flags():
        largest = largest_shapes(top_ks, args.num_steps, args.num_draft_tokens)
        config, seed = engine_config(args), args.seed
        if args.engine is None:
            print(*search_head(config, wanted, seed, largest, batches, args.out), sep="\n")
        else:
            print(search_elsewhere(config, wanted, seed, args.engine, gpu, largest, batches, steps))
    return 0
