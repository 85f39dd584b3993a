"""The engine's options as command-line arguments, made from the fields of EngineConfig."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import typing
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.infer.engine.config import ConfigError, EngineConfig, choices_of, value_types

if TYPE_CHECKING:  # the parser is built without torch
    from toolkit.infer.load.load_engine import LoadedEngine

OPTIONS = {field.name: field.metadata for field in dataclasses.fields(EngineConfig)}


class Arguments(Protocol):
    """A parser or a group of its arguments."""

    def add_argument(self, *name_or_flags: str, **settings: Any) -> argparse.Action: ...


def add_engine_arguments(group: Arguments, names: Collection[str] = OPTIONS, **texts: str) -> None:
    """Add a flag for each named option; only options that are given appear in the parsed arguments.

    texts: help texts in place of the options' own.
    """
    for name in names:
        hint, known = value_types()[name], OPTIONS[name]
        flags = [flag_of(name), *([known["alias"]] if known["alias"] else [])]
        settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
        settings["help"] = with_flags(texts.get(name) or known["help"])
        kinds = typing.get_args(hint) or (hint,)
        if bool in kinds:
            off = getattr(EngineConfig, name) is False
            settings["action"] = "store_true" if off else argparse.BooleanOptionalAction
        elif choices_of(hint):
            settings["choices"] = choices_of(hint)
        else:
            settings["metavar"] = known["metavar"]
            settings["type"] = next((kind for kind in (int, float) if kind in kinds), str)
        group.add_argument(*flags, **settings)


def engine_config(args: argparse.Namespace, **options: Any) -> EngineConfig:
    """The options that were given, and others that the command sets unless they were given."""
    return EngineConfig(**{**options, **{name: value for name, value in vars(args).items() if name in OPTIONS}})


def load_from(args: argparse.Namespace, **options: Any) -> LoadedEngine:
    """Load the engine that the arguments describe. Raises ValueError with a message for the user."""
    from toolkit.infer.load.load_engine import load_engine

    with errors_with_flags():
        return load_engine(engine_config(args, **options))


@contextlib.contextmanager
def errors_with_flags() -> Iterator[None]:
    """Errors inside name options as flags. Raises ConfigError in place of an error that names some as fields."""
    try:
        yield
    except ValueError as error:
        if with_flags(str(error)) == str(error):
            raise
        raise ConfigError(with_flags(str(error))) from error


def flag_of(name: str) -> str:
    """The flag of an option."""
    return "--" + name.replace("_", "-")


def with_flags(text: str) -> str:
    """`text` with the options that it names in backticks written as flags."""
    return re.sub(r"`(\w+)`", lambda found: flag_of(found[1]) if found[1] in OPTIONS else found[0], text)


def short_name(target_name: str) -> str:
    """The target's name in the API: hub ids and the demo keep theirs, a path gives its last part."""
    path = Path(target_name).expanduser()
    if not path.exists():
        return target_name
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def describe(loaded: LoadedEngine) -> str:
    """What drafts, in one line: the head or n-gram lookup with shape and verifier, or plain decoding."""
    if loaded.shape is None or loaded.draft is None:
        return "none, plain decoding"
    path = getattr(loaded.draft, "path", None)
    native = getattr(loaded.draft, "meta", {}).get("native")
    what = loaded.draft.kind if path is None else f"{path} ({loaded.draft.kind})"
    what = what if native is None else f"the target's own MTP module ({native['family']})"
    return f"{what}, {loaded.shape_name}, verify {loaded.engine.verifier.name}"
