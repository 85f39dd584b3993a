"""Settings of training: the section `train` of a recipe, and the checks across its keys."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from toolkit.recipe_yaml import need

HeadName = Literal["eagle3", "eagle2", "mtp"]
LossName = Literal["soft_cross_entropy", "hard_cross_entropy", "total_variation", "lk_hybrid"]
Beta = Annotated[float, Field(ge=0, lt=1)]


def not_in_fingerprint(default: Any) -> Any:
    """A field that does not decide the result of its stage."""
    return field(default=default, metadata={"not_in_fingerprint": True})


def _draft_shape(text: str) -> str:
    if not re.fullmatch(r"\d+,\d+,\d+", text):
        raise ValueError('it must be "num_steps,top_k,num_draft_tokens"')
    return text


def _some(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values:
        raise ValueError("it must hold at least one value")
    return values


def _each_once(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError("it must hold each value once")
    return values


Some = AfterValidator(_some)
EachOnce = AfterValidator(_each_once)
Shapes = Annotated[tuple[Annotated[str, AfterValidator(_draft_shape)], ...], Some, EachOnce]
Temperatures = Annotated[tuple[NonNegativeFloat, ...], Some]


@dataclass(frozen=True)
class HeadSettings:
    """The draft head and the weights it starts from."""

    kind: HeadName = "eagle3"
    layers: PositiveInt = 1  # mtp: its layers, one a step, the last one fed back; eagle3, eagle2: decoder layers
    aux_layer_ids: tuple[int, ...] | None = None  # null: (2, n/2, n-3)
    fc_norm: bool = False  # eagle3: each feature is normed before fc (EAGLE-3.1)
    norm_output: bool = False  # eagle3: the next step reads the state after the last norm (EAGLE-3.1)
    sliding_window: PositiveInt | None = (
        None  # positions that the head's attention sees (null: all), trained and served
    )
    lm_head: Literal["random", "target", "frozen"] | None = None  # eagle3's: where it and its norm start; null: as init
    init: Literal["target", "copied", "random"] = "target"  # copied: without the regression of its fc

    def __post_init__(self) -> None:
        ids = self.aux_layer_ids
        rising = ids is None or (len(ids) == 3 and list(ids) == sorted(set(ids)) and ids[0] >= 0)
        need(rising, "train.head.aux_layer_ids", ids, "null or three ascending indices into hidden_states")


@dataclass(frozen=True)
class UnrollSettings:
    """The unroll of the head (training-time test of EAGLE-3, arXiv 2503.01840) and its loss."""

    ttt_steps: PositiveInt = 4  # steps of the training-time test, K
    curriculum: tuple[PositiveFloat, ...] = ()  # shares of the training that take 1, 2, .. steps; the rest: ttt_steps
    step_decay: Annotated[float, Field(gt=0, le=1)] = 0.8  # step k weighs step_decay^k
    loss: LossName = "soft_cross_entropy"  # against the target's distribution on the draft vocabulary
    token_weight: NonNegativeFloat = 0.1  # eagle2: of `loss` in a row's loss, as EAGLE publishes
    feature_weight: NonNegativeFloat = 1.0  # eagle2: of the distance to the target's last hidden state
    anchors: PositiveInt | None = None  # roots of a row that later steps are unrolled from, drawn anew (null: all)
    checkpointing: bool = not_in_fingerprint(False)  # backward computes the steps again: slower, less memory
    mask_shift: Literal[0, 1] = 0  # 1 shifts the loss mask: an experiment that shows what the exact mask is worth

    def __post_init__(self) -> None:
        some = self.token_weight + self.feature_weight > 0
        need(some, "train.unroll.token_weight", self.token_weight, "a weight above 0 for this or feature_weight")
        most = self.ttt_steps - 1
        fits = len(self.curriculum) <= most and sum(self.curriculum) < 1
        shares = f"up to {most} shares (one for each number of steps below ttt_steps) that sum to less than 1"
        need(fits, "train.unroll.curriculum", self.curriculum, shares)


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimizer and learning rate; the schedule counts optimizer steps."""

    name: Literal["muon", "adamw"] = "muon"  # muon: matrices by Muon, lm_head and norms by AdamW
    learning_rate: PositiveFloat = 1.5e-3  # AdamW's
    muon_learning_rate: PositiveFloat = 0.02
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.04
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    max_grad_norm: PositiveFloat | None = None  # under AdamW (null: 0.5); Muon's updates have a size of their own

    def __post_init__(self) -> None:
        bounded = self.max_grad_norm is None or self.name == "adamw"
        wanted = "null under train.optimizer.name muon, or name: adamw,"
        need(bounded, "train.optimizer.max_grad_norm", self.max_grad_norm, wanted)


