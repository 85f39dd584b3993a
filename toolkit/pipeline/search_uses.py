"""Says which command lines start from what a search found."""

from __future__ import annotations

import shlex
from dataclasses import fields

from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.load.search_file import kind_of_requests


def uses_of(config: EngineConfig, temperature: float, server_temperature: float, largest: int) -> str:
    """Returns the lines that a search prints at its end.

    config: of the search. temperature: of its requests. server_temperature: of a server's requests that state none.
    largest: the largest batch size that was searched.
    """
    flags, asked = _flags(config), f" --temperature {temperature:g}" if temperature else ""
    lines = [
        f"what was found for {kind_of_requests(temperature, config.verify)} requests is used by",
        f"  toolkit serve{flags}",
        f"    (for such requests; adaptive drafting with the measured times while more than {largest} requests run)",
        f"  toolkit chat{flags}{asked}",
        f"  toolkit bench acceptance{flags}{asked} --batch {largest}",
    ]
    if temperature == 0 and server_temperature:
        lines += [
            f"requests that state no temperature are sampled at {server_temperature:g} here, and drafted adaptively; "
            "search for them too:",
            f"  toolkit search{flags} --temperature {server_temperature:g}",
        ]
    return "\n".join(lines)


def _flags(config: EngineConfig) -> str:
    """Returns the options that differ from the default, as a command line has them."""
    found = ""
    for one in fields(config):
        value, name = getattr(config, one.name), one.name.replace("_", "-")
        if isinstance(value, bool) and value != one.default:
            found += f" --{name}" if value else f" --no-{name}"
        elif value != one.default:
            found += f" --{name} {shlex.quote(str(value))}"
    return found
