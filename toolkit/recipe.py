"""The recipe: all settings of a pipeline run as one frozen tree, read from YAML and dotted overrides.

Unknown keys, wrong types and values out of range raise `RecipeError`; nothing is silently ignored or converted.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter

from toolkit.head_kinds import HEAD_PRESETS
from toolkit.recipe_fields import EachOnce, HeadName, OneOrSome, ShapeOrAdaptive, Some, setting
from toolkit.recipe_yaml import RecipeError, Rule, apply_override, build, check, parse_yaml
from toolkit.train_settings import TrainSettings

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Share = Annotated[float, Field(gt=0, le=1)]
REPOSITORY = Path(__file__).resolve().parent.parent
DEMO_RECIPE = REPOSITORY / "recipes" / "smollm2-135m.yaml"  # of a clone; an installed package has no recipes


@dataclass(frozen=True)
class TargetSettings:
    """The model whose output must be reproduced: demo name, hub id, directory or GGUF file."""

    model: str = field(
        metadata={"meaning": "the demo target smollm2-135m, a hub id, a directory, a .gguf file, or stand-in:NAME"}
    )
    revision: str | None = setting(None, "revision of a model on a hub; null: main")
    dtype: Literal["auto", "bfloat16", "float32"] = setting(
        "auto",
        "auto: that of the target's config (float16: bfloat16 on a GPU, float32 on a CPU); training on a CPU takes "
        "float32 where that is faster",
    )
    quantization: Literal["int8"] | None = setting(
        None,
        "one byte per weight in the target's linear layers (CPU), in all stages: the head learns from that target",
    )
    chat_template: str | None = setting(
        None,
        "a file of a Jinja template, chatml, or none: plain text, which a base model continues; null: the target's own "
        "(of a .gguf file: that in its header, or NAME.jinja beside NAME.gguf)",
    )


@dataclass(frozen=True)
class PromptSettings:
    """The origin of user turns: `sources` (files or hub:org/name), self-synthesis by the target, or both."""

    sources: tuple[str, ...] = setting((), "files of conversations, or datasets on a hub (hub:org/name)")
    limit: PositiveInt | None = setting(None, "conversations from the sources at most; null: all")
    synthesize: NonNegativeInt = setting(0, "prompts that the target writes itself")
    systems: tuple[str, ...] = setting(
        (), 'system prompts that steer what the target writes, used in turn; "" is the default of the chat template'
    )
    temperature: NonNegativeFloat = setting(1.0, "temperature of the prompts that the target writes")
    top_p: Share = setting(
        0.95, "nucleus sampling of these prompts: the most probable tokens of this total probability"
    )
    max_tokens: PositiveInt = setting(
        96, "tokens of a prompt that the target writes, at most; longer ones are rejected"
    )
    max_running_requests: PositiveInt = setting(64, "prompts that are written at once", not_in_fingerprint=True)
    min_words: PositiveInt = setting(3, "shorter prompts are rejected")


@dataclass(frozen=True)
class RolloutSettings:
    """How the target answers the prompts."""

    temperature: NonNegativeFloat = setting(0.0, "temperature of the answers; 0 is greedy")
    top_p: Share = setting(1.0, "nucleus sampling of the answers: the most probable tokens of this total probability")
    max_tokens: PositiveInt = setting(160, "tokens of an answer at most")
    server: OneOrSome = setting(
        (),
        "OpenAI-compatible servers that answer with the target, and write its own prompts: URLs, or files with one URL "
        "a line; empty: the bundled engine",
        not_in_fingerprint=True,
    )
    server_model: str | None = setting(None, "the target's name on the servers; null: its own name or folder")
    max_running_requests: PositiveInt = setting(
        64,
        "answers that are written at once, by each server if there are several",
        not_in_fingerprint=True,
    )
    held_out: Annotated[float, Field(gt=0, lt=1)] = setting(
        0.05, "share of the conversations that are not trained on; the training is evaluated on them"
    )
    keep_features: bool = setting(
        False,
        "store the hidden states computed while answering, for train.data.features: offline",
        not_in_fingerprint=True,
    )
    deterministic: bool = setting(
        False,
        "give an answer the same bits whatever is written beside it: here, in train.on_policy and as the head is "
        "measured, but not in the prompts that the target writes itself (on a GPU only small models were tested)",
    )


@dataclass(frozen=True)
class TokenMapSettings:
    """Size of the draft vocabulary: a number of ids, or the share of response tokens that it must cover."""

    size: PositiveInt | None = setting(8192, "ids of the draft vocabulary; null where coverage is given")
    coverage: Share | None = setting(
        None, "share of the response tokens that the draft vocabulary covers, in place of size; needs size: null"
    )


@dataclass(frozen=True)
class BenchSettings:
    """How acceptance and speed are measured."""

    __pydantic_config__ = STRICT
    prompts: Annotated[tuple[str, ...], Some] | None = setting(
        None,
        "prompt files, or mt-bench, humaneval, gsm8k, speed-bench (from Hugging Face's hub), each of several a task; "
        "null: the 40 built-in prompts",
    )
    limit: PositiveInt | None = setting(None, "prompts to measure, evenly over the tasks; null: all")
    max_tokens: PositiveInt = setting(96, "tokens of an answer at most")
    temperature: NonNegativeFloat = setting(0.0, "temperature of the answers; 0 is greedy")
    further_temperatures: tuple[NonNegativeFloat, ...] = setting(
        (), "also measured; each is written to its own record, such as acceptance-T1.json"
    )
    shapes: Annotated[tuple[ShapeOrAdaptive, ...], Some, EachOnce] = setting(
        ("adaptive", "4,1,5", "4,4,16"),
        'what is measured beside plain decoding: draft shapes, each "num_steps,top_k,num_draft_tokens" or '
        '"num_draft_tokens", and adaptive, '
        "which drafts in every step at most the largest of them, as `toolkit serve` does",
    )
    warmup: NonNegativeInt = setting(2, "prompts decoded before timing starts")

    @property
    def adaptive(self) -> bool:
        """Whether adaptive drafting is measured."""
        return "adaptive" in self.shapes

    def __post_init__(self) -> None:
        others = self.further_temperatures
        once = len({self.temperature, *others}) == 1 + len(others)
        said = f"each temperature is measured once; leave out repeated ones and bench.temperature, {self.temperature:g}"
        check(self, "bench.", [("further_temperatures", once, said)])


@dataclass(frozen=True)
class Recipe:
    """Name, seed and folder of a run."""

    __pydantic_config__ = STRICT
    name: str = field(metadata={"meaning": "name of the run"})
    target: TargetSettings
    seed: NonNegativeInt = setting(0, "seed of every stage")
    run_dir: str = setting("", "the run folder, relative to the working directory; empty: runs/<name>")
    prompts: PromptSettings = field(default_factory=PromptSettings)
    rollouts: RolloutSettings = field(default_factory=RolloutSettings)
    token_map: TokenMapSettings = field(default_factory=TokenMapSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    bench: BenchSettings = field(default_factory=BenchSettings)

    def __post_init__(self) -> None:
        check(self, "", self._rules())
        if not self.run_dir:
            object.__setattr__(self, "run_dir", f"runs/{self.name}")

    def _rules(self) -> Iterator[Rule]:
        plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name) is not None
        yield "name", plain, "it names the run folder; use letters, digits, '.', '_' and '-', first a letter or digit"
        read = not self.rollouts.keep_features or self.train.data.features == "offline"
        said = "training would not read these features; set train.data.features=offline, or this to false"
        yield "rollouts.keep_features", read, said
        served = bool(self.rollouts.server)
        for key, neutral, why in (
            ("rollouts.keep_features", False, "its features stay there; set it to false (training makes them itself)"),
            ("rollouts.deterministic", False, "its arithmetic is its own; set it to false"),
            ("target.quantization", None, "its weights are its own; set it to null"),
        ):
            said = f"rollouts.server answers the prompts, and {why}"
            yield key, not served or attrgetter(key)(self) == neutral, said
        named = served or self.rollouts.server_model is None
        yield "rollouts.server_model", named, "it is a name on servers; set rollouts.server too, or this to null"
        one = (self.token_map.size is None) != (self.token_map.coverage is None)
        yield "token_map", one, "exactly one of size and coverage decides how many ids it keeps; set the other to null"
        init, own = self.train.init, Path(self.run_dir or f"runs/{self.name}").resolve()
        apart = init is None or not Path(init).resolve().is_relative_to(own)
        said = "training replaces the head in its own run_dir; copy it out of there, or choose another run_dir"
        yield "train.init", apart, said
        whole = self.target.quantization is None or self.train.target == "replicated"
        said = "quantised layers are not sharded; set it to null, or train.target=replicated"
        yield "target.quantization", whole, said


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, head: HeadName = "eagle3") -> Recipe:
    """Read a recipe file and apply the overrides `section.key=value` (value in YAML) in order.

    head: the kind of head if neither the file nor an override gives one.
    Raises FileNotFoundError, or `RecipeError` that names the file and the key.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no recipe at {path}; give a file, such as recipes/smollm2-135m.yaml of a clone")
    tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(tree, dict):
        raise RecipeError(f"{path} holds a {type(tree).__name__}; expected a mapping with keys such as name and target")
    try:
        for override in overrides:
            apply_override(tree, override)
        train = tree.setdefault("train", {})
        head_section = train.setdefault("head", {}) if isinstance(train, dict) else None
        if isinstance(head_section, dict):
            head_section.setdefault("kind", head)
            _expand_preset(train, head_section)
        recipe = build(Recipe, tree)
    except RecipeError as error:
        raise RecipeError(f"{path}{' with overrides' if overrides else ''}: {error}") from None
    return recipe