@dataclass(frozen=True)
class DataSettings:
    """What a step reads. Lengths in tokens, batches in sequences."""

    max_length: Annotated[int, Field(ge=3)] = 512  # three ids: one is predicted from two
    global_batch: PositiveInt = 8  # over all processes and accumulation steps
    micro_batch: PositiveInt = not_in_fingerprint(8)  # in one forward of one process
    pack: bool = not_in_fingerprint(False)  # sequences of a micro-batch share rows where they fit; none sees another
    # The target's features: by a forward in each step, or read from disk.
    features: Literal["online", "offline"] = not_in_fingerprint("online")

    def __post_init__(self) -> None:
        shared = not self.pack or min(self.micro_batch, self.global_batch) > 1
        need(shared, "train.data.pack", True, "false, or more than one sequence in micro_batch and global_batch,")


@dataclass(frozen=True)
class EvaluationSettings:
    """Forecasts of accept_length, and its measurement by the engine ("real"). Intervals in optimizer steps."""

    eval_every: PositiveInt = 25
    real_every: PositiveInt | None = 200  # null: the engine measures nothing
    real_prompts: PositiveInt = 8  # the first of the held-out conversations
    real_max_tokens: PositiveInt = 48
    real_shapes: Shapes | None = None  # "num_steps,top_k,num_draft_tokens"; null: chain and tree of ttt_steps
    real_temperatures: Annotated[Temperatures, EachOnce] = (0.0, 1.0)
    patience: PositiveInt | None = None  # stop after so many measurements (or forecasts, where none) without gain


@dataclass(frozen=True)
class OnPolicySettings:
    """Fresh rollouts, written by the engine with the head in training."""

    every: PositiveInt | None = None  # optimizer steps between fresh rollouts; null: never
    prompts: PositiveInt | None = None  # answered each time; null: as many as the steps until the next time train on
    temperatures: Temperatures = (0.0, 0.7, 1.0)  # in turn

    def __post_init__(self) -> None:
        for name in changed(self, "prompts", "temperatures") if self.every is None else ():
            needed = "train.on_policy.every, the steps between fresh rollouts (null: never), or this setting's default"
            need(False, f"train.on_policy.{name}", getattr(self, name), needed)


@dataclass(frozen=True)
class TrackingSettings:
    """Where the metrics go beside metrics.jsonl."""

    wandb: bool = not_in_fingerprint(False)
    wandb_project: str = not_in_fingerprint("toolkit")
    tensorboard: bool = not_in_fingerprint(False)


# Settings that only one kind of head reads.
_OF_KIND = {
    "head.aux_layer_ids": "eagle3",
    "head.fc_norm": "eagle3",
    "head.norm_output": "eagle3",
    "head.lm_head": "eagle3",
    "unroll.token_weight": "eagle2",
    "unroll.feature_weight": "eagle2",
}


