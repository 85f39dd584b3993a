"""`toolkit serve`: an OpenAI-compatible server for a target with its draft head."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.commands.config_file import add_config_argument, parse_with_file
from toolkit.commands.engine_aliases import add_alias_arguments, check_draft_kind
from toolkit.commands.model_arguments import (
    add_engine_arguments,
    describe,
    engine_config,
    errors_with_flags,
    flag_of,
    load_from,
    short_name,
)
from toolkit.infer.engine.config import NATIVE, NGRAM, NONE, EngineConfig
from toolkit.infer.server.answer_parser import REASONING_PARSERS, TOOL_CALL_PARSERS, Parsers
from toolkit.infer.server.server_settings import (
    KEY_VARIABLE,
    LIMITS,
    ServerSettings,
    limit_flag,
    read_api_keys,
)
from toolkit.log import get_logger, give_up_full_streams
from toolkit.targets.chat_templates import has_chat_template

if TYPE_CHECKING:
    from toolkit.infer.load.load_engine import LoadedEngine
    from toolkit.infer.server.completions import Served

logger = get_logger(__name__)

CHUNK_S = 0.15  # of a prompt, while others decode: with a round between two, no stream pauses for 0.25 s


LOOPBACK = ("127.0.0.1", "::1", "localhost")
HOSTS = ("127.0.0.1", "[::1]", "localhost")  # the same in the header Host
WARM_UP = "The quick brown fox jumps over the lazy dog."
CHECKED = ("target", "revision", "token_map", "quantization", "device", "chat_template")  # options of `toolkit check`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_argument(parser)
    add_engine_arguments(parser.add_argument_group("engine"))
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1; 0.0.0.0: all interfaces)"
    )
    group.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000; 0: any free one)")
    group.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in the API (default: the target's)"
    )
    group.add_argument(
        "--tool-call-parser",
        choices=("auto", *TOOL_CALL_PARSERS, "none"),
        default="auto",
        help="how the target writes tool calls (default: auto, by its chat template; none: `tools` are refused)",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=("auto", *REASONING_PARSERS, "none"),
        default="auto",
        help="how the target marks its reasoning, which becomes `reasoning_content` in chats (default: auto, by its "
        "chat template; none: it stays in the content)",
    )
    group.add_argument(
        "--check",
        action="store_true",
        help="run `toolkit check` on the head first, if there is one, and do not start if it fails",
    )
    add_server_arguments(group)
    add_alias_arguments(parser.add_argument_group("names of SGLang and vLLM for the same"))
    parser.epilog = (
        "Requests that name no temperature, top_p or top_k get those of the target's generation config, else "
        "OpenAI's 1.0, 1.0 and no top_k (as vLLM and SGLang do). Send temperature 0 for greedy answers."
    )


def add_server_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the server's limits."""
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="requests must carry one of the keys in FILE, one a line, as a bearer token "
        f"(default: the key in {KEY_VARIABLE}, else none is needed)",
    )
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="web pages of these origins may read answers in a browser, CORS (default: none)",
    )
    for name, limit in LIMITS.items():
        kind: Any = {"type": float, "metavar": "S"} if name.endswith("_s") else {"type": int, "metavar": "N"}
        kind |= {"help": limit.metadata["help"], "default": argparse.SUPPRESS}
        group.add_argument(limit_flag(name), dest=name, **kind)


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """The settings that were given. Raises ServerSettingsError."""
    given = {name: value for name, value in vars(args).items() if name in LIMITS}
    keys = read_api_keys(args.api_key_file)
    if not keys and args.host not in LOOPBACK:
        logger.warning("whoever can reach %s may use this server: it asks for no key (--api-key-file)", args.host)
    # Without a key a web page could reach the server by a name of its own that resolves to 127.0.0.1 (DNS rebinding).
    hosts = HOSTS if not keys and args.host in LOOPBACK else ()
    return ServerSettings(api_keys=keys, allowed_hosts=hosts, allowed_origins=tuple(args.allowed_origins), **given)