def _expand_preset(train: dict[str, Any], head: dict[str, Any]) -> None:
    """Put the kind and the settings of a preset (`HEAD_PRESETS`) in place of its name, where none are given."""
    if not isinstance(head["kind"], str) or head["kind"] not in HEAD_PRESETS:  # `build` refuses what is no text
        return
    head["kind"], settings = HEAD_PRESETS[head["kind"]]
    for name, values in settings.items():
        section = train.setdefault(name, {})
        if isinstance(section, dict):  # else `build` says what is wrong
            section |= {key: value for key, value in values.items() if key not in section}


def result_settings(section: Any) -> dict[str, Any]:
    """Return the keys of a section that affect its result, as JSON values.

    Keys that only affect batching, storage or output are omitted, so an interrupted stage may resume with other values.
    """
    found: dict[str, Any] = {}
    for key in dataclasses.fields(section):
        value = getattr(section, key.name)
        if dataclasses.is_dataclass(value):
            found[key.name] = result_settings(value)
        elif not key.metadata.get("not_in_fingerprint"):
            found[key.name] = list(value) if isinstance(value, tuple) else value
    return found


def print_config(recipe: Recipe) -> None:
    """Print the resolved recipe on stdout as YAML, which `load_recipe` reads back to the same recipe."""
    tree = TypeAdapter(Recipe).dump_python(recipe, mode="json")  # tuples become lists
    print(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None), end="")