@dataclass(frozen=True)
class TrainSettings:
    """Training of a draft head."""

    epochs: PositiveFloat = 3.0
    max_steps: PositiveInt | None = None
    precision: Literal["auto", "bf16", "fp32"] = "auto"  # auto: fp32 where the CPU multiplies that faster, else bf16
    # A process holds the whole target, or a part of each layer.
    target: Literal["replicated", "sharded"] = not_in_fingerprint("replicated")
    save_every: PositiveInt = not_in_fingerprint(50)
    keep_states: PositiveInt = not_in_fingerprint(2)
    head: HeadSettings = field(default_factory=HeadSettings)
    unroll: UnrollSettings = field(default_factory=UnrollSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    data: DataSettings = field(default_factory=DataSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    on_policy: OnPolicySettings = field(default_factory=OnPolicySettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)

    def __post_init__(self) -> None:
        stored = self.data.features == "offline" and self.on_policy.every is not None
        needed = "online under train.on_policy.every, whose texts are not stored,"
        need(not stored, "train.data.features", "offline", needed)
        # A sharded target runs in all processes at once. The engine's rounds differ between processes, which would
        # then wait for each other forever.
        every = {"evaluation.real_every": self.evaluation.real_every, "on_policy.every": self.on_policy.every}
        whole = "null under train.target sharded (the engine needs all of it; `toolkit bench` measures trained heads)"
        for name, steps in every.items() if self.target == "sharded" else ():
            need(steps is None, f"train.{name}", steps, whole)
        self._check_head()
        self._check_unroll()

    def _check_head(self) -> None:
        """A setting that only another kind of head reads must not look as if it worked."""
        for key, kind in _OF_KIND.items():
            section, _, name = key.partition(".")
            part, default = getattr(self, section), getattr(type(getattr(self, section)), name)
            value = getattr(part, name)
            # Other kinds than eagle3 always draft with the target's output matrix.
            fits = kind == self.head.kind or value == default or (name == "lm_head" and value == "frozen")
            need(fits, f"train.{key}", value, f"{default!r} (it belongs to {kind} heads) or train.head.kind={kind},")

    def _check_unroll(self) -> None:
        head, unroll, steps = self.head, self.unroll, self.unroll.ttt_steps
        fits = head.sliding_window is None or head.sliding_window >= steps
        need(fits, "train.head.sliding_window", head.sliding_window, f"at least ttt_steps ({steps}), or null,")
        layers = head.layers if head.kind == "mtp" else 1
        need(layers <= steps, "train.head.layers", layers, f"at most ttt_steps ({steps}), the layers that are trained,")
        later = unroll.anchors is None or steps > layers
        wanted = f"null, or ttt_steps above {layers}: they thin out later steps,"
        need(later, "train.unroll.anchors", unroll.anchors, wanted)
        wanted = "none: a step has its own MTP layer here, and fewer leave some untrained,"
        need(not unroll.curriculum or layers == 1, "train.unroll.curriculum", unroll.curriculum, wanted)
        patience = self.evaluation.patience
        wanted = "null under a curriculum: a shallow unroll's measurements fall short,"
        need(not unroll.curriculum or patience is None, "train.evaluation.patience", patience, wanted)

    def check_processes(self, processes: int) -> None:
        """Raises `RecipeError` when so many processes cannot share the global batch in whole micro-batches.

        More processes than sequences can: the rest of them have none.
        """
        share, rest = divmod(self.data.global_batch, processes)
        even = f"a multiple of {processes}, the number of training processes, or at most as many,"
        need(share == 0 or not rest, "train.data.global_batch", self.data.global_batch, even)
        whole = share <= self.data.micro_batch or share % self.data.micro_batch == 0
        divisor = f"a divisor of {share}, the sequences of a process,"
        need(whole, "train.data.micro_batch", self.data.micro_batch, divisor)

    def idle_settings(self) -> list[str]:
        """Settings of the engine's measurements in a training that has none, which may be switched off for once."""
        if self.evaluation.real_every is not None:
            return []
        # Fresh rollouts are drafted with the first shape.
        shapes = ("real_shapes",) if self.on_policy.every is None else ()
        names = ("real_prompts", "real_max_tokens", *shapes, "real_temperatures")
        return [f"train.evaluation.{name}" for name in changed(self.evaluation, *names)]


def changed(section: Any, *names: str) -> list[str]:
    """Those of `names` that have another value than their default."""
    return [name for name in names if getattr(section, name) != getattr(type(section), name)]


# Former names of keys where they are not the field's own. Fingerprints keep them: older run folders stay valid.
FORMER_NAMES = {
    "head.kind": "head",
    "unroll.curriculum": "ttt_curriculum",
    "optimizer.name": "optimizer",
    "optimizer.max_grad_norm": "clip",
    "on_policy.every": "rollout_every",
    "on_policy.prompts": "rollout_prompts",
    "on_policy.temperatures": "rollout_temperatures",
}
_PLACES = {
    FORMER_NAMES.get(f"{section}.{key.name}", key.name): f"{section}.{key.name}"
    for section, value in vars(TrainSettings()).items()
    if is_dataclass(value)
    for key in fields(value)
}


def moved_keys(train: object) -> list[str]:
    """One line for each key of the mapping `train` that has moved into a section of it."""
    given = train if isinstance(train, dict) else {}
    moved = [name for name in _PLACES if name in given and not isinstance(given[name], dict)]
    return [f"train.{name} is now train.{_PLACES[name]}" for name in moved]
