"""Settings of training: the section `train` of a recipe, and the checks of its keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from toolkit.head_kinds import HEAD_KINDS
from toolkit.recipe_yaml import Rule, check

LossName = Literal["soft_cross_entropy", "hard_cross_entropy", "total_variation", "lk_hybrid"]
Beta = Annotated[float, Field(ge=0, lt=1)]


def not_in_fingerprint(default: Any, former: str | None = None) -> Any:
    """Return a field that does not affect the result of its stage. former: its dotted name before it was renamed."""
    return field(default=default, metadata={"not_in_fingerprint": True, "former": former})


def renamed(default: Any, former: str) -> Any:
    """Return a field whose dotted name was `former`. Errors name the new one; fingerprints keep the last part of the
    former one, so that older run folders stay valid."""
    return field(default=default, metadata={"former": former})


def needs(valid: Callable[[Any], object], needed: str) -> AfterValidator:
    """Return a constraint: values for which `valid` is false are errors that say `needed`."""

    def checked(value: Any) -> Any:
        if not valid(value):
            raise ValueError(f"it must {needed}")
        return value

    return AfterValidator(checked)


HeadName = Annotated[str, needs(HEAD_KINDS.__contains__, f"be one of {', '.join(HEAD_KINDS)}")]
Some = needs(len, "hold at least one value")
EachOnce = needs(lambda values: len(set(values)) == len(values), "hold each value once")
Shape = Annotated[str, needs(re.compile(r"\d+,\d+,\d+").fullmatch, 'be "num_steps,top_k,num_draft_tokens"')]
Shapes = Annotated[tuple[Shape, ...], Some, EachOnce]
Temperatures = Annotated[tuple[NonNegativeFloat, ...], Some]


@dataclass(frozen=True)
class HeadSettings:
    """The draft head and the weights it starts from."""

    kind: HeadName = renamed("eagle3", "train.head")
    layers: PositiveInt = 1  # mtp: one layer for each step, the last one repeats; eagle3, eagle2: decoder layers
    aux_layer_ids: tuple[int, ...] | None = None  # null: (2, n/2, n-3)
    fc_norm: bool = False  # eagle3: a norm for each feature before fc (EAGLE-3.1)
    norm_output: bool = False  # eagle3: the next step reads the state after the last norm (EAGLE-3.1)
    sliding_window: PositiveInt | None = None  # positions that its attention sees, in training and serving; null: all
    lm_head: Literal["random", "target", "frozen"] | None = None  # eagle3: initial lm_head and norm; null: as init
    init: Literal["target", "copied", "random"] = "target"  # copied: as target, without the regression for fc

    @property
    def stages(self) -> int:
        """Layers that draft one level each, as `HeadConfig.stages` of the head that these settings ask for."""
        return self.layers if HEAD_KINDS[self.kind].layer_per_step else 1


@dataclass(frozen=True)
class UnrollSettings:
    """The unroll of the head (training-time test of EAGLE-3, arXiv 2503.01840) and its loss."""

    ttt_steps: PositiveInt = 4  # steps of the training-time test, K
    # shares of the training with 1, 2, .. steps; then ttt_steps
    curriculum: tuple[PositiveFloat, ...] = renamed((), "train.ttt_curriculum")
    step_decay: Annotated[float, Field(gt=0, le=1)] = 0.8  # step k has weight step_decay^k
    loss: LossName = "soft_cross_entropy"  # against the target's distribution on the draft vocabulary
    token_weight: NonNegativeFloat = 0.1  # eagle2: weight of `loss`, as in EAGLE
    feature_weight: NonNegativeFloat = 1.0  # eagle2: weight of the distance to the target's last hidden state
    anchors: PositiveInt | None = None  # roots of a row in later steps, drawn for every micro-batch; null: all
    checkpointing: bool = not_in_fingerprint(False)  # backward computes the steps again: slower, less memory
    mask_shift: Literal[0, 1] = 0  # 1 shifts the loss mask, to measure what the exact mask is worth


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimizer and learning rate; the schedule counts optimizer steps."""

    # muon: Muon for matrices, AdamW for lm_head and norms
    name: Literal["muon", "adamw"] = renamed("muon", "train.optimizer")
    learning_rate: PositiveFloat = 1.5e-3  # of AdamW
    muon_learning_rate: PositiveFloat = 0.02
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.04
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    # with AdamW (null: 0.5); Muon's updates have a fixed norm
    max_grad_norm: PositiveFloat | None = renamed(None, "train.clip")


