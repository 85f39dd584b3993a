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


def flags_as_code(text: str) -> str:
    """A help text as Markdown."""
    return re.sub(
        r"`[^`]*`|--[a-z][a-z0-9-]*", lambda found: found[0] if found[0][0] == "`" else code(found[0]), plain(text)
    )


# -- recipe keys, from the dataclasses ---------------------------------------------------------------------------------

RECIPE_HEAD = """# Recipe reference

After this page you can write a recipe: each key has its values, its default and its meaning here.

A recipe is a YAML file; the part of a key before a dot is a section of the file. An unknown key is an error that names
the nearest one. On the command line `key=value` replaces a value, and `--print-config` prints the result:

```bash
toolkit run recipes/smollm2-135m.yaml train.epochs=2 'bench.shapes=["3,1,4"]' --print-config
```

A stage whose keys change is redone, with all stages after it. Keys marked * do not affect the result of their stage: a
stage that was cut off continues with other values of them.
"""
BOUNDS = {annotated_types.Gt: ">", annotated_types.Ge: "≥", annotated_types.Lt: "<", annotated_types.Le: "≤"}
NAMES = {int: "integer", float: "number", str: "text", bool: "true or false"}


def recipe() -> str:
    return RECIPE_HEAD + "".join(_sections(Recipe, ""))


def _sections(cls: type, place: str) -> list[str]:
    """The tables of a section, then of the sections below it. place: the section's key and a dot, or ""."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {key.name: key for key in dataclasses.fields(cls)}
    below = [name for name in fields if dataclasses.is_dataclass(hints[name])]
    rows = [
        (
            code(place + name) + ("\\*" if key.metadata.get("not_in_fingerprint") else ""),
            values(hints[name]),
            "required" if key.default is dataclasses.MISSING else code(as_yaml(key.default)),
            plain(key.metadata["meaning"]),
        )
        for name, key in fields.items()
        if name not in below
    ]
    heading = f"`{place.removesuffix('.')}`" if place else "The run"
    text = f"\n## {heading}\n\n{plain(inspect.cleandoc(cls.__doc__ or ''))}\n\n"
    text += table(("key", "values", "default", "meaning"), rows)
    return [text, *(part for name in below for part in _sections(hints[name], f"{place}{name}."))]


def values(hint: Any) -> str:
    """The values that a key takes, in words."""
    inside = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        needs = [one.func.__doc__ or "" for one in inside[1:] if isinstance(one, AfterValidator)]
        bounds = [one for note in inside[1:] for one in getattr(note, "metadata", [note])]
        limits = [f"{BOUNDS[type(one)]} {dataclasses.astuple(one)[0]:g}" for one in bounds if type(one) in BOUNDS]
        text = " ".join([values(inside[0]), ", ".join(limits)]).strip()
        return "; ".join([text, *(f"must {need}" for need in needs)])
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(code(as_yaml(value)) for value in inside)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join("`null`" if one is type(None) else values(one) for one in inside)
    if typing.get_origin(hint) is tuple:
        return f"list of {values(inside[0])}" if inside[-1] is ... else f"list of {len(inside)}: {values(inside[0])}"
    return NAMES[hint]


def as_yaml(value: Any) -> str:
    """A value as a recipe has it."""
    plain_value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain_value, default_flow_style=True).split("\n")[0]


# -- the Python API, from signatures, docstrings and the help texts of options -----------------------------------------

ITEM = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.*)")


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
