"""The common configuration of all kinds of draft head, the properties that each kind defines, and the configuration of
heads that read hidden states of several layers of the target and have an output matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

if TYPE_CHECKING:  # serving does not import pydantic
    from toolkit.train_settings import HeadSettings, UnrollSettings


# By the type of a field, as it is written: that of its number, or of each of its numbers.
NUMBERS: dict[str, Any] = {"int": int, "int | None": int, "tuple[int, ...]": int, "float": (int, float)}


class HeadError(ValueError):
    """A draft head that cannot be built for a target."""


class Features(NamedTuple):
    """The target's hidden states that a head reads at each position.

    aux_layer_ids: indices into HF `hidden_states`, whose states are concatenated; None: the last hidden state.
    after_norm: the last hidden state is read after the target's final norm.
    """

    aux_layer_ids: tuple[int, ...] | None = None
    after_norm: bool = True

    @property
    def needed_layers(self) -> int:
        """The smallest number of layers of a target."""
        return 0 if self.aux_layer_ids is None else self.aux_layer_ids[-1]

    def layer_ids(self, n_layers: int) -> tuple[int, ...] | None:
        """The layers to hook for their inputs in a target of `n_layers` layers; None: the output of its body."""
        return self.aux_layer_ids or (None if self.after_norm else (n_layers,))

    def to_dict(self) -> dict[str, Any]:
        """The entries of the `toolkit` block of config.json."""
        return {} if self.aux_layer_ids is None else {"aux_layer_ids": list(self.aux_layer_ids)}


class EngineNames(NamedTuple):
    """The names of a kind of head in other engines.

    sglang: the value of --speculative-algorithm. vllm: `method` in --speculative-config. use_eagle3: SafeAILab's flag.
    """

    sglang: str
    vllm: str
    use_eagle3: bool = False


@dataclass(frozen=True)
class HeadConfig(ABC):
    """The decoder layer's shapes and the target's vocabulary. Each kind of head adds its own fields.

    sliding_window: positions that a query of the head's attention sees, including its own; None: all before it.
    kind: the name in config.json and in recipes. own_vocabulary: the head has its own token map and output matrix;
    otherwise it uses the target's output matrix. in_target: other engines read it only from the target's own
    checkpoint. engine_names: None: no other engine serves it.
    """

    kind: ClassVar[str]
    own_vocabulary: ClassVar[bool] = False
    in_target: ClassVar[bool] = False
    engine_names: ClassVar[EngineNames | None] = None

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    sliding_window: int | None = field(default=None, kw_only=True)

    # -- for training and serving --------------------------------------------------------------------------------------

    @property
    def features(self) -> Features:
        """The target's hidden states that the head reads."""
        return Features()

    @property
    def feature_size(self) -> int:
        """Width of the features of one position."""
        return self.hidden_size

    @property
    def output_size(self) -> int:
        """Rows of the output matrix that gives the head's logits."""
        return self.vocab_size

    @property
    def mtp_layers(self) -> int:
        """Number of layers that draft one level each (MTP layers). The last one drafts all further levels."""
        return 1

    @property
    def drafts_at_once(self) -> int:
        """Tokens that one pass drafts. Above 0 the head is a block drafter (`heads/dspark.py`), else it drafts a token
        a pass."""
        return 0

    @property
    @abstractmethod
    def layers(self) -> int:
        """Number of attention layers of an MTP layer; of other heads, of all."""

    @property
    def regressed_layer(self) -> int | None:
        """The warm start regresses the input of this layer, counted from the end; None: the last hidden state."""
        return 1

    @property
    def target_sizes(self) -> dict[str, int]:
        """Sizes that must equal the target's, by field name: hidden size first, then vocabulary."""
        return {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size}

    @classmethod
    def from_target_config(cls, config: Any, *, vocab_size: int, **own: Any) -> Self:
        """Config of a head as wide as a target of this (text) configuration. own: the kind's own fields."""
        heads = config.num_attention_heads
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
            vocab_size=vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=full_attention_rope(config),
            **own,
        )

    @classmethod
    def from_settings(
        cls, settings: HeadSettings, config: Any, *, vocab_size: int, draft_vocab_size: int, n_layers: int
    ) -> Self:
        """Config of a head with these settings for a target of this (text) configuration and `n_layers` layers."""
        own: dict[str, Any] = {"num_hidden_layers": settings.layers, "sliding_window": settings.sliding_window}
        return cls.from_target_config(config, vocab_size=vocab_size, **own)

    def for_steps(self, steps: int) -> Self:
        """The configuration for a training that unrolls `steps` steps."""
        return self

    def with_vocabulary(self, size: int) -> Self:
        """The configuration for a training on a token map of so many ids."""
        return self

    @staticmethod
    def loss_weights(settings: UnrollSettings) -> tuple[float, float]:
        """Weights of the token loss and of the distance to the target's next feature."""
        return 1.0, 0.0

    # -- config.json ---------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def lacking(cls, values: dict[str, Any]) -> list[str]:
        """Names of the fields without a default that `values` lacks."""
        return [one.name for one in fields(cls) if one.default is MISSING and values.get(one.name) is None]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Config from the keys of a config.json. Keys that are not fields are ignored."""
        names = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    def check_numbers(self) -> None:
        """Raise HeadError for a number that is none, or too small: a config.json may hold anything."""
        for one in fields(self):
            value, kind = getattr(self, one.name), NUMBERS.get(str(one.type))
            if kind is None or value is one.default is None:
                continue
            numbers = value if isinstance(value, tuple) else (value,)
            is_size = kind is int and numbers is not value and one.default in (MISSING, None, 1)
            valid = (isinstance(each, kind) and not isinstance(each, bool) and each >= is_size for each in numbers)
            if not numbers or not all(valid):
                raise HeadError(f"{one.name} is {value!r}; a number of at least {is_size:d} is needed")


def full_attention_rope(config: Any) -> dict[str, Any]:
    """The target's rope settings; if its layers differ (Gemma 3), those of its full-attention layers."""
    rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    rope = dict(rope.get("full_attention", rope))
    # A partial rotary factor belongs to the target's attention; the head rotates all dimensions.
    rope.pop("partial_rotary_factor", None)
    return rope


