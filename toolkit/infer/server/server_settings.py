"""What a server allows: who may ask, how much, and how long."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from toolkit.log import get_logger

logger = get_logger(__name__)

KEY_VARIABLE = "TOOLKIT_API_KEY"
MAX_ANSWERS = 128  # OpenAI's limit of `n`


class ServerSettingsError(ValueError):
    """A limit out of range, or a file of API keys that cannot be used."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server; times in seconds.

    api_keys: a request must carry one of them; empty: no key is needed.
    allowed_hosts: the names by which clients may call the server (the header Host); empty: any.
    allowed_origins: web pages of these origins may read answers (CORS); empty: none.
    max_body_bytes: of a request; a larger one is a 413.
    max_n: answers that one request may ask for.
    max_queued_requests: answers that wait beside those that run; a request beyond them is a 429.
    request_timeout_s: an answer ends after it; None: never. A request may ask for less.
    drain_timeout_s: time for running answers after SIGTERM.
    watchdog_timeout_s: a step of the engine that takes longer hangs.
    body_timeout_s: time for a client to send its request.
    warm_up_ids: a prompt that is answered before the server is ready; empty: none.

    Raises ServerSettingsError for a limit out of range.
    """

    api_keys: Sequence[str] = field(default=(), repr=False)
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    max_body_bytes: int = 16 * 2**20
    max_n: int = MAX_ANSWERS
    max_queued_requests: int = 1024
    request_timeout_s: float | None = None
    drain_timeout_s: float = 20.0
    watchdog_timeout_s: float = 300.0
    body_timeout_s: float = 30.0
    warm_up_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name, least in (("max_body_bytes", 1), ("max_n", 1), ("max_queued_requests", 0), ("drain_timeout_s", 0)):
            value = getattr(self, name)
            if value < least:
                raise ServerSettingsError(f"{_flag(name)} is {value:g}; at least {least} is needed")
        if self.max_n > MAX_ANSWERS:
            raise ServerSettingsError(f"{_flag('max_n')} is {self.max_n}; at most {MAX_ANSWERS} is possible")
        for name in ("request_timeout_s", "watchdog_timeout_s", "body_timeout_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ServerSettingsError(f"{_flag(name)} is {value:g}; more than 0 is needed")
        for name in (one.name for one in fields(self) if one.name.endswith("_timeout_s")):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ServerSettingsError(f"{_flag(name)} is {value:g}; a finite number is needed")


def _flag(name: str) -> str:
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