def parse(parser: argparse.ArgumentParser, line: Sequence[str]) -> argparse.Namespace:
    """Parse the command line: names of other servers, and a file of flags."""
    return parse_with_file(parser, line)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    from toolkit.infer.load.load_engine import closing
    from toolkit.infer.server.app import build_app, listen, serve_forever
    from toolkit.infer.server.completions import Served
    from toolkit.infer.server.request_params import default_sampling

    settings = server_settings(args)
    listener = listen(args.host, args.port)  # before the model is loaded: a port in use is reported at once
    with listener:
        if args.check and (status := check_first(args)):
            logger.error("the server does not start, as `toolkit check` failed")
            return status
        loaded = load_from(args)
        loaded.engine.keep_pace(CHUNK_S)
        served = Served(
            model_name=args.served_model_name or short_name(loaded.target.name),
            tokenizer=loaded.target.tokenizer,
            engine=loaded.engine,
            context_length=loaded.engine.context_length,
            fingerprint=f"fp_{loaded.target.fingerprint}",
            shape_name=loaded.shape_name,
            defaults=default_sampling(loaded.target),
            parsers=Parsers.of(loaded.target.tokenizer, args.tool_call_parser, args.reasoning_parser),
        )
        port = listener.getsockname()[1]
        text = announcement(loaded, served, args.host, port)
        warm_up_ids = loaded.target.tokenizer(WARM_UP)["input_ids"][: loaded.engine.context_length - 1]
        settings = replace(settings, warm_up_ids=warm_up_ids)
        with closing(loaded, interrupt=True):
            check_draft_kind(args, None if loaded.draft is None else loaded.draft.kind)
            serve_forever(build_app(served, settings), listener, on_ready=lambda: announce(text))
    logger.info("the server has ended")
    give_up_full_streams()
    return 0


def check_first(args: argparse.Namespace) -> int:
    """Run `toolkit check --quick` in a process of its own, whose memory is free afterwards. Returns its status.

    A server without a head has nothing to check: 0."""
    draft = served_head(engine_config(args))
    if draft is None:
        logger.info("--check: no head is served, so there is none to check")
        return 0
    given = [("draft", draft), *((name, getattr(args, name)) for name in CHECKED if hasattr(args, name))]
    options = [word for name, value in given for word in (flag_of(name), str(value))]
    return subprocess.run([sys.executable, "-m", "toolkit", "check", "--quick", *options]).returncode


def served_head(config: EngineConfig) -> str | None:
    """The head that would be served, as `toolkit check` calls it; None: none is. Raises ConfigError."""
    from toolkit.infer.load.load_draft import find_module

    if config.draft is not None and not config.no_draft:
        return None if str(config.draft) in (NGRAM, NONE) else str(config.draft)
    if config.no_draft or config.target is None:  # without both options loading says what is missing
        return None
    with errors_with_flags():
        return None if find_module(config) is None else NATIVE


def announce(text: str) -> None:
    """Print that the server is ready. That nobody can read it must not end the server."""
    try:
        print(text, flush=True)
    except OSError as error:
        logger.warning("nothing can be written to the standard output: %s", error)


def announcement(loaded: LoadedEngine, served: Served, host: str, port: int) -> str:
    """The text printed when the server is ready: address, model, draft shape, parsers, and a command to try."""
    from toolkit.infer.server.request_params import described

    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{port}/v1"
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Name three rivers."}]}
    path = "chat/completions"
    if not has_chat_template(served.tokenizer):
        asked, path = {"prompt": "Three rivers are"}, "completions"
    body = {"model": served.model_name, **asked, "max_tokens": 64, "temperature": 0}
    curl = f"curl {address}/{path} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    target = loaded.target
    return (
        f"ready at {address}\n"
        f"  model     {served.model_name} ({target.precision}; on {target.device}, "
        f"context {loaded.engine.context_length} tokens)\n"
        f"  draft     {describe(loaded)}\n"
        f"  sampling  {described(served.defaults)} unless a request says otherwise\n"
        f"  parsers   tool calls {served.parsers.calls or 'none'}, reasoning {served.parsers.reasoning or 'none'}\n"
        f"  status    {address.removesuffix('v1')} in a browser\n"
        f"try it:\n  {curl}\n"
        "Ctrl-C ends the server."
    )