def default_aux_layer_ids(n_layers: int) -> tuple[int, ...]:
    """The three auxiliary layers of EAGLE-3, as indices into HF `hidden_states` (id k = input of layer k).

    `(2, n//2, n-3)`, the default of EAGLE, vLLM and SGLang. These coincide in models of 4 to 6 layers, which get
    `(1, n//2, n-1)`. Raises HeadError below 4 layers.
    """
    ids = (2, n_layers // 2, n_layers - 3)
    if ids[0] < ids[1] < ids[2]:
        return ids
    if n_layers >= 4:
        return (1, n_layers // 2, n_layers - 1)
    raise HeadError(
        f"the target has {n_layers} layers, but three distinct auxiliary layers are needed; "
        "name them yourself with train.head.aux_layer_ids=[a,b,c] (0 = the embeddings)"
    )


@dataclass(frozen=True)
class AuxHeadConfig(HeadConfig):
    """`aux_layer_ids` index HF `hidden_states`. num_hidden_layers: decoder layers.

    own_settings: the fields that a recipe's `train.head` sets under the same name."""

    own_vocabulary = True
    own_settings: ClassVar[tuple[str, ...]] = ()

    target_hidden_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    num_hidden_layers: int = 1

    @property
    def features(self) -> Features:
        return Features(self.aux_layer_ids)

    @property
    def feature_size(self) -> int:
        return len(self.aux_layer_ids) * self.target_hidden_size

    @property
    def output_size(self) -> int:
        return self.draft_vocab_size

    @property
    def layers(self) -> int:
        return self.num_hidden_layers

    @property
    def regressed_layer(self) -> int:
        return self.num_hidden_layers

    @property
    def target_sizes(self) -> dict[str, int]:
        return {"target_hidden_size": self.target_hidden_size, "vocab_size": self.vocab_size}

    def with_vocabulary(self, size: int) -> Self:
        return replace(self, draft_vocab_size=size)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return super().from_dict({**values, "aux_layer_ids": tuple(values["aux_layer_ids"])})

    @classmethod
    def from_target_config(cls, config: Any, *, vocab_size: int, **own: Any) -> Self:
        own = {"target_hidden_size": config.hidden_size, **own}
        return super().from_target_config(config, vocab_size=vocab_size, **own)

    @classmethod
    def from_settings(
        cls, settings: HeadSettings, config: Any, *, vocab_size: int, draft_vocab_size: int, n_layers: int
    ) -> Self:
        """Raises HeadError if the target has too few layers for the default auxiliary layers."""
        return cls.from_target_config(
            config,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            aux_layer_ids=settings.aux_layer_ids or default_aux_layer_ids(n_layers),
            num_hidden_layers=settings.layers,
            sliding_window=settings.sliding_window,
            **cls.settings_fields(settings),
        )

    @classmethod
    def settings_fields(cls, settings: HeadSettings) -> dict[str, Any]:
        """The kind's own fields in a new head with these settings."""
        return {name: getattr(settings, name) for name in cls.own_settings}
