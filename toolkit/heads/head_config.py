"""What the configurations of all draft heads have in common."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class HeadConfig:
    """The decoder layer's shapes and the target's vocabulary; each head adds what is its own.

    sliding_window: positions that a query of the head's own attention sees, its own included; None: all before it.
    Raises ValueError for a window below 1.
    """

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

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window is {self.sliding_window}; at least 1, or null for none, is needed")

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**values)


def layer_like_target(config: Any, vocab_size: int) -> dict[str, Any]:
    """HeadConfig's fields for a layer as wide as the target's own; `config` is the target's (text) configuration."""
    heads = config.num_attention_heads
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "vocab_size": vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": full_attention_rope(config),
    }


def full_attention_rope(config: Any) -> dict[str, Any]:
    """The target's rope settings; where layers differ (Gemma 3), those of its full-attention layers."""
    rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    rope = dict(rope.get("full_attention", rope))
    # A partial rotary factor belongs to the target's own attention; the head rotates whole heads.
    rope.pop("partial_rotary_factor", None)
    return rope
