"""The recipe: every setting of a pipeline run as one frozen tree, read from YAML and dotted overrides.

Unknown keys, wrong types and values out of range raise `RecipeError`; nothing is ignored or converted in silence.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from toolkit.log import get_logger
from toolkit.recipe_checks import (
    check_fresh,
    check_head,
    check_positive,
    check_sampling,
    check_shapes,
    check_sharded,
    idle_measurement_settings,
    need,
    not_in_fingerprint,
)
from toolkit.recipe_yaml import RecipeError, apply_override, build_strictly, kind_of, parse_yaml

HeadName = Literal["eagle3", "eagle2", "mtp"]
LossName = Literal["soft_cross_entropy", "hard_cross_entropy", "total_variation", "lk_hybrid"]
log = get_logger(__name__)
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class TargetSettings:
    """The model whose output is to be reproduced: demo name, hub id, directory or GGUF file."""

    model: str
    revision: str | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    quantization: Literal["int8", "int4"] | None = None  # in all stages: what the target then writes is to be drafted


@dataclass(frozen=True)
class PromptSettings:
    """Where user turns come from: `sources` (files or hub:org/name), self-synthesis by the target, or both."""

    sources: tuple[str, ...] = ()
    limit: int | None = None  # at most so many conversations from the sources
    synthesize: int = 0  # accepted prompts wanted from self-synthesis
    systems: tuple[str, ...] = ()  # system prompts that steer self-synthesis, in turn; "" is the template's default
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 96
    batch_size: int = not_in_fingerprint(64)
    min_words: int = 3

    def __post_init__(self) -> None:
        need(self.synthesize >= 0, "prompts.synthesize", self.synthesize, "0 or more prompts")
        check_positive(self, "prompts", "limit", "max_tokens", "batch_size", "min_words")
        check_sampling(self, "prompts")


@dataclass(frozen=True)
class RolloutSettings:
    """How the target answers the prompts. `held_out` is the share of conversations kept from training."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 160
    batch_size: int = not_in_fingerprint(64)
    held_out: float = 0.05
    keep_features: bool = not_in_fingerprint(
        False
    )  # store the hidden states they are written with, for train.features: offline
    torch_compile: bool = not_in_fingerprint(
        False
    )  # the stage's, by compiled layers, on a CPU; the first start compiles them

    def __post_init__(self) -> None:
        check_positive(self, "rollouts", "max_tokens", "batch_size")
        check_sampling(self, "rollouts")
        alike = not (self.keep_features and self.torch_compile)  # training's own forwards are not compiled
        need(alike, "rollouts.torch_compile", True, "false under rollouts.keep_features: true")
        need(0 <= self.held_out < 1, "rollouts.held_out", self.held_out, "a share from 0 to below 1")


@dataclass(frozen=True)
class TokenMapSettings:
    """Size of the draft vocabulary, given as a count of ids or as the share of response tokens it must cover."""

    size: int | None = 8192
    coverage: float | None = None

    def __post_init__(self) -> None:
        check_positive(self, "token_map", "size")
        one = (self.size is None) != (self.coverage is None)
        both = f"size {self.size}, coverage {self.coverage}"
        need(one, "token_map", both, "exactly one of the two (set the other to null)")
        need(self.coverage is None or 0 < self.coverage <= 1, "token_map.coverage", self.coverage, "a share up to 1")


