"""`toolkit search`: the fastest draft setting of a head for each batch size."""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.commands.model_arguments import add_engine_arguments, engine_config, errors_with_flags
from toolkit.commands.prompt_arguments import add_prompt_arguments, prompt_settings
from toolkit.commands.recipe_arguments import ArgumentsError
from toolkit.pipeline.launch import set_threads

HELP = "find the fastest draft setting of a head for each batch size, by forecast and measured step times"
ENGINE = ("draft", "token_map", "target", "dtype", "quantization", "draft_quantization", "torch_compile")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(
        parser, ENGINE, draft="the head: a draft directory, another project's head, or native, with --target"
    )
    add_prompt_arguments(parser)
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1], metavar="B", help="requests decoded at once, one or several sizes"
    )
    parser.add_argument(
        "--objective",
        choices=("tokens-per-s", "itl", "ttft"),
        default="tokens-per-s",
        help="what is best: tokens per second of the batch; the mean time between tokens of a request; the time to the "
        "first token of a request that arrives during a round (half a round and its prompt)",
    )
    parser.add_argument("--top-k", type=int, nargs="+", metavar="K", help="branches per node (default: 1 2 4 8)")
    parser.add_argument("--num-steps", type=int, help="levels of the deepest shape (default: 8)")
    parser.add_argument("--num-draft-tokens", type=int, help="nodes of the largest tree, with the root (default: 64)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="record to write (default: runs/search-<hardware>.json)"
    )
    parser.epilog = (
        "The forecast of every shape (`toolkit forecast`) times measured seconds of a round give predicted speeds; the "
        "best are run end to end. The winners and the times are written into the draft directory (search.json), from "
        "which serve, chat, LLM and bench start on the same machine."
    )


def run(args: argparse.Namespace) -> int:
    """Prints the best settings, writes the record and search.json."""
    if min(args.batch) < 1:
        raise ArgumentsError(f"--batch is {min(args.batch)}; at least 1 is needed")
    wanted = prompt_settings(args)
    set_threads()  # before torch loads
    from toolkit.pipeline.search import search_head

    with errors_with_flags():
        paths = search_head(
            engine_config(args),
            wanted,
            args.seed,
            batches=sorted(set(args.batch)),
            objective=args.objective,
            top_ks=args.top_k,
            num_steps=args.num_steps,
            num_draft_tokens=args.num_draft_tokens,
            out=args.out,
        )
    for path in paths:
        print(path)
    return 0
