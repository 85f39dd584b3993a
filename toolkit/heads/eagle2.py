"""The draft head of EAGLE and EAGLE-2 (arXiv 2401.15077, 2406.16858): one architecture, static or dynamic trees.

Shapes: T tokens, H hidden size (the target's), V target vocabulary.

The feature is the target's hidden state AFTER its final norm, the input of the output matrix. The head predicts the
next feature from (feature of position i, embedding of token i+1). The target's output matrix gives the token's logits:

    position         i          i+1         i+2
    token            x_i        x_{i+1}     x_{i+2}  <- predicted, by the target's lm_head from f'_{i+1}
    embedding                   e_{i+1}
    feature          f_i        f'_{i+1}    (the head's output; the next step reads it in place of f_{i+1})
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from toolkit.heads.decoder_layer import Attend, DecoderLayer, Rope
from toolkit.heads.draft_head import DraftHead, LayerCopy, WarmStart
from toolkit.heads.head_config import EngineNames, HeadConfig

if TYPE_CHECKING:  # serving does not import pydantic
    from toolkit.train_settings import UnrollSettings


@dataclass(frozen=True)
class Eagle2Config(HeadConfig):
    """fc_bias: `fc` has a bias (EAGLE's `bias`). attention_bias: q, k and v have one (EAGLE's `qkv_bias`)."""

    kind = "eagle2"
    engine_names = EngineNames(sglang="EAGLE", vllm="eagle")

    num_hidden_layers: int = 1
    fc_bias: bool = True
    attention_bias: bool = False

    @property
    def layers(self) -> int:
        return self.num_hidden_layers

    @property
    def regressed_layer(self) -> None:
        """None: the head's output is the target's last hidden state."""
        return None

    @staticmethod
    def loss_weights(settings: UnrollSettings) -> tuple[float, float]:
        """The head also learns the next feature (arXiv 2401.15077, section 4.2)."""
        return settings.token_weight, settings.feature_weight


class Eagle2Head(DraftHead):
    """The EAGLE head with EAGLE's parameter names: `fc`, `layers.N.*`. Embedding and output matrix are the target's."""

    config_class = Eagle2Config
    config: Eagle2Config

    def __init__(self, config: Eagle2Config) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        # EAGLE's first layer has no norm after fc.
        self.layers = nn.ModuleList(
            DecoderLayer(config, attention_bias=config.attention_bias, input_norm=number > 0)
            for number in range(config.num_hidden_layers)
        )
        self.rope = Rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int, mtp_layer: int = 0
    ) -> Tensor:
        """As `DraftHead.forward`. Returns the next feature [T, H], also the input of the target's output matrix."""
        cos, sin = self.rope(positions, embeds, reach)
        x = self.fc(torch.cat((embeds, hidden), dim=-1))
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return x

    @property
    def writes_alone(self) -> bool:
        return len(self.layers) == 1

    def keys_values(self, embeds: Tensor, hidden: Tensor, positions: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat((embeds, hidden), dim=-1))
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer.keys_values(x, *self.rope(positions, embeds, reach))

    def warm_start(self) -> WarmStart:
        """Start with `fc` as the regression to the next feature and with layers that add zero to it.

        The head has no norm before its first attention or after its last layer, so its output is the feature itself."""
        zeroed = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
        return WarmStart(
            copies=[LayerCopy(layer, zeroed=zeroed) for layer in self.layers if isinstance(layer, DecoderLayer)],
            last_norm=None,
            solved=self.fc,
            solved_reads=lambda embeds, features: torch.cat((embeds, features), dim=-1),
        )
