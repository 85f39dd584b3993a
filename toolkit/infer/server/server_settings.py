"""What a server allows: who may ask, how much, and how long."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from toolkit.log import get_logger

logger = get_logger(__name__)

KEY_VARIABLE = "TOOLKIT_API_KEY"


class ServerSettingsError(ValueError):
    """A limit out of range, or a file of API keys that cannot be used."""


def _limit(default: float | None, text: str, *, least: float = 0.001, most: float = 1e12) -> Any:
    """A field with its help text, and the smallest and largest value."""
    return field(default=default, metadata={"help": text, "least": least, "most": most})


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server; times in seconds. The limits say themselves what they are.

    api_keys: a request must carry one of them; empty: no key is needed.
    allowed_hosts: the names by which clients may call the server (the header Host); empty: any.
    allowed_origins: web pages of these origins may read answers (CORS); empty: none.
    warm_up_ids: a prompt that is answered before the server is ready; empty: none.

    Raises ServerSettingsError for a limit out of range.
    """

    api_keys: Sequence[str] = field(default=(), repr=False)
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    warm_up_ids: Sequence[int] = ()
    max_body_bytes: int = _limit(16 * 2**20, "size of a request; a larger one is a 413 (default: 16777216)", least=1)
    max_n: int = _limit(128, "answers that one request may ask for (default: 128)", least=1, most=128)  # OpenAI's most
    max_queued_requests: int = _limit(
        1024, "answers that wait beside those that run; a request beyond them is a 429 (default: 1024)", least=0
    )
    request_timeout_s: float | None = _limit(
        None, "seconds after which an answer is cut; a request may ask for less by its field timeout (default: none)"
    )
    drain_timeout_s: float = _limit(
        20.0, "seconds that running answers get after SIGTERM or Ctrl-C (default: 20)", least=0
    )
    body_timeout_s: float = _limit(
        30.0, "seconds in which a client must have sent its request, else it is a 408 (default: 30)"
    )
    watchdog_timeout_s: float = _limit(
        300.0,
        "a step of the engine that takes longer is logged with its stack, and /ready is 503 (default: 300)",
    )
    log_interval_s: float = _limit(
        10.0,
        "log running requests, accept_length and tokens per second every S seconds in which something ran "
        "(default: 10; 0: never)",
        least=0,
    )

    def __post_init__(self) -> None:
        for name, limit in LIMITS.items():
            value, least, most = getattr(self, name), limit.metadata["least"], limit.metadata["most"]
            if value is not None and not least <= value <= most:
                raise ServerSettingsError(
                    f"{limit_flag(name)} is {value:g}; a number from {least:g} to {most:g} is needed"
                )


LIMITS = {one.name: one for one in fields(ServerSettings) if one.metadata}


def limit_flag(name: str) -> str:
    """The flag of a limit, which is the field without its unit."""
    return "--" + name.removesuffix("_s").replace("_", "-")


def read_api_keys(path: Path | None) -> tuple[str, ...]:
    """Return the keys of a file, one a line, or the one in TOOLKIT_API_KEY, which is removed from the environment.

    Raises ServerSettingsError for a file that holds no key, or keys that a header cannot carry.
    """
    variable = os.environ.pop(KEY_VARIABLE, None)  # not for the processes that this one starts
    if path is None:
        keys, where = [] if variable is None else [variable.strip()], f"the variable {KEY_VARIABLE}"
    else:
        text, where = path.read_text(encoding="utf-8-sig", errors="replace"), str(path)
        keys = [line.strip() for line in text.splitlines() if line.strip()]
        if path.stat().st_mode & 0o077:
            logger.warning("other users of this machine can read or change %s, which holds API keys: chmod 600", path)
    if (path is not None or variable is not None) and not all([*keys, keys]):
        raise ServerSettingsError(f"{where} holds no API key; write one a line, or leave it out")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ServerSettingsError(f"an API key in {where} has a character that is not printable ASCII, or a space")
    return tuple(keys)
