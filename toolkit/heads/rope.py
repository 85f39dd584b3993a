"""Rotary position embedding (arXiv 2104.09864) of Hugging Face's Llama, with its scaling rules."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

# In the other types the frequencies depend on the sequence length, so a table cannot hold them.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class Rope:
    """cos/sin tables, computed in fp32. Not a module: a cast of the head to bf16 must not round the frequencies.

    inv_freq: [head_dim / 2], after scaling. scaling: the factor of cos and sin.
    """

    def __init__(self, rope_parameters: dict[str, Any], head_dim: int, max_position_embeddings: int) -> None:
        rope_type = rope_parameters.get("rope_type", "default")
        if rope_type not in STATIC_ROPE_TYPES:
            raise ValueError(
                f"rope_type {rope_type!r} is not supported in a draft head; {', '.join(STATIC_ROPE_TYPES)} are"
            )
        try:
            config = LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=max_position_embeddings,
                rope_parameters=dict(rope_parameters),
            )
            with torch.device("cpu"):  # a head on the meta device has frequencies too
                source = LlamaRotaryEmbedding(config)
        except Exception as error:  # whatever transformers makes of a wrong or missing value
            raise ValueError(f"rope {rope_parameters} cannot be used: {' '.join(str(error).split())}") from error
        self.inv_freq = source.inv_freq.float()
        self.scaling = float(source.attention_scaling)
        self._tables: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        # A CUDA graph reads the table of its capture by address, so old tables are kept. Sizes double, so all old
        # tables together are smaller than the newest.
        self._outgrown: list[torch.Tensor] = []

    def __call__(self, positions: torch.Tensor, like: torch.Tensor, reach: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, head_dim] for `positions` [T] on `like`'s device, in its dtype; positions < `reach`."""
        cos, sin = self._table(like, reach)[positions].chunk(2, dim=-1)
        return cos, sin

    def _table(self, like: torch.Tensor, reach: int) -> torch.Tensor:
        """cos and sin side by side, [S, 1, 2 * head_dim], of positions 0 .. S-1, S >= `reach`."""
        key = (like.device, like.dtype)
        if key not in self._tables or len(self._tables[key]) < reach:
            size = max(512, 1 << (reach - 1).bit_length())
            angles = torch.outer(torch.arange(size, dtype=torch.float32), self.inv_freq.to("cpu"))
            angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
            if key in self._tables:
                self._outgrown.append(self._tables[key])
            self._tables[key] = (torch.cat((angles.cos(), angles.sin()), dim=-1) * self.scaling).to(*key)
        return self._tables[key]
