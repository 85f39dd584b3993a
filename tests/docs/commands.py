"""The command lines of a page, and their check: each is parsed by the parser of its program, and nothing is run."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser

from toolkit.cli import COMMANDS, command_parser
from toolkit.recipe import DEMO_RECIPE, load_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
WRITTEN = tempfile.TemporaryDirectory()  # removed when Python ends
SEPARATORS = ("&&", "||", "|", ";", "&")
UNCHECKED = {"pip", "git", "curl", "cd", ".", "grep", "tail", "tee"}  # programs of others


def commands_of(blocks: Iterable[str]) -> Iterator[list[str]]:
    """The words of each command in shell blocks, without comments, prompts and variables before it."""
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars="&|;")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, ";"]:
                if word not in SEPARATORS:
                    words.append(word)
                    continue
                while words and re.fullmatch(r"\w+=.*", words[0]):
                    del words[0]
                if words:
                    yield words
                words = []


def check_command(words: Sequence[str]) -> None:
    """Fails with the parser's message, and for a program that is not known here."""
    try:
        if words[0] == "toolkit":
            check_toolkit(words[1], list(words[2:]))
        elif words[:2] == ["accelerate", "launch"]:
            check_launch(list(words[2:]))
        elif words[0] == "python" and words[1].startswith(("benchmarks/", "examples/")):
            check_script(words[1], list(words[2:]))
        elif words[:2] == ["bash", "benchmarks/first_gpu.sh"]:
            assert words[2:] in (["prepare"], ["prepare", "demo"]) or set(words[2:]) <= set("01234567")
        elif words[:2] == ["python", "docs/generate"]:
            assert set(words[2:]) <= {"--check"}
        elif words[0] == "sbatch":
            script = next(i for i, word in enumerate(words) if word.endswith(".sbatch"))
            check_training(words[script], list(words[script + 1 :]))
        elif words[0] == "pytest":
            check_pytest(tuple(words[1:]))
        else:
            assert words[0].split("/")[-1] in UNCHECKED or words[:3] == ["python", "-m", "venv"], f"what is {words[0]}?"
    except SystemExit as error:
        raise AssertionError(f"{shlex.join(words)} does not parse") from error
    except ValueError as error:
        raise AssertionError(f"{shlex.join(words)}: {error}") from error


def check_toolkit(name: str, arguments: list[str]) -> None:
    if name in ("--help", "--version"):
        return
    assert name in COMMANDS, f"toolkit has no command {name}"
    if "--help" in arguments:
        return
    args = command_parser(name)[1](arguments)
    check_recipe(getattr(args, "recipe", None), getattr(args, "overrides", None) or [])


def check_recipe(path: str | Path | None, overrides: Sequence[str]) -> None:
    """The overrides suit the recipe."""
    load_recipe(recipe_file(str(path or DEMO_RECIPE)), [one for one in overrides if "=" in one])


@cache
def recipe_file(name: str) -> Path:
    """A recipe of the repository; for a name outside of recipes/ the one that docs/training.md tells the reader to
    write."""
    if name.startswith("recipes/") or Path(name).is_absolute():
        return REPOSITORY / name
    text = (REPOSITORY / "docs" / "training.md").read_text(encoding="utf-8")
    written = re.search(r"^```yaml\n(name: .*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert written is not None, "docs/training.md has no recipe"
    path = Path(WRITTEN.name) / "mine.yaml"
    path.write_text(written[1], encoding="utf-8")
    return path


def check_launch(words: list[str]) -> None:
    args = launch_command_parser().parse_args(words)
    assert args.config_file is None or (REPOSITORY / args.config_file).is_file(), f"{args.config_file} does not exist"
    check_training(args.training_script, args.training_script_args)


def check_training(script: str, arguments: list[str]) -> None:
    """A script of toolkit/train/, or one that starts it, and its arguments."""
    assert (REPOSITORY / script).is_file(), f"{script} does not exist"
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args(arguments)
    check_recipe(args.recipe, args.overrides)


class Parsed(BaseException):
    """The script has parsed its arguments."""


def check_script(path: str, arguments: list[str]) -> None:
    """Run a script up to the end of its parse_args."""
    assert (REPOSITORY / path).is_file(), f"{path} does not exist"
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *given: Any, **named: Any) -> None:
        parse(self, *given, **named)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str((REPOSITORY / path).parent))
        patch.setattr(sys, "argv", [path, *arguments])
        main = importlib.import_module(Path(path).stem).main
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        with pytest.raises(Parsed):
            main()


@cache
def check_pytest(arguments: tuple[str, ...]) -> None:
    """pytest parses its options before it lists its markers."""
    for one in arguments:
        assert "/" not in one or (REPOSITORY / one.split("::")[0]).exists(), f"{one} does not exist"
    command = [sys.executable, "-m", "pytest", *arguments, "--noconftest", "--markers"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr)
