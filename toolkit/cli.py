"""The `toolkit` command: imports and runs one subcommand, and prints user errors as one line."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from toolkit import __version__
from toolkit.errors import exit_status

# In the order of a typical run. The module of a command is its name with underscores.
COMMANDS = (
    "run",
    "prepare-data",
    "synthesize",
    "rollouts",
    "preview",
    "build-token-map",
    "train",
    "bench",
    "forecast",
    "search",
    "report",
    "inspect",
    "check",
    "export",
    "plan",
    "serve",
    "chat",
)


def command_help(name: str) -> str:
    """Read the HELP line of a command from its source, so that listing the commands imports none of them."""
    path = Path(__file__).parent / "commands" / f"{name.replace('-', '_')}.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "HELP":
            return ast.literal_eval(node.value)  # type: ignore[attr-defined]
    raise AssertionError(f"{path} has no HELP line")


def overview() -> str:
    """Return the output of `toolkit --help`."""
    rows = "\n".join(f"  {name:<16} {command_help(name)}" for name in COMMANDS)
    return (
        "usage: toolkit [--version] COMMAND ...\n\n"
        "Train draft heads for a language model, and serve the model with them by speculative decoding.\n\n"
        f"commands:\n{rows}\n\n"
        "`toolkit COMMAND --help` shows the options of a command. TOOLKIT_LOG=debug shows tracebacks.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit status: 0 success, 2 invalid input, 130 interrupted, or the command's own."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview(), end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"toolkit {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
        print(f"toolkit: error: unknown command {name!r}; {hint}", file=sys.stderr)
        return 2
    return exit_status(lambda: _run_command(name, arguments[1:]))


def _run_command(name: str, arguments: list[str]) -> int:
    command = _module(name)
    _, parse = command_parser(name)
    return command.run(parse(arguments))


def command_parser(name: str) -> tuple[argparse.ArgumentParser, Callable[[Sequence[str]], argparse.Namespace]]:
    """Return the parser of a command, and its method that parses a command line."""
    command = _module(name)
    parser = argparse.ArgumentParser(prog=f"toolkit {name}", description=command.HELP)
    subcommands = command.add_arguments(parser)
    if hasattr(command, "parse"):  # the command reads its line itself
        return parser, partial(command.parse, parser)
    # Overrides may be given before or after options; argparse does not support that together with subcommands.
    return parser, parser.parse_intermixed_args if subcommands is None else parser.parse_args


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"toolkit.commands.{name.replace('-', '_')}")
