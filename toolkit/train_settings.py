"""Settings of training: the section `train` of a recipe, and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from toolkit.head_kinds import HEAD_KINDS
from toolkit.recipe_fields import Beta, EachOnce, HeadName, LossName, Shapes, Temperatures, setting
from toolkit.recipe_yaml import RecipeError, Rule, as_json, check

NewWeights = Literal["target", "random", "native"]


@dataclass(frozen=True)
class HeadSettings:
    """The draft head and the weights it starts from."""

    kind: HeadName = setting("eagle3", "the kind of draft head")
    layers: PositiveInt = setting(1, "decoder layers; mtp: layers that draft one level each, of which the last repeats")
    layer: Literal["family", "llama"] = setting(
        "family", "mtp: the decoder layer. family: that of the target's family; llama: Llama's, for any target"
    )
    aux_layer_ids: tuple[int, ...] | None = setting(
        None, "three hidden states of the target that eagle3 and dspark read; null: (2, n/2, n-3) of n layers"
    )
    fc_norm: bool = setting(False, "eagle3: a norm for each feature before fc (EAGLE-3.1)")
    norm_output: bool = setting(False, "eagle3: the next step reads the state after the last norm (EAGLE-3.1)")
    sliding_window: PositiveInt | None = setting(
        None, "latest positions that the head's attention sees, in training and serving; null: all"
    )
    lm_head: Literal["random", "target", "frozen"] | None = setting(
        None, "first own output matrix and norm; target: the target's; frozen: and not trained; null: as `init`"
    )
    vocabulary: Literal["draft", "target"] | None = setting(
        None,
        "eagle2, mtp: ids that the head is trained on and drafts. draft: those of the token map; target: all; null: "
        "draft for mtp, target for eagle2",
    )
    correction: Literal["none", "markov", "dfly"] | None = setting(
        None,
        "dspark: how scores depend on the token before. markov: a bias of low rank; dfly: its embedding corrects the "
        "state; none: not at all, without a confidence, and the masks alone draft (DFlash); null: markov",
    )
    markov_rank: NonNegativeInt = setting(64, "dspark: rank of the Markov bias; 0: no correction")
    causal: bool = setting(False, "dspark: a place of the block sees no later one (JetSpec)")
    mask_token_id: NonNegativeInt | None = setting(None, "dspark: id of the masks; null: the last one")
    init: NewWeights = setting(
        "target",
        "initial weights. target: the target's last layers, and a regression for fc, which has no counterpart in the "
        "target; native (mtp): the MTP module in the target's own checkpoint",
    )
    start_tokens: PositiveInt | None = setting(
        None, "answer tokens that the regression of init: target reads at most; null: 40 for each of its inputs"
    )

    @property
    def mtp_layers(self) -> int:
        """Layers that draft one level each, as `HeadConfig.mtp_layers` of the head."""
        return self.layers if HEAD_KINDS[self.kind].layer_per_step else 1

    @property
    def whole_vocabulary(self) -> bool:
        """Whether the head drafts all ids of the target, whatever the token map keeps."""
        return (self.vocabulary or HEAD_KINDS[self.kind].vocabulary) == "target"


@dataclass(frozen=True)
class UnrollSettings:
    """The unroll of the head (training-time test of EAGLE-3, arXiv 2503.01840) and its loss."""

    ttt_steps: PositiveInt = setting(4, "steps of training-time test, K: the depth that is learned; a block's tokens")
    curriculum: tuple[PositiveFloat, ...] = setting(
        (),
        "shares of the training that unroll 1, 2, ... steps; the rest unrolls ttt_steps",
    )
    step_decay: Annotated[float, Field(gt=0, le=1)] = setting(
        0.8, "the loss of step k has weight step_decay^k (mtp: divided by their sum, as in FastMTP)"
    )
    loss: LossName = setting(
        "soft_cross_entropy", "the loss, against the target's distribution on the draft vocabulary"
    )
    token_weight: NonNegativeFloat = setting(0.1, "eagle2: weight of `loss` in the sum of both losses")
    feature_weight: NonNegativeFloat = setting(
        1.0, "eagle2: weight of the other loss, the distance to the target's last hidden state"
    )
    anchors: PositiveInt | None = setting(
        None,
        "for long contexts: positions of a row from which later steps start, drawn for every micro-batch; null: all",
    )
    checkpointing: bool = setting(
        False, "backward computes the steps again: slower, less memory, the same losses", not_in_fingerprint=True
    )


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimizer and learning rate; the schedule counts optimizer steps."""

    name: Literal["muon", "adamw"] = setting(
        "muon", "muon: Muon for matrices, AdamW for lm_head and norms; adamw: AdamW for all"
    )
    learning_rate: PositiveFloat = setting(1.5e-3, "the highest learning rate of AdamW")
    muon_learning_rate: PositiveFloat = setting(0.02, "the highest learning rate of Muon")
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = setting(
        0.04, "share of the steps in which the learning rate rises"
    )
    schedule: Literal["cosine", "linear", "constant"] = setting("cosine", "the rate after warm-up: to 0, or constant")
    weight_decay: NonNegativeFloat = setting(0.0, "decoupled weight decay of both optimizers")
    betas: tuple[Beta, Beta] = setting((0.9, 0.95), "decay of AdamW's two moments")
    max_grad_norm: PositiveFloat | None = setting(
        None,
        "adamw: a gradient with a larger norm is scaled down to it (null: 0.5); Muon's updates have a fixed norm",
    )


