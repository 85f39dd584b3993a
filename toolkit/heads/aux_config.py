"""The configuration of heads that read hidden states of several layers of the target and have an output matrix."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from toolkit.heads.head_config import Features, HeadConfig, HeadError

if TYPE_CHECKING:  # serving does not import pydantic
    from toolkit.train_settings import HeadSettings


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
    """`aux_layer_ids` index HF `hidden_states`. num_hidden_layers: decoder layers. Raises ValueError for less than one.

    own_settings: the fields that a recipe's `train.head` sets under the same name."""

    own_vocabulary = True
    own_settings: ClassVar[tuple[str, ...]] = ()

    target_hidden_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    num_hidden_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_hidden_layers < 1:
            raise ValueError(f"{self.kind} config: num_hidden_layers is {self.num_hidden_layers}; at least 1 is needed")

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
            **{name: getattr(settings, name) for name in cls.own_settings},
        )
