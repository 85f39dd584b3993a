"""`toolkit serve`: an OpenAI-compatible server for a target with its draft head."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from typing import TYPE_CHECKING

from toolkit.commands.model_arguments import add_engine_arguments, describe, load_from, short_name

if TYPE_CHECKING:
    from toolkit.infer.load.load_engine import LoadedEngine
    from toolkit.infer.server.request_params import DefaultSampling

HELP = "serve a target with its draft head over OpenAI's HTTP API"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser.add_argument_group("engine"))
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1; 0.0.0.0: all interfaces)"
    )
    group.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000; 0: any free one)")
    group.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in the API (default: the target's)"
    )
    parser.epilog = (
        "Requests that name no temperature, top_p or top_k get those of the target's generation config, else "
        "OpenAI's 1.0, 1.0 and no top_k (as vLLM and SGLang do). Send temperature 0 for greedy answers."
    )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from toolkit.infer.load.load_engine import interrupted_by_loss
    from toolkit.infer.server.app import build_app, listen, serve_forever
    from toolkit.infer.server.completions import Served
    from toolkit.infer.server.request_params import DefaultSampling, default_temperature

    listener = listen(args.host, args.port)  # before the model is loaded: a port in use is reported at once
    with listener:
        loaded = load_from(args, default_temperature)
        defaults = DefaultSampling.of(loaded.target)
        served = Served(
            model_name=args.served_model_name or short_name(loaded.target.name),
            tokenizer=loaded.target.tokenizer,
            engine=loaded.engine,
            context_length=loaded.engine.context_length,
            fingerprint=f"fp_{loaded.target.fingerprint}",
            shape_name=loaded.shape_name,
            defaults=defaults,
        )
        port = listener.getsockname()[1]
        text = announcement(loaded, served.model_name, args.host, port, defaults)
        with interrupted_by_loss(loaded):
            serve_forever(build_app(served), listener, on_ready=lambda: print(text, flush=True))
    print("the server has ended", file=sys.stderr)
    return 0


def announcement(loaded: LoadedEngine, model_name: str, host: str, port: int, defaults: DefaultSampling) -> str:
    """The text printed when the server is ready: address, model, draft shape, and a command to try."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{port}/v1"
    messages = [{"role": "user", "content": "Name three rivers."}]
    body = {"model": model_name, "messages": messages, "max_tokens": 64, "temperature": 0}
    curl = f"curl {address}/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    target = loaded.target
    return (
        f"ready at {address}\n"
        f"  model     {model_name} ({target.precision}; on {target.device}, "
        f"context {loaded.engine.context_length} tokens)\n"
        f"  draft     {describe(loaded)}\n"
        f"  sampling  {defaults.text} unless a request says otherwise\n"
        f"try it:\n  {curl}\n"
        "Ctrl-C ends the server."
    )
