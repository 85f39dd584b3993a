"""The command lines of a page, and their check: each is parsed by the parser of its program, and nothing is run."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from accelerate.commands.launch import launch_command_parser

from toolkit.cli import command_parser
from toolkit.recipe import DEMO_RECIPE, load_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
WRITTEN = tempfile.TemporaryDirectory()  # removed when Python ends
SHELL = re.compile(r"^ *```(?:bash|sh|console)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def commands_of(page: str) -> Iterator[list[str]]:
    """The words of each command in the shell blocks of a page."""
    for line in "".join(SHELL.findall(page)).replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.strip(), posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if words and set(word) <= set("&|;"):
                yield words
                words = []
            elif words or not re.fullmatch(r"\w+=.*|[&|;]+", word):
                words.append(word)


def check_command(words: Sequence[str]) -> None:
    """Fails with the parser's message. Programs of others are not checked."""
    if words[:2] == ["accelerate", "launch"]:
        args = launch_command_parser().parse_args(words[2:])
        assert (REPOSITORY / args.config_file).is_file(), f"{args.config_file} does not exist"
        words = ["python", args.training_script, *args.training_script_args]
    if words[0] in ("python", "bash", "sbatch") and "/" in words[1]:
        words = words[1:]
        assert (REPOSITORY / words[0]).exists(), f"{words[0]} does not exist"
    if words[0].startswith(("toolkit/train/", "recipes/slurm/")):
        words = ["toolkit", "train", *words[1:]]
    if words[0] == "toolkit" and words[-1] not in ("--help", "--version"):
        args = command_parser(words[1])[1](list(words[2:]))
        overrides = [one for one in getattr(args, "overrides", None) or [] if "=" in one]
        load_recipe(recipe_file(str(getattr(args, "recipe", None) or DEMO_RECIPE)), overrides)


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
