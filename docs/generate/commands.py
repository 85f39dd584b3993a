"""The page of commands: from their parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable

from tables import code, plain, table

from toolkit.cli import COMMANDS, command_parser, overview
from toolkit.commands.model_arguments import OPTIONS
from toolkit.infer.engine.config import EngineConfig

INTRODUCTION = """# Command line

After this page you can choose the command and the flags for a task.

`toolkit --help` prints:

```text
{overview}```

The exit status is 0 after success, 2 for invalid input, which is told in one line, and 130 after Ctrl-C.
"""
DEFAULT = re.compile(r" ?\(default: ([^()]*)\)")  # in a help text


def page() -> str:
    return INTRODUCTION.format(overview=overview()) + "".join(_command(name) for name in COMMANDS)


def _command(name: str) -> str:
    parser, _ = command_parser(name)
    parsers = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers = list(action.choices.values())
    return "".join(_section(one) for one in parsers)


def _section(parser: argparse.ArgumentParser) -> str:
    hidden = argparse.SUPPRESS
    shown = [action for action in parser._actions if action.help != hidden and action.dest != "help"]
    needed = [_typed(action) for action in shown if action.option_strings and action.required]
    optional = ["[flags]"] if any(action.option_strings and not action.required for action in shown) else []
    places = [_place(action) for action in shown if not action.option_strings]
    usage = " ".join([parser.prog, *needed, *places, *optional])
    texts = [parser.description, parser.epilog]
    prose = "".join(f"{_sentence(text)}\n\n" for text in texts if text)
    return f"\n## {parser.prog}\n\n{prose}```text\n{usage}\n```\n\n{_table(shown)}"


def _table(actions: Iterable[argparse.Action]) -> str:
    return table(("flag", "default", "meaning"), [_row(action) for action in actions])


def _row(action: argparse.Action) -> tuple[str, str, str]:
    text = (action.help or "").strip()
    told = DEFAULT.findall(text)
    if len(told) == 1 and action.nargs != "?":
        default, _, rest = told[0].partition("; ")
        text = DEFAULT.sub(f" ({rest})" if rest else "", text)
        default = code(default) if re.fullmatch(r"[\w./-]+", default) else flags_as_code(default)
    elif told:
        default = ""  # the text has it
    else:
        default = "required" if action.required and action.nargs != "*" else code(_value(action))
    name = _typed(action) if action.option_strings else _place(action)
    return code(name), default, flags_as_code(text)


def _typed(action: argparse.Action) -> str:
    """A flag as it is typed, with its other names and the form of its value."""
    names = ", ".join(action.option_strings)
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return names
    form = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    form = form if isinstance(form, str) else " ".join(form)
    return f"{names} {form} ..." if action.nargs == "+" else f"{names} {form}"


def _place(action: argparse.Action) -> str:
    """A positional argument in a usage line."""
    form = str(action.metavar or action.dest).replace(" | ", " or ")
    return {"*": f"[{form} ...]", "+": f"{form} ...", "?": f"[{form}]"}.get(str(action.nargs), form)


def _value(action: argparse.Action) -> str:
    """The default as it is typed; empty for a flag that is off or not given."""
    default = getattr(EngineConfig, action.dest) if action.dest in OPTIONS else action.default
    if isinstance(action, argparse.BooleanOptionalAction) and default is not None:
        return next(name for name in action.option_strings if name.startswith("--no-") != default)
    if isinstance(default, list):
        return " ".join(map(str, default))
    return "" if default in (None, False, argparse.SUPPRESS) else str(default)


def _sentence(text: str) -> str:
    text = flags_as_code(text[0].upper() + text[1:])
    return text if text.endswith(".") else f"{text}."


def flags_as_code(text: str) -> str:
    """A help text as Markdown."""
    return re.sub(
        r"`[^`]*`|--[a-z][a-z0-9-]*", lambda found: found[0] if found[0][0] == "`" else code(found[0]), plain(text)
    )
