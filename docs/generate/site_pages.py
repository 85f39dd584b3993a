"""What mkdocs generates from the source as it builds the site (`hooks` in mkdocs.yml): the pages of commands and of
recipe keys, and blocks in hand-written pages, each in the place of a line `<!-- generated: NAME -->`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from typing import Any

import annotated_types
import yaml
from mkdocs.structure.files import File
from pydantic import AfterValidator
from tables import code, plain, table

import toolkit
from toolkit import LLM, EngineConfig, SamplingParams
from toolkit.cli import COMMANDS, command_parser, overview
from toolkit.commands.model_arguments import OPTIONS
from toolkit.infer.load.llm import Completion
from toolkit.infer.server.metrics import PREFIX, SERIES
from toolkit.recipe import Recipe

WORD = re.compile(r"^(\S+(?: \S+)*) {2,}(.*(?:\n {16}.*)*)", re.MULTILINE)
BLOCK = re.compile(r"^<!-- generated: (.+?) -->$", re.MULTILINE)


def glossary() -> str:
    """The words that toolkit/__init__.py defines."""
    entries = WORD.findall(toolkit.__doc__ or "")
    return table(("word", "meaning"), [(word, plain(" ".join(text.split()))) for word, text in entries])


def metrics() -> str:
    """The metrics of the server."""
    labels = {name: f"{{{one.label}}}" if one.label else "" for name, one in SERIES.items()}
    rows = [(code(PREFIX + name + labels[name]), one.kind, plain(one.text)) for name, one in SERIES.items()]
    return table(("metric", "kind", "meaning"), rows)


# -- commands, from their parsers --------------------------------------------------------------------------------------

COMMANDS_HEAD = """# Command line

After this page you can choose the command and the flags for a task.

`toolkit --help` prints:

```text
{overview}```

The exit status is 0 after success, 2 for invalid input, which is told in one line, and 130 after Ctrl-C.
"""
DEFAULT = re.compile(r" ?\(default: ([^()]*)\)")  # in a help text


def commands() -> str:
    sections = []
    for name in COMMANDS:
        parser, _ = command_parser(name)
        below = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
        sections += map(_command, below[0].choices.values() if below else [parser])
    return COMMANDS_HEAD.format(overview=overview()) + "".join(sections)


def _command(parser: argparse.ArgumentParser) -> str:
    shown = [one for one in parser._actions if one.help != argparse.SUPPRESS and one.dest != "help"]
    needed = [_typed(action) for action in shown if action.option_strings and action.required]
    optional = ["[flags]"] if any(action.option_strings and not action.required for action in shown) else []
    places = [_place(action) for action in shown if not action.option_strings]
    usage = " ".join([parser.prog, *needed, *places, *optional])
    texts = [flags_as_code(text[0].upper() + text[1:]) for text in (parser.description, parser.epilog) if text]
    prose = "".join(f"{text.removesuffix('.')}.\n\n" for text in texts)
    rows = table(("flag", "default", "meaning"), [_flag(action) for action in shown])
    return f"\n## {parser.prog}\n\n{prose}```text\n{usage}\n```\n\n{rows}"


def _flag(action: argparse.Action) -> tuple[str, str, str]:
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


def python_api() -> str:
    parts = [_entry("### LLM", LLM, _signature("LLM", LLM.__init__))]
    for name in ("generate", "update_weights", "refresh_draft", "close"):
        parts.append(_entry(f"#### LLM.{name}", getattr(LLM, name), _signature(name, getattr(LLM, name))))
    for cls in (SamplingParams, Completion):
        parts += [_entry(f"### {cls.__name__}", cls), _fields(cls) + "\n"]
    for name in ("acceptance", "accept_length"):
        parts.append(_entry(f"#### Completion.{name}", inspect.getattr_static(Completion, name)))
    return "".join([*parts, _entry("### EngineConfig", EngineConfig), _fields(EngineConfig)])


def _entry(heading: str, about: Any, signature: str = "") -> str:
    return f"{heading}\n\n{signature}{_prose(about.__doc__)}\n"


def _fields(cls: Any) -> str:
    """The fields of a dataclass; columns that say nothing are left out."""
    keys = dataclasses.fields(cls)
    columns = {
        "field": [code(key.name) for key in keys],
        "type": [" or ".join(map(code, str(key.type).split(" | "))) for key in keys],
        "default": ["" if key.default is dataclasses.MISSING else code(repr(key.default)) for key in keys],
        "meaning": [plain(key.metadata.get("help", "")) for key in keys],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    return table(list(shown), list(zip(*shown.values(), strict=True)))


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


PAGES = {"commands.md": commands, "recipe.md": recipe}
BLOCKS = {"api": python_api, "glossary": glossary, "metrics": metrics}


def on_files(files: Any, config: Any) -> None:
    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page()))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Raises KeyError for an unknown block."""
    return BLOCK.sub(lambda line: BLOCKS[line[1]](), markdown)