@dataclass(frozen=True)
class DataSettings:
    """The data of a step. Lengths in tokens, batches in sequences."""

    max_length: Annotated[int, Field(ge=3)] = setting(512, "tokens of a sequence; longer rollouts are cut")
    global_batch: PositiveInt = setting(8, "sequences of an optimizer step, over all processes and accumulation steps")
    micro_batch: PositiveInt = setting(8, "sequences of one forward of one process", not_in_fingerprint=True)
    supervise: Literal["answers", "all"] = setting(
        "answers", "tokens that are learned: those of answers, or of prompts too (all)"
    )
    split_rows: PositiveInt = setting(
        1, "processes of a machine that hold a part of each row, for texts too long for one", not_in_fingerprint=True
    )
    pack: bool | None = setting(
        None,
        "short sequences share rows, and none attends to another; one forward takes as many rows as have micro_batch * "
        "max_length tokens; null: on a GPU",
        not_in_fingerprint=True,
    )
    features: Literal["online", "offline"] = setting(
        "online",
        "online: the target's forward computes the features in each step; offline: they are read from disk",
        not_in_fingerprint=True,
    )


@dataclass(frozen=True)
class EvaluationSettings:
    """Forecasts of accept_length, and its measurement by the engine ("real"). Intervals in optimizer steps."""

    eval_every: PositiveInt = setting(25, "optimizer steps between forecasts of accept_length")
    real_every: PositiveInt | None = setting(200, "optimizer steps between measurements by the engine; null: none")
    real_prompts: PositiveInt = setting(8, "the engine answers the first N held-out conversations")
    real_max_tokens: PositiveInt = setting(48, "tokens of each answer of the engine at most")
    real_shapes: Shapes | None = setting(
        None,
        'draft shapes, each "num_steps,top_k,num_draft_tokens" or "num_draft_tokens"; null: a chain and a tree of '
        "ttt_steps",
    )
    real_temperatures: Annotated[Temperatures, EachOnce] = setting((0.0, 1.0), "temperatures of the engine's answers")
    patience: PositiveInt | None = setting(
        None,
        "stop after this many measurements without improvement, or forecasts where real_every is null; null: never",
    )


@dataclass(frozen=True)
class OnPolicySettings:
    """Fresh rollouts, which the engine writes with the head in training as its drafter."""

    every: PositiveInt | None = setting(None, "optimizer steps between fresh rollouts; null: never")
    prompts: PositiveInt | None = setting(
        None,
        "fresh rollouts each time; null: every * global_batch, so that each is trained on once",
    )
    temperatures: Temperatures = setting((0.0, 0.7, 1.0), "temperatures of the fresh rollouts, used in turn")


@dataclass(frozen=True)
class TrackingSettings:
    """Where metrics are logged, in addition to metrics.jsonl."""

    wandb: bool = setting(
        False, "log to Weights & Biases, to the project of WANDB_PROJECT, else toolkit", not_in_fingerprint=True
    )
    tensorboard: bool = setting(False, "write TensorBoard events to the run folder", not_in_fingerprint=True)


