"""The reference of the Python API in docs/python.md: from signatures, docstrings and the help texts of options."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from typing import Any

from tables import code, plain, table

from toolkit import LLM, EngineConfig, SamplingParams
from toolkit.infer.load.llm import Completion

ITEM = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.*)")


def block() -> str:
    llm = _class(LLM, _signature("LLM", LLM.__init__))
    methods = "".join(_method(LLM, name) for name in ("generate", "update_weights", "refresh_draft", "close"))
    options = [
        (code(key.name), _type(key), _default(key), plain(key.metadata["help"]))
        for key in dataclasses.fields(EngineConfig)
    ]
    return (
        llm
        + methods
        + _class(SamplingParams)
        + _defaults(SamplingParams)
        + _class(Completion)
        + _defaults(Completion)
        + "".join(_property(Completion, name) for name in ("acceptance", "accept_length"))
        + _class(EngineConfig)
        + table(("field", "type", "default", "meaning"), options)
    )


def _class(cls: type, signature: str = "") -> str:
    return f"### {cls.__name__}\n\n{signature}{_prose(cls.__doc__)}\n"


def _method(cls: type, name: str) -> str:
    function = getattr(cls, name)
    return f"#### {cls.__name__}.{name}\n\n{_signature(name, function)}{_prose(function.__doc__)}\n"


def _property(cls: type, name: str) -> str:
    return f"#### {cls.__name__}.{name}\n\n{_prose(inspect.getattr_static(cls, name).__doc__)}\n"


def _signature(name: str, function: Any) -> str:
    """A call with all parameters, one a line."""
    lines, keyword_only = [], False
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            lines.append("*")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        lines.append(f"{stars}{parameter.name}: {parameter.annotation}{default}")
    result = inspect.signature(function).return_annotation
    end = ")" if result == "None" else f") -> {result}"
    inner = "".join(f"    {line},\n" for line in lines)
    return f"```text\n{name}({f'{chr(10)}{inner}' if lines else ''}{end}\n```\n\n"


def _type(key: dataclasses.Field[Any]) -> str:
    return " or ".join(code(one) for one in str(key.type).split(" | "))


def _default(key: dataclasses.Field[Any]) -> str:
    return "" if key.default is dataclasses.MISSING else code(repr(key.default))


def _defaults(cls: Any) -> str:
    rows = [(code(key.name), _type(key), _default(key)) for key in dataclasses.fields(cls)]
    header = ("field", "type", "default")
    if not any(row[2] for row in rows):
        header, rows = header[:2], [row[:2] for row in rows]
    return table(header, rows) + "\n"


def _prose(docstring: str | None) -> str:
    """A docstring as Markdown: `name: meaning` becomes an item of a list, an indented part a block of code."""
    parts = []
    for part in inspect.cleandoc(docstring or "").split("\n\n"):
        if part.startswith("    "):
            parts.append(f"```python\n{textwrap.dedent(part)}\n```")
        else:
            parts.append(_items(part))
    return "\n\n".join(parts) + "\n"


def _items(part: str) -> str:
    lines: list[str] = []
    listed = False
    for line in part.split("\n"):
        item = None if line.startswith(" ") else ITEM.match(line)
        if item or (listed and not line.startswith(" ")):
            lines += [""] * (listed != bool(item))  # a list begins or ends
            listed = bool(item)
        if item:
            lines.append(f"- {', '.join(code(name) for name in item[1].split(', '))}: {plain(item[2])}")
        else:
            lines.append(f"  {plain(line.strip())}" if line.startswith(" ") else plain(line))
    return "\n".join(lines).strip()
