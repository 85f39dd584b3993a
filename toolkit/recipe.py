"""The recipe: all settings of a pipeline run as one frozen tree, read from YAML and dotted overrides.

Unknown keys, wrong types and values out of range raise `RecipeError`; nothing is silently ignored or converted.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter

from toolkit.log import get_logger
from toolkit.recipe_yaml import RecipeError, Rule, apply_override, build, check, parse_yaml
from toolkit.train_settings import HeadName, Shapes, Some, TrainSettings, not_in_fingerprint

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Share = Annotated[float, Field(gt=0, le=1)]
log = get_logger(__name__)
REPOSITORY = Path(__file__).resolve().parent.parent
DEMO_RECIPE = REPOSITORY / "recipes" / "smollm2-135m.yaml"  # of a clone; an installed package has no recipes


@dataclass(frozen=True)
class TargetSettings:
    """The model whose output must be reproduced: demo name, hub id, directory or GGUF file."""

    model: str
    revision: str | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    quantization: Literal["int8", "int4"] | None = None  # in all stages, since drafts must match the quantized target


@dataclass(frozen=True)
class PromptSettings:
    """The origin of user turns: `sources` (files or hub:org/name), self-synthesis by the target, or both."""

    sources: tuple[str, ...] = ()
    limit: PositiveInt | None = None  # maximum number of conversations from the sources
    synthesize: NonNegativeInt = 0  # number of accepted prompts from self-synthesis
    systems: tuple[str, ...] = ()  # system prompts that steer self-synthesis, in turn; "" is the template's default
    temperature: NonNegativeFloat = 1.0
    top_p: Share = 0.95
    max_tokens: PositiveInt = 96
    max_running_requests: PositiveInt = not_in_fingerprint(64, "prompts.batch_size")
    min_words: PositiveInt = 3


@dataclass(frozen=True)
class RolloutSettings:
    """How the target answers the prompts. `held_out` is the share of conversations excluded from training."""

    temperature: NonNegativeFloat = 0.0
    top_p: Share = 1.0
    max_tokens: PositiveInt = 160
    max_running_requests: PositiveInt = not_in_fingerprint(64, "rollouts.batch_size")
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.05  # above 0: training is evaluated on it
    # Store the hidden states computed while answering, for train.data.features: offline.
    keep_features: bool = not_in_fingerprint(False)
    torch_compile: bool = not_in_fingerprint(False)  # compiled layers, on a CPU


@dataclass(frozen=True)
class TokenMapSettings:
    """Size of the draft vocabulary: a number of ids, or the share of response tokens that it must cover."""

    size: PositiveInt | None = 8192
    coverage: Share | None = None


@dataclass(frozen=True)
class BenchSettings:
    """How acceptance is measured. A shape is "num_steps,top_k,num_draft_tokens".

    prompts None: the 40 built-in prompts. Of several prompt files, each is one task.
    """

    __pydantic_config__ = STRICT
    prompts: Annotated[tuple[str, ...], Some] | None = None
    limit: PositiveInt | None = None
    max_tokens: PositiveInt = 96
    temperature: NonNegativeFloat = 0.0
    # Also measured; each is written to its own record, such as acceptance-T1.json.
    further_temperatures: tuple[NonNegativeFloat, ...] = ()
    shapes: Shapes = ("4,1,5", "4,4,16")
    warmup: NonNegativeInt = 2  # prompts decoded before timing starts

    def __post_init__(self) -> None:
        others = self.further_temperatures
        once = len({self.temperature, *others}) == 1 + len(others)
        needed = "each temperature once, and none that is bench.temperature,"
        check(self, "bench.", [("further_temperatures", once, needed)])


@dataclass(frozen=True)
class Recipe:
    """A pipeline run. run_dir: relative to the working directory; the default is runs/<name>."""

    __pydantic_config__ = STRICT
    name: str
    target: TargetSettings
    seed: NonNegativeInt = 0
    run_dir: str = ""
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
        yield "name", plain, "a name of letters, digits, '.', '_' or '-' (it names the run folder)"
        # Features of compiled layers differ from those of training, which does not compile its forwards.
        eager = not (self.rollouts.keep_features and self.rollouts.torch_compile)
        yield "rollouts.torch_compile", eager, "false under rollouts.keep_features: true"
        read = not self.rollouts.keep_features or self.train.data.features == "offline"
        yield "rollouts.keep_features", read, "train.data.features: offline, which reads them, or false,"
        one = (self.token_map.size is None) != (self.token_map.coverage is None)
        yield "token_map", one, "exactly one of size and coverage (set the other to null)"
        whole = self.target.quantization is None or self.train.target == "replicated"
        yield "target.quantization", whole, "null under train.target sharded, or train.target: replicated,"


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
        recipe = build(Recipe, tree)
    except RecipeError as error:
        raise RecipeError(f"{path}{' with overrides' if overrides else ''}: {error}") from None
    for name in recipe.train.idle_settings():
        log.warning("%s: %s has no effect, since train.evaluation.real_every is null", path, name)
    return recipe


def result_settings(section: Any) -> dict[str, Any]:
    """Return the keys of a section that affect its result, as JSON values; nested keys have their former names.

    Keys that only affect batching, storage or output are omitted, so an interrupted stage may resume with other values.
    """
    found: dict[str, Any] = {}
    for key in dataclasses.fields(section):
        value = getattr(section, key.name)
        if dataclasses.is_dataclass(value):
            found |= result_settings(value)
        elif not key.metadata.get("not_in_fingerprint"):
            name = key.metadata.get("former", key.name).rpartition(".")[2]
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def print_config(recipe: Recipe) -> None:
    """Print the resolved recipe on stdout as YAML, which `load_recipe` reads back to the same recipe."""
    tree = TypeAdapter(Recipe).dump_python(recipe, mode="json")  # tuples become lists
    print(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None), end="")