@dataclass(frozen=True)
class TrainSettings:
    """Training of a draft head."""

    epochs: PositiveFloat = setting(3.0, "passes over the training rollouts")
    init: str | None = setting(
        None,
        "a head to train further, such as on a fine-tuned copy of its target: a draft directory, another project's "
        "head, or a hub id (org/name, org/name@revision); its kind is train.head.kind; null: a new head",
    )
    max_steps: PositiveInt | None = setting(None, "end after this many optimizer steps; null: after the epochs")
    precision: Literal["auto", "bf16", "fp32"] = setting(
        "auto", "auto: bf16, or fp32 on a CPU that multiplies it faster, which is measured once"
    )
    target: Literal["replicated", "sharded", "tensor"] = setting(
        "replicated",
        "replicated: each process holds the full target; sharded: a part of every layer, which is gathered to run; "
        "tensor: the processes of a machine hold parts that compute together (tensor parallel)",
        not_in_fingerprint=True,
    )
    save_every: PositiveInt = setting(50, "optimizer steps between two training states", not_in_fingerprint=True)
    fewer_threads: bool = setting(
        False,
        "one process on a CPU: fewer threads while other programs use its cores, which is faster than sharing them; "
        "sums then round differently, and the training is not repeatable to the bit",
        not_in_fingerprint=True,
    )
    head: HeadSettings = field(default_factory=HeadSettings)
    unroll: UnrollSettings = field(default_factory=UnrollSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    data: DataSettings = field(default_factory=DataSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    on_policy: OnPolicySettings = field(default_factory=OnPolicySettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)

    def __post_init__(self) -> None:
        rules = (self._head_rules, self._init_rules, self._unroll_rules, self._step_rules, self._engine_rules)
        check(self, "train.", (rule for of in rules for rule in of()))

    @property
    def start(self) -> Literal["head"] | NewWeights:
        """The origin of the initial weights: "head" (train.init), else train.head.init."""
        return self.head.init if self.init is None else "head"

    def _head_rules(self) -> Iterator[Rule]:
        head, steps = self.head, self.unroll.ttt_steps
        ids = head.aux_layer_ids
        rising = ids is None or (len(ids) == 3 and list(ids) == sorted(set(ids)) and ids[0] >= 0)
        yield "head.aux_layer_ids", rising, "three ascending indices into hidden_states are read; give three, or null"
        regressed = head.start_tokens is None or self.start == "target"
        said = "only the regression of a new head with train.head.init=target reads these tokens; set it to null"
        yield "head.start_tokens", regressed, said
        sees = head.sliding_window is None or (head.sliding_window >= steps and not HEAD_KINDS[head.kind].block)
        said = f"a window holds at least ttt_steps ({steps}) positions, dspark heads have none; raise it, or set null"
        yield "head.sliding_window", sees, said
        ranked = head.correction != "markov" or head.markov_rank > 0
        yield "head.correction", ranked, "the bias needs train.head.markov_rank above 0; raise that, or set none"
        ranks = head.correction in (None, "markov") or head.markov_rank in (0, type(head).markov_rank)
        yield "head.markov_rank", ranks, "only the correction markov has a rank; leave it out"
        native = head.init != "native" or HEAD_KINDS[head.kind].native
        yield "head.init", native, "native modules are mtp heads; set it to target or random"
        said = f"training reaches ttt_steps ({steps}) layers only; lower it, or raise train.unroll.ttt_steps"
        yield "head.layers", head.mtp_layers <= steps, said
        # A setting that this kind of head does not use must not look as if it had an effect.
        own = HEAD_KINDS[head.kind].settings
        for kind, other in HEAD_KINDS.items():
            for key in other.settings if kind != head.kind else ():
                section, _, name = key.partition(".")
                part = getattr(self, section)
                value, default = getattr(part, name), getattr(type(part), name)
                # Kinds other than eagle3 always use the target's output matrix.
                unread = key in own or value == default or (key == "head.lm_head" and value == "frozen")
                said = f"only {kind} heads read it, not {head.kind}; set it to {as_json(default)}, the default"
                yield key, unread, f"{said}, or train.head.kind={kind}"

    def _init_rules(self) -> Iterator[Rule]:
        head, new = self.head, self.init is None
        said = "train.init names the head that is trained; leave this at target, or set train.init=null"
        yield "head.init", new or head.init == type(head).init, said
        said = f"it names a head that exists; for new weights set train.init=null train.head.init={self.init}"
        yield "init", self.init not in get_args(NewWeights), said
        said = "train.init brings weights that random ones would replace; set it to null, target or frozen"
        yield "head.lm_head", new or head.lm_head != "random", said

    def _unroll_rules(self) -> Iterator[Rule]:
        unroll, most, layers = self.unroll, self.unroll.ttt_steps - 1, self.head.mtp_layers
        said = "no loss is left, since train.unroll.feature_weight is 0 too; raise one of them"
        yield "unroll.token_weight", unroll.token_weight + unroll.feature_weight > 0, said
        thins = unroll.anchors is None or unroll.ttt_steps > layers
        yield (
            "unroll.ttt_steps",
            most > 0 or not HEAD_KINDS[self.head.kind].block,
            "a block has at least 2 tokens; raise it",
        )
        said = f"anchors thin out the steps after the first {layers}; raise train.unroll.ttt_steps, or set null"
        yield "unroll.anchors", thins, said
        shares, fits = unroll.curriculum, f"each share is of a number of steps below ttt_steps, so up to {most} fit"
        said = f"{fits}, and they sum to less than 1, since the rest unrolls all steps; leave some out or lower them"
        yield "unroll.curriculum", len(shares) <= most and sum(shares) < 1, said
        alike = not shares or layers == 1
        said = "each step has its own MTP layer here, and fewer steps leave some untrained; set it to []"
        yield "unroll.curriculum", alike, said
        said = "measurements fall short while a curriculum unrolls few steps; set it to null, or the curriculum to []"
        yield "evaluation.patience", not shares or self.evaluation.patience is None, said

    def _step_rules(self) -> Iterator[Rule]:
        data, optimizer = self.data, self.optimizer
        bounded = optimizer.max_grad_norm is None or optimizer.name == "adamw"
        said = "Muon's updates have a fixed norm; set it to null, or train.optimizer.name=adamw"
        yield "optimizer.max_grad_norm", bounded, said
        shared = not data.pack or data.global_batch > 1
        said = "one sequence has nothing to share a row; set it to false, or raise global_batch"
        yield "data.pack", shared, said
        for fits, why, instead in (
            (not data.pack, "packed rows are not split", "data.pack=false"),
            (self.target != "tensor", "the same processes divide the target's heads", "target=sharded"),
        ):
            yield "data.split_rows", data.split_rows == 1 or fits, f"{why}; set it to 1, or train.{instead}"

    def _engine_rules(self) -> Iterator[Rule]:
        fresh = self.on_policy.every is not None
        said = "fresh rollouts have no stored features; set it to online, or train.on_policy.every=null"
        yield "data.features", self.data.features == "online" or not fresh, said
        said = "nothing reads it while train.on_policy.every, the steps between fresh rollouts, is null; set that, or "
        for name in changed(self.on_policy, "prompts", "temperatures"):
            yield f"on_policy.{name}", fresh, f"{said}leave this out"
        # The engine runs other numbers of forwards on each process, and those of a sharded target are collectives.
        said = "the engine needs a target that is not sharded; set it to null (`toolkit bench` measures trained heads)"
        whole = self.target == "replicated"
        yield "evaluation.real_every", whole or self.evaluation.real_every is None, said
        yield "on_policy.every", whole or not fresh, said

    def check_processes(self, processes: int) -> None:
        """Raise `RecipeError` when the processes cannot share the global batch in complete micro-batches.

        With more processes than sequences, some processes have no sequence.
        """
        data, group = self.data, self.data.split_rows
        if processes % group:
            raise RecipeError(
                f"train.data.split_rows = {group}, but {processes} training process(es) do not form groups of {group}; "
                f"set --num-processes {group}, or a multiple of it"
            )
        processes //= group
        share, rest = divmod(data.global_batch, processes)
        if share and rest:
            batch, fewer = data.global_batch, max(n for n in range(1, processes) if data.global_batch % n == 0)
            raise RecipeError(
                f"train.data.global_batch = {batch}, but a multiple of {processes}, the number of training processes"
                f"{'' if group == 1 else f' / {group}'}, is needed: set train.data.global_batch={batch - rest} or "
                f"{batch - rest + processes}, or --num-processes {fewer * group}"
            )
        whole = share <= data.micro_batch or share % data.micro_batch == 0
        said = f"a process has {share} sequences, which it must divide; choose a divisor"
        check(self, "train.", [("data.micro_batch", whole, said)])


def changed(section: Any, *names: str) -> list[str]:
    """Return those of `names` whose value is not the default."""
    return [name for name in names if getattr(section, name) != getattr(type(section), name)]
