"""`--config FILE.yaml`: the flags of a command in a file. Flags of the command line override those of the file."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    filed = _read(parser, args.config)
    translate(filed)
    both = vars(parser.parse_args(line, argparse.Namespace(**vars(filed))))  # the file's values in place of defaults
    typed = {name: value for name, value in vars(args).items() if name in OPTIONS}
    kinds = args.draft_kinds if "draft" in typed else {**filed.draft_kinds, **args.draft_kinds}
    kept = {name: value for name, value in both.items() if name not in ALIASES}
    return argparse.Namespace(**{**kept, **typed, "draft_kinds": kinds})


def _read(parser: argparse.ArgumentParser, path: Path) -> argparse.Namespace:
    """The values of a file, by the names of the parsed arguments. Raises ConfigError, FileNotFoundError."""
    from toolkit.recipe_yaml import RecipeError, parse_yaml

    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (RecipeError, UnicodeDecodeError) as error:
        raise ConfigError(str(error) if isinstance(error, RecipeError) else f"{path}: {error}") from error
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(f"{path} holds no flags; write one `name: value` per line, such as `port: 8000`")
    values = argparse.Namespace()
    for key, value in tree.items():
        try:
            _set(parser, values, str(key), value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    return values


def _set(parser: argparse.ArgumentParser, values: argparse.Namespace, key: str, value: Any) -> None:
    name = key.replace("_", "-")
    refuse_without_equivalent([name])
    actions, flag = parser._option_string_actions, f"--{name}"
    action = actions.get(flag)
    if action is None or action.dest in ("config", "help"):
        names = [one[2:] for one in actions if one.startswith("--") and one not in ("--config", "--help")]
        near = difflib.get_close_matches(name, names, n=1)
        raise ConfigError(f"unknown key {key}; {f'did you mean {near[0]}?' if near else 'see toolkit serve --help'}")
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{key} is {value!r}; true or false is needed")
        if isinstance(action, argparse.BooleanOptionalAction):
            setattr(values, action.dest, value != name.startswith("no-"))
        elif value:
            action(parser, values, [], flag)
        return
    if value is None:
        raise ConfigError(f"{key} has no value; give one, or leave the key out")
    if isinstance(value, list) and action.nargs is None:
        raise ConfigError(f"{key} is a list; a single value is needed")
    texts = [_as_typed(one) for one in (value if isinstance(value, list) else [value])]
    try:
        action(parser, values, parser._get_values(action, texts), flag)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{key}: {error.message}") from error


def _as_typed(value: Any) -> str:
    """A YAML value as it is typed on the command line."""
    return json.dumps(value) if isinstance(value, dict) else str(value)