@dataclass(frozen=True)
class TrainSettings:
    """Training of a draft head by its own unroll (EAGLE-3, arXiv 2503.01840). Lengths in tokens, batches in sequences;
    the schedule counts steps."""

    head: HeadName = "eagle3"
    layers: int = 1  # mtp: its layers, one a step, the last one fed back; eagle3, eagle2: decoder layers
    ttt_steps: int = 4  # steps of the training-time test, K
    ttt_curriculum: tuple[float, ...] = ()  # shares of the training that take 1, 2, .. steps; the rest takes ttt_steps
    step_decay: float = 0.8  # step k weighs step_decay^k
    loss: LossName = "soft_cross_entropy"  # against the target's distribution on the draft vocabulary
    optimizer: Literal["muon", "adamw"] = "muon"  # muon: matrices by Muon, lm_head and norms by AdamW
    learning_rate: float = 1.5e-3  # AdamW's
    muon_learning_rate: float = 0.02
    warmup_ratio: float = 0.04
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    global_batch: int = 8  # over all processes and accumulation steps
    micro_batch: int = not_in_fingerprint(8)  # in one forward of one process
    target: Literal["replicated", "sharded"] = not_in_fingerprint(
        "replicated"
    )  # a process holds all of it, or of layers a part
    features: Literal["online", "offline"] = not_in_fingerprint(
        "online"
    )  # the target's: a forward in each step, or from disk
    pack: bool = not_in_fingerprint(False)  # a micro-batch's sequences share rows where they fit, apart from each other
    anchors: int | None = None  # roots of a row that steps after the first are unrolled from, drawn anew (null: all)
    checkpointing: bool = not_in_fingerprint(False)  # backward computes the unroll's steps anew: slower, less memory
    max_length: int = 512
    max_steps: int | None = None
    epochs: float = 3.0
    clip: float | None = None  # gradient norm under AdamW (null: 0.5); Muon's updates have a size of their own
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    init: Literal["target", "copied", "random"] = "target"  # copied: without the regression of its fc
    precision: Literal["auto", "bf16", "fp32"] = "auto"  # auto: fp32 where the CPU multiplies that faster, else bf16
    save_every: int = not_in_fingerprint(50)
    eval_every: int = 25
    keep_states: int = not_in_fingerprint(2)
    real_every: int | None = 200  # steps between measurements of accept_length by the engine itself; null: none
    real_prompts: int = 8  # the first of the held-out conversations
    real_max_tokens: int = 48
    real_shapes: tuple[str, ...] | None = None  # "num_steps,top_k,num_draft_tokens"; null: chain and tree of ttt_steps
    real_temperatures: tuple[float, ...] = (0.0, 1.0)
    patience: int | None = None  # stop after so many measurements (forecasts, where there are none) without gain
    rollout_every: int | None = None  # steps after which the engine writes fresh rollouts to train on; null: never
    rollout_prompts: int | None = None  # answered each time; null: as many as the steps until the next time train on
    rollout_temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)  # in turn
    wandb: bool = not_in_fingerprint(False)
    tensorboard: bool = not_in_fingerprint(False)
    wandb_project: str = not_in_fingerprint("toolkit")
    aux_layer_ids: tuple[int, ...] | None = None  # None: (2, n/2, n-3)
    fc_norm: bool = False  # eagle3: each feature is normed before fc (EAGLE-3.1)
    norm_output: bool = False  # eagle3: the next step reads the state after the last norm (EAGLE-3.1)
    sliding_window: int | None = None  # positions that the head's own attention sees (null: all), trained and served
    lm_head: Literal["random", "target", "frozen"] | None = None  # eagle3's: where it and its norm start; null: as init
    token_weight: float = 0.1  # eagle2: of `loss` in a row's loss, as EAGLE publishes
    feature_weight: float = 1.0  # eagle2: of the distance to the target's last hidden state
    mask_shift: int = 0  # shifts the loss mask; anything but 0 is an experiment that shows what the exact mask is worth

    def __post_init__(self) -> None:
        counts = ("ttt_steps", "global_batch", "micro_batch", "max_length", "max_steps", "save_every", "eval_every")
        check_positive(self, "train", *counts, "keep_states", "learning_rate", "muon_learning_rate", "epochs", "clip")
        engine = ("real_every", "real_prompts", "real_max_tokens", "patience", "rollout_every", "rollout_prompts")
        check_positive(self, "train", *engine)
        for name in ("real_temperatures", "rollout_temperatures"):
            value = getattr(self, name)
            need(len(value) > 0 and min(value) >= 0, f"train.{name}", value, "a list of temperatures from 0 (greedy)")
        each = self.real_temperatures
        need(len(set(each)) == len(each), "train.real_temperatures", each, "each temperature once")
        stored = self.features == "offline" and self.rollout_every is not None
        need(not stored, "train.features", "offline", "online under train.rollout_every, whose texts are not stored,")
        if self.real_shapes is not None:
            check_shapes(self.real_shapes, "train.real_shapes")
        need(0 < self.step_decay <= 1, "train.step_decay", self.step_decay, "a factor above 0 and up to 1")
        need(0 <= self.warmup_ratio < 1, "train.warmup_ratio", self.warmup_ratio, "a share from 0 to below 1")
        need(self.weight_decay >= 0, "train.weight_decay", self.weight_decay, "0 or more")
        need(all(0 <= beta < 1 for beta in self.betas), "train.betas", self.betas, "two numbers from 0 to below 1")
        bounded = self.clip is None or self.optimizer == "adamw"
        need(bounded, "train.clip", self.clip, "null under train.optimizer muon, or optimizer: adamw,")
        ids = self.aux_layer_ids
        rising = ids is None or (len(ids) == 3 and list(ids) == sorted(set(ids)) and ids[0] >= 0)
        need(rising, "train.aux_layer_ids", ids, "null or three ascending indices into hidden_states")
        need(self.max_length >= 3, "train.max_length", self.max_length, "at least 3 ids, to predict one from two")
        shared = not self.pack or min(self.micro_batch, self.global_batch) > 1
        need(shared, "train.pack", True, "false, or more than one sequence in train.micro_batch and global_batch,")
        need(self.mask_shift in (0, 1), "train.mask_shift", self.mask_shift, "0 (exact) or 1 (the experiment)")
        check_positive(self, "train", "anchors")
        check_fresh(self)
        check_sharded(self)
        check_head(self)

    def check_processes(self, processes: int) -> None:
        """Raises `RecipeError` when so many processes cannot share the global batch in whole micro-batches.

        More processes than sequences can: the rest of them have none.
        """
        share, rest = divmod(self.global_batch, processes)
        even = f"a multiple of {processes}, the number of training processes, or at most as many,"
        need(share == 0 or not rest, "train.global_batch", self.global_batch, even)
        whole = share <= self.micro_batch or share % self.micro_batch == 0
        need(whole, "train.micro_batch", self.micro_batch, f"a divisor of {share}, the sequences of a process,")


