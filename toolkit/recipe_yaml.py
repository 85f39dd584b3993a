"""Strict YAML: read a mapping into a tree of frozen dataclasses; errors have the key and what is needed."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticSerializationError, to_json

T = TypeVar("T")
Rule = tuple[str, bool, str]  # key, whether its value is valid, else a sentence: the reason, and what to set
# What other trainers call a key.
ALIASES = {
    "train.optimizer.learning_rate": "lr learning_rate",
    "train.optimizer.warmup_ratio": "warmup warmup_steps num_warmup_steps",
    "train.optimizer.schedule": "scheduler lr_scheduler lr_scheduler_type",
    "train.optimizer.max_grad_norm": "grad_clip clip_grad gradient_clipping max_norm",
    "train.data.global_batch": "batch_size bs global_batch_size train_batch_size",
    "train.data.micro_batch": "micro_batch_size per_device_train_batch_size",
    "train.data.max_length": "max_len max_seq_len max_seq_length seq_len seq_length max_model_len",
    "train.unroll.ttt_steps": "ttt_length",
    "train.evaluation.eval_every": "eval_steps eval_interval",
    "train.epochs": "num_epochs num_train_epochs n_epochs",
    "train.max_steps": "steps num_steps num_train_steps total_steps",
    "train.save_every": "save_steps save_interval",
    "train.precision": "mixed_precision bf16 fp16",
    "rollouts.max_tokens": "max_new_tokens",
    "prompts.sources": "data dataset datasets data_path train_data_path",
    "token_map.size": "vocab_size draft_vocab_size",
    "target.model": "model_name model_name_or_path model_path target_model_path",
    "run_dir": "out output output_dir",
}


class RecipeError(ValueError):
    """A recipe file or an override is not valid."""


def check(section: object, place: str, rules: Iterable[Rule]) -> None:
    """Raise `RecipeError` with one line per rule that `section` breaks. place: the section's key and a dot, or ""."""
    lines = [f"{place}{key} = {as_json(attrgetter(key)(section))}: {sentence}" for key, ok, sentence in rules if not ok]
    if lines:
        raise RecipeError("\n".join(lines))


def as_json(value: object) -> str:
    """A value as a recipe has it: true, null, [1, 2]."""
    return to_json(value).decode()


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 2e-3 as a number (a string in YAML 1.1) and rejects repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.MarkedYAMLError(problem=f"key given twice: {', '.join(twice)}", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=deep)


_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML value. Raises `RecipeError` with `where`, the source of the text."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in `tree`; `build` detects unknown keys."""
    key, equals, text = override.partition("=")
    *sections, last = key.split(".")
    if not equals or not all((*sections, last)):
        raise RecipeError(f"override {override!r} is not of the form section.key=value, e.g. train.max_steps=20")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise RecipeError(f"override {override!r}: {section} = {as_json(tree)} has no keys; it must be a mapping")
    tree[last] = parse_yaml(text, f"override {override!r}")


def build(cls: type[T], tree: Mapping[str, Any], place: str = "") -> T:
    """Build the dataclass `cls` from a mapping. Integers become floats and lists tuples; other types must match.

    place: the key of `cls` in a recipe and a dot, for messages. Raises `RecipeError` with one line per problem.
    """
    try:
        return TypeAdapter(cls).validate_json(to_json(tree))  # in JSON mode a list is valid for a tuple
    except ValidationError as error:
        known = list(_keys(cls, place))
        raise RecipeError("\n".join(_problem(one, place, known) for one in error.errors())) from None
    except PydanticSerializationError as error:  # bytes, or a lone surrogate
        raise RecipeError(f"a value is no text: {error}") from None


def _keys(cls: type, place: str) -> Iterator[str]:
    """Yield the dotted name of each key of a section, then of the keys below it."""
    hints = typing.get_type_hints(cls)
    for key in dataclasses.fields(cls):
        yield place + key.name
        if dataclasses.is_dataclass(hints[key.name]):
            yield from _keys(hints[key.name], f"{place}{key.name}.")


# In place of pydantic's messages, which name JSON types.
_WORDS = {"bool_type": "true or false", "dataclass_type": "a mapping of keys", "tuple_type": "a list"}


def _problem(error: ErrorDetails, place: str, known: list[str]) -> str:
    """Return a line a key: its name, what was given, what is needed. known: dotted names of keys."""
    given, kind, context = error["input"], error["type"], error.get("ctx", {})
    if isinstance(context.get("error"), RecipeError):  # from the check of a section; it contains the keys
        return str(context["error"])
    key = place + re.sub(r"\.(\d+)", r"[\1]", ".".join(map(str, error["loc"])))
    if kind == "missing":
        return f"{key} is missing; it has no default"
    if kind == "unexpected_keyword_argument":
        return "\n".join(f"unknown key {one}; did you mean {_nearest(one, known)}?" for one in _typed(key, given))
    message = f"it must be {_WORDS[kind]}" if kind in _WORDS else error["msg"].removeprefix("Value error, ")
    quoted = f' (write it in quotes: "{given}")' if kind == "string_type" and given is not None else ""
    return f"{key} = {as_json(given)}: {message.replace('Input should', 'it must')}{quoted}"


def _nearest(key: str, known: Sequence[str]) -> str:
    """The key that is meant: what others call so, or a key of this name in another section, else the most similar one.
    One of the section where it was typed comes first."""
    sections, _, last = key.rpartition(".")
    section = sections.split(".")[0]
    last = last.strip("_").replace("-", "_").lower()
    words = {last, f"{sections.rpartition('.')[2]}_{last}"}  # model.path is model_path
    meant = [name for name, others in ALIASES.items() if not words.isdisjoint(others.split())]
    words |= {name.rpartition(".")[2] for name in meant}
    same = [name for name in known if name.rpartition(".")[2] in words]
    here = [name for name in same if name.split(".")[0] == section]
    return max(here or meant or same or known, key=lambda name: _likeness(name, key))


def _typed(key: str, given: object) -> Iterator[str]:
    """Yield the dotted names of the keys under an unknown one: a whole section may be wrong."""
    if not isinstance(given, dict) or not given:
        yield key
        return
    for name, value in given.items():
        yield from _typed(f"{key}.{name}", value)


def _likeness(one: str, other: str) -> float:
    """Return the likeness of two dotted names. The last part counts most: the right key may be in another section."""
    pairs = ((one, other), (one.rpartition(".")[2], other.rpartition(".")[2]))
    return sum(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)