@dataclass(frozen=True)
class DataSettings:
    """The data of a step. Lengths in tokens, batches in sequences."""

    max_length: Annotated[int, Field(ge=3)] = 512  # at least 3: one id is predicted from two
    global_batch: PositiveInt = 8  # over all processes and accumulation steps
    micro_batch: PositiveInt = not_in_fingerprint(8)  # of one forward of one process
    pack: bool = not_in_fingerprint(False)  # pack sequences of a micro-batch into rows; none attends to another
    # online: the target's forward computes the features in each step; offline: they are read from disk.
    features: Literal["online", "offline"] = not_in_fingerprint("online")


@dataclass(frozen=True)
class EvaluationSettings:
    """Forecasts of accept_length, and its measurement by the engine ("real"). Intervals in optimizer steps."""

    eval_every: PositiveInt = 25
    real_every: PositiveInt | None = 200  # null: no measurement by the engine
    real_prompts: PositiveInt = 8  # number of held-out conversations, the first ones
    real_max_tokens: PositiveInt = 48
    real_shapes: Shapes | None = None  # "num_steps,top_k,num_draft_tokens"; null: chain and tree of ttt_steps
    real_temperatures: Annotated[Temperatures, EachOnce] = (0.0, 1.0)
    patience: PositiveInt | None = None  # stop after this many measurements (else forecasts) without improvement


@dataclass(frozen=True)
class OnPolicySettings:
    """Fresh rollouts, which the engine writes with the head in training as its drafter."""

    # optimizer steps between fresh rollouts; null: never
    every: PositiveInt | None = renamed(None, "train.rollout_every")
    # rollouts of each interval; null: every * global_batch, each trained on once
    prompts: PositiveInt | None = renamed(None, "train.rollout_prompts")
    temperatures: Temperatures = renamed((0.0, 0.7, 1.0), "train.rollout_temperatures")  # used in turn


@dataclass(frozen=True)
class TrackingSettings:
    """Where metrics are logged, in addition to metrics.jsonl."""

    wandb: bool = not_in_fingerprint(False)
    wandb_project: str = not_in_fingerprint("toolkit")
    tensorboard: bool = not_in_fingerprint(False)


