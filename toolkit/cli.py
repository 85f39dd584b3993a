"""The `toolkit` command: imports and runs one subcommand, and prints user errors as one line."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

from toolkit import __version__
from toolkit.errors import exit_status

# In the order of a typical run. The module of a command is its name with underscores.
COMMANDS = {
    "run": "run all stages of a recipe that are not up to date, from prompts to report",
    "prepare-data": "bring the training data of a recipe up to date: prompts, rollouts and token map",
    "synthesize": "collect the prompts of a recipe: from its sources, and written by the target itself",
    "rollouts": "let the target answer the prompts of a recipe, or of any file of conversations",
    "preview": "show which tokens of rollouts a training supervises",
    "build-token-map": "count tokens of rollouts, or of any corpora, and keep the most common ones for the draft",
    "train": "train the draft head of a recipe, by accelerate launch of its script (toolkit/train/eagle3.py, ..)",
    "bench": "measure accept_length and speed of a draft head against plain decoding",
    "forecast": "forecast accept_length of every draft shape of a head, without serving",
    "search": "find the fastest draft setting of a head for each batch size, by forecast and measured step times",
    "report": "write report.json and report.html of a run folder",
    "inspect": "say what a draft head, a target or a token map is, what it needs, and what looks wrong",
    "check": "test a draft head on its target: files, settings, acceptance, and that decoding with it is lossless",
    "export": "convert a draft head for SGLang, vLLM, speculators, EAGLE or llama.cpp, and print the launch line",
    "plan": "plan a deployment on SGLang or vLLM: layout, draft length by batch, launch lines, predicted throughput",
    "serve": "serve a target with its draft head over OpenAI's HTTP API",
    "chat": "talk to a target in the terminal, drafted tokens shown in green",
}


def overview() -> str:
    """Return the output of `toolkit --help`."""
    rows = "\n".join(f"  {name:<16} {text}" for name, text in COMMANDS.items())
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
    # A shortened flag would be read as another one: --n as --no-check.
    parser = argparse.ArgumentParser(prog=f"toolkit {name}", description=COMMANDS[name], allow_abbrev=False)
    subcommands = command.add_arguments(parser)
    if hasattr(command, "parse"):  # the command reads its line itself
        return parser, partial(command.parse, parser)
    # Overrides may be given before or after options; argparse does not support that together with subcommands.
    return parser, parser.parse_intermixed_args if subcommands is None else parser.parse_args


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"toolkit.commands.{name.replace('-', '_')}")
