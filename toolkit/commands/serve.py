"""`toolkit serve`: an OpenAI-compatible server for a target with its draft head."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from typing import TYPE_CHECKING

from toolkit.commands.model_arguments import add_model_arguments, describe, open_from, short_name

if TYPE_CHECKING:
    from toolkit.infer.load.load_engine import Opened
    from toolkit.infer.server.default_sampling import DefaultSampling

HELP = "serve a target with its draft head over OpenAI's HTTP API"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1; 0.0.0.0: everywhere)"
    )
    group.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000; 0: any free one)")
    group.add_argument(
        "--max-batch",
        "--max-running-requests",
        type=int,
        default=16,
        metavar="N",
        help="requests decoded at once; more wait (default: 16)",
    )
    group.add_argument(
        "--max-total-tokens",
        type=int,
        metavar="N",
        help="tokens that all requests and kept prefixes hold together; where they do not suffice, the youngest "
        "requests wait (default: an eighth of the machine's memory, 0.8 of what a GPU has free)",
    )
    group.add_argument(
        "--mem-fraction",
        type=float,
        metavar="F",
        help="in place of --max-total-tokens: the cache's share of the machine's memory (default: 0.125), or of what a "
        "GPU has free once the target is loaded (default: 0.8)",
    )
    group.add_argument(
        "--chunked-prefill-size",
        type=int,
        default=1024,
        metavar="N",
        help="prompt tokens read between two steps of answers being written (default: 1024)",
    )
    group.add_argument(
        "--no-prefix-cache", action="store_true", help="read every prompt whole, also its known beginning"
    )
    group.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in the API (default: the target's)"
    )
    parser.epilog = (
        "Requests that name no temperature, top_p or top_k get those of the target's generation config, else "
        "OpenAI's 1.0, 1.0 and no top_k (as vLLM and SGLang do). Send temperature 0 for greedy answers."
    )


def run(args: argparse.Namespace) -> int:
    """Serves until Ctrl-C."""
    from toolkit.infer.cache.cache_manager import MemorySettings
    from toolkit.infer.load.open_parallel import interrupted_by_loss
    from toolkit.infer.server.app import build_app, listen, serve_forever
    from toolkit.infer.server.completions import Served
    from toolkit.infer.server.default_sampling import DefaultSampling

    listener = listen(args.host, args.port)  # before the model: a port in use is found at once
    with listener:
        memory = MemorySettings(
            args.max_total_tokens, not args.no_prefix_cache, args.chunked_prefill_size, fraction=args.mem_fraction
        )
        opened = open_from(args, args.max_batch, memory=memory)
        defaults = DefaultSampling.of(opened.target)
        served = Served(
            model_name=args.served_model_name or short_name(opened.target.name),
            tokenizer=opened.target.tokenizer,
            engine=opened.engine,
            max_context=opened.engine.max_context,
            fingerprint=f"fp_{opened.target.fingerprint}",
            shape_name=opened.shape_name,
            defaults=defaults,
        )
        port = listener.getsockname()[1]
        text = announcement(opened, served.model_name, args.host, port, defaults)
        with interrupted_by_loss(opened):
            serve_forever(build_app(served), listener, on_ready=lambda: print(text, flush=True))
    print("the server has ended", file=sys.stderr)
    return 0


def announcement(opened: Opened, model_name: str, host: str, port: int, defaults: DefaultSampling) -> str:
    """What is printed when the server is ready: address, model, draft shape, and a line to try."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{port}/v1"
    messages = [{"role": "user", "content": "Name three rivers."}]
    body = {"model": model_name, "messages": messages, "max_tokens": 64, "temperature": 0}
    curl = f"curl {address}/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    target = opened.target
    return (
        f"ready at {address}\n"
        f"  model     {model_name} ({target.precision}; on {target.device}, "
        f"context {opened.engine.max_context} tokens)\n"
        f"  draft     {describe(opened)}\n"
        f"  sampling  {defaults.text} unless a request says otherwise\n"
        f"try it:\n  {curl}\n"
        "Ctrl-C ends the server."
    )
