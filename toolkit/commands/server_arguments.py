"""The limits of a server as command-line arguments."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from toolkit.infer.server.server_settings import KEY_VARIABLE, ServerSettings, ServerSettingsError, read_api_keys
from toolkit.log import get_logger

logger = get_logger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
HOSTS = ("127.0.0.1", "[::1]", "localhost")  # the same in the header Host
# Field of ServerSettings -> kind, metavar, help; the flag is --the-field, without the unit.
LIMITS: dict[str, tuple[type, str, str]] = {
    "max_body_bytes": (int, "N", "size of a request; a larger one is a 413 (default: 16777216)"),
    "max_n": (int, "N", "answers that one request may ask for (default: 128)"),
    "max_queued_requests": (
        int,
        "N",
        "answers that wait beside those that run; a request beyond them is a 429 (default: 1024)",
    ),
    "request_timeout_s": (
        float,
        "S",
        "seconds after which an answer is cut; a request may ask for less by its field timeout (default: none)",
    ),
    "drain_timeout_s": (float, "S", "seconds that running answers get after SIGTERM or Ctrl-C (default: 20)"),
    "body_timeout_s": (
        float,
        "S",
        "seconds in which a client must have sent its request, else it is a 408 (default: 30)",
    ),
    "watchdog_timeout_s": (
        float,
        "S",
        "a step of the engine that takes longer is logged with its stack, and /ready is 503 (default: 300)",
    ),
}


def add_server_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the server's limits."""
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="requests must carry one of the keys in FILE, one a line, as a bearer token "
        f"(default: the key in {KEY_VARIABLE}, else none is needed)",
    )
    group.add_argument("--api-key", action=_OnCommandLine, help=argparse.SUPPRESS, default=argparse.SUPPRESS)
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="web pages of these origins may read answers in a browser, CORS (default: none)",
    )
    for name, (kind, metavar, text) in LIMITS.items():
        flag = "--" + name.removesuffix("_s").replace("_", "-")
        group.add_argument(flag, dest=name, type=kind, metavar=metavar, help=text, default=argparse.SUPPRESS)


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """The settings that were given. Raises ServerSettingsError."""
    given = {name: value for name, value in vars(args).items() if name in LIMITS}
    keys = read_api_keys(args.api_key_file)
    if not keys and args.host not in LOOPBACK:
        logger.warning("whoever can reach %s may use this server: it asks for no key (--api-key-file)", args.host)
    # Without a key a web page could reach the server by a name of its own that resolves to 127.0.0.1 (DNS rebinding).
    hosts = HOSTS if not keys and args.host in LOOPBACK else ()
    return ServerSettings(api_keys=keys, allowed_hosts=hosts, allowed_origins=tuple(args.allowed_origins), **given)


class _OnCommandLine(argparse.Action):
    """The flag of other servers for a key. Raises ServerSettingsError."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        raise ServerSettingsError(
            "--api-key would show the key to every user of this machine; put it into a file (--api-key-file), or into "
            f"the variable {KEY_VARIABLE}"
        )