@dataclass(frozen=True)
class TrainSettings:
    """Training of a draft head."""

    epochs: PositiveFloat = 3.0
    max_steps: PositiveInt | None = None
    precision: Literal["auto", "bf16", "fp32"] = "auto"  # auto: fp32 on CPUs that multiply it faster, else bf16
    # replicated: each process holds the full target; sharded: each process holds a part of every layer.
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
        check(self, "train.", (*self._head_rules(), *self._unroll_rules(), *self._step_rules(), *self._engine_rules()))

    def _head_rules(self) -> Iterator[Rule]:
        head, steps = self.head, self.unroll.ttt_steps
        ids = head.aux_layer_ids
        rising = ids is None or (len(ids) == 3 and list(ids) == sorted(set(ids)) and ids[0] >= 0)
        yield "head.aux_layer_ids", rising, "null or three ascending indices into hidden_states"
        sees = head.sliding_window is None or head.sliding_window >= steps
        yield "head.sliding_window", sees, f"at least ttt_steps ({steps}), or null,"
        yield "head.layers", head.stages <= steps, f"at most ttt_steps ({steps}), the layers that are trained,"
        # A setting that this kind of head does not use must not look as if it had an effect.
        own = HEAD_KINDS[head.kind].settings
        for kind, other in HEAD_KINDS.items():
            for key in other.settings if kind != head.kind else ():
                section, _, name = key.partition(".")
                part = getattr(self, section)
                value, default = getattr(part, name), getattr(type(part), name)
                # Kinds other than eagle3 always use the target's output matrix.
                unread = key in own or value == default or (key == "head.lm_head" and value == "frozen")
                yield key, unread, f"{default!r} (it belongs to {kind} heads) or train.head.kind={kind},"

    def _unroll_rules(self) -> Iterator[Rule]:
        unroll, most = self.unroll, self.unroll.ttt_steps - 1
        layers = self.head.stages
        yield "unroll.token_weight", unroll.token_weight + unroll.feature_weight > 0, "this or feature_weight above 0"
        thins = unroll.anchors is None or unroll.ttt_steps > layers
        yield "unroll.anchors", thins, f"null, or ttt_steps above {layers}: they thin out later steps,"
        shares = unroll.curriculum
        fits = f"up to {most} shares (one for each number of steps below ttt_steps) that sum to less than 1"
        yield "unroll.curriculum", len(shares) <= most and sum(shares) < 1, fits
        fits = "none: a step has its own MTP layer here, and fewer leave some untrained,"
        yield "unroll.curriculum", not shares or layers == 1, fits
        fits = "null under a curriculum: a shallow unroll's measurements fall short,"
        yield "evaluation.patience", not shares or self.evaluation.patience is None, fits

    def _step_rules(self) -> Iterator[Rule]:
        data, optimizer = self.data, self.optimizer
        bounded = optimizer.max_grad_norm is None or optimizer.name == "adamw"
        yield "optimizer.max_grad_norm", bounded, "null under train.optimizer.name muon, or name: adamw,"
        shared = not data.pack or min(data.micro_batch, data.global_batch) > 1
        yield "data.pack", shared, "false, or more than one sequence in micro_batch and global_batch,"

    def _engine_rules(self) -> Iterator[Rule]:
        fresh = self.on_policy.every is not None
        online = "online under train.on_policy.every, whose texts are not stored,"
        yield "data.features", self.data.features == "online" or not fresh, online
        needed = "train.on_policy.every, the steps between fresh rollouts (null: never), or this setting's default"
        for name in changed(self.on_policy, "prompts", "temperatures"):
            yield f"on_policy.{name}", fresh, needed
        # Every forward of a sharded target is a collective. The engine runs different numbers of forwards on each
        # process, so the processes would wait for each other forever.
        whole = "null under train.target sharded (the engine needs all of it; `toolkit bench` measures trained heads)"
        yield "evaluation.real_every", self.target == "replicated" or self.evaluation.real_every is None, whole
        yield "on_policy.every", self.target == "replicated" or not fresh, whole

    def check_processes(self, processes: int) -> None:
        """Raise `RecipeError` when the processes cannot share the global batch in complete micro-batches.

        With more processes than sequences, some processes have no sequence.
        """
        data = self.data
        share, rest = divmod(data.global_batch, processes)
        even = f"a multiple of {processes}, the number of training processes, or at most as many,"
        check(self, "train.", [("data.global_batch", share == 0 or not rest, even)])
        whole = share <= data.micro_batch or share % data.micro_batch == 0
        check(self, "train.", [("data.micro_batch", whole, f"a divisor of {share}, the sequences of a process,")])

    def idle_settings(self) -> list[str]:
        """Settings of the engine's measurements that have no effect because real_every is null. They are no error: an
        override may have switched the measurements off."""
        if self.evaluation.real_every is not None:
            return []
        # Fresh rollouts use the first shape.
        shapes = ("real_shapes",) if self.on_policy.every is None else ()
        names = ("real_prompts", "real_max_tokens", *shapes, "real_temperatures")
        return [f"train.evaluation.{name}" for name in changed(self.evaluation, *names)]


def changed(section: Any, *names: str) -> list[str]:
    """Return those of `names` whose value is not the default."""
    return [name for name in names if getattr(section, name) != getattr(type(section), name)]
