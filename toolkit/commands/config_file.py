"""`--config FILE.yaml`: the flags of a command in a file. Flags of the command line override those of the file."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from toolkit.commands.engine_aliases import ALIASES, refuse_without_equivalent, translate
from toolkit.commands.model_arguments import OPTIONS
from toolkit.infer.engine.config import ConfigError


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="read flags from this YAML file: one `name: value` per line, the name without its dashes; flags that are "
        "typed override it",
    )


def parse_with_file(parser: argparse.ArgumentParser, line: Sequence[str]) -> argparse.Namespace:
    """Parse a command line, and the file of its --config. Options have our names afterwards (see engine_aliases).

    Raises ConfigError for a flag without an equivalent, a contradiction, or an invalid file."""
    refuse_without_equivalent([word[2:].partition("=")[0] for word in line if word.startswith("--")])
    args = parser.parse_args(line)
    translate(args)
    if args.config is None:
        return args
    filed = parser.parse_args(list(_typed(parser, args.config)))
    translate(filed)
    both = vars(parser.parse_args(line, argparse.Namespace(**vars(filed))))  # the file's values in place of defaults
    typed = {name: value for name, value in vars(args).items() if name in OPTIONS}
    kinds = args.draft_kinds if "draft" in typed else {**filed.draft_kinds, **args.draft_kinds}
    kept = {name: value for name, value in both.items() if name not in ALIASES}
    return argparse.Namespace(**{**kept, **typed, "draft_kinds": kinds})


def _typed(parser: argparse.ArgumentParser, path: Path) -> Iterator[str]:
    """The flags of a file as they are typed. Raises ConfigError, FileNotFoundError."""
    from toolkit.recipe_yaml import RecipeError, parse_yaml

    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except RecipeError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(f"{path} holds no flags; write one `name: value` per line, such as `port: 8000`")
    actions = parser._option_string_actions
    for key, value in tree.items():
        name = str(key).replace("_", "-")
        refuse_without_equivalent([name])
        action = actions.get(f"--{name}")
        if action is None or action.dest in ("config", "help"):
            near = difflib.get_close_matches(name, [one[2:] for one in actions if one.startswith("--")], n=1)
            hint = f"did you mean {near[0]}?" if near else "see toolkit serve --help"
            raise ConfigError(f"{path}: unknown key {key}; {hint}")
        if action.nargs == 0 and not isinstance(value, bool):
            raise ConfigError(f"{path}: {key} is {value!r}; true or false is needed")
        if value is None:
            raise ConfigError(f"{path}: {key} has no value; give one, or leave the key out")
        if isinstance(value, list):
            yield from (f"--{name}", *map(str, value))
        elif action.nargs != 0:
            yield f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"
        elif value:
            yield f"--{name}"
        elif isinstance(action, argparse.BooleanOptionalAction):
            yield f"--{name.removeprefix('no-')}" if name.startswith("no-") else f"--no-{name}"