@dataclass(frozen=True)
class BenchSettings:
    """How acceptance is measured. A shape is "num_steps,top_k,num_draft_tokens"; prompts None means the built-in 40.
    Of several prompt files each is a task."""

    prompts: tuple[str, ...] | None = None
    limit: int | None = None
    max_tokens: int = 96
    temperature: float = 0.0
    further_temperatures: tuple[float, ...] = ()  # measured too, each into a record of its own: acceptance-T1.json
    shapes: tuple[str, ...] = ("4,1,5", "4,4,16")
    warmup: int = 2  # prompts decoded before the clock starts

    def __post_init__(self) -> None:
        check_positive(self, "bench", "limit", "max_tokens")
        need(self.warmup >= 0, "bench.warmup", self.warmup, "0 or more prompts")
        need(self.temperature >= 0, "bench.temperature", self.temperature, "0 (greedy) or more")
        others = self.further_temperatures
        once = len({self.temperature, *others}) == 1 + len(others) and min(others, default=0.0) >= 0
        need(once, "bench.further_temperatures", others, "temperatures from 0, each once and none bench.temperature,")
        need(self.prompts is None or len(self.prompts) > 0, "bench.prompts", self.prompts, "a file or more, or null,")
        check_shapes(self.shapes, "bench.shapes")


@dataclass(frozen=True)
class Recipe:
    """One pipeline run. `run_dir` is relative to the working directory and defaults to runs/<name>."""

    name: str
    target: TargetSettings
    seed: int = 0
    run_dir: str = ""
    prompts: PromptSettings = field(default_factory=PromptSettings)
    rollouts: RolloutSettings = field(default_factory=RolloutSettings)
    token_map: TokenMapSettings = field(default_factory=TokenMapSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    bench: BenchSettings = field(default_factory=BenchSettings)

    def __post_init__(self) -> None:
        plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name) is not None
        need(plain, "name", self.name, "a name of letters, digits, '.', '_' or '-' (it names the run folder)")
        need(self.seed >= 0, "seed", self.seed, "0 or more")
        held_out = self.rollouts.held_out
        need(held_out > 0, "rollouts.held_out", held_out, "a share above 0 (training is judged on what it holds out)")
        unread = self.rollouts.keep_features and self.train.features == "online"
        need(not unread, "rollouts.keep_features", True, "train.features: offline, which reads them, or false,")
        bits = self.target.quantization
        whole = bits is None or self.train.target == "replicated"
        need(whole, "target.quantization", bits, "null under train.target sharded, or train.target: replicated,")
        if not self.run_dir:
            object.__setattr__(self, "run_dir", f"runs/{self.name}")


def default_recipe_path() -> Path:
    """The demo recipe of this checkout. Raises `RecipeError` when the package was installed without it."""
    path = REPOSITORY / "recipes" / "smollm2-135m.yaml"
    if not path.is_file():
        raise RecipeError(f"no demo recipe at {path}: `pip install -e .` from a clone, or name a recipe file")
    return path


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, head: HeadName = "eagle3") -> Recipe:
    """Read a recipe file, then apply overrides of the form `section.key=value` (value in YAML) in order.

    head: the kind of head where neither names one.
    Raises FileNotFoundError, or `RecipeError` that names the file and the key.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no recipe at {path}; the demo recipe is recipes/smollm2-135m.yaml")
    tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(tree, dict):
        raise RecipeError(
            f"{path} holds {kind_of(tree)} at its top; a mapping with keys such as name and target is needed"
        )
    for override in overrides:
        apply_override(tree, override)
    train = tree.setdefault("train", {})
    if isinstance(train, dict):
        train.setdefault("head", head)
    try:
        recipe = build_strictly(Recipe, tree)
    except RecipeError as error:
        raise RecipeError(f"{path}{' with overrides' if overrides else ''}: {error}") from None
    idle = idle_measurement_settings(recipe.train)
    if idle:
        log.warning("%s: without effect, since train.real_every is null: %s", path, ", ".join(idle))
    return recipe


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as plain JSON-ready values (tuples become lists)."""

    return _plain(dataclasses.asdict(recipe))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def result_settings(section: Any) -> dict[str, Any]:
    """The keys of one section that decide its result, as JSON-ready values.

    Left out are keys that only say how the work is cut up, stored or shown: a cut-off stage may go on with others.
    """
    return {
        entry.name: _plain(getattr(section, entry.name))
        for entry in dataclasses.fields(section)
        if not entry.metadata.get("not_in_fingerprint")
    }


def print_config(recipe: Recipe) -> None:
    """Print the resolved whole on stdout as YAML that `load_recipe` reads back to the same recipe."""
    print(yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True, default_flow_style=None), end="")
