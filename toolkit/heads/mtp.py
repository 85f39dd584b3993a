"""Multi-token prediction layers in DeepSeek-V3's form (arXiv 2412.19437, section 2.2).

The decoder layer of an MTP layer is Llama's, or that of the target's family (`MtpConfig.layer_config`).

Shapes: T tokens, H hidden size (the target's).

Layer k (from 0) reads at position i the hidden state of layer k-1 (layer 0: of the target) and the embedding of token
i+1+k. The target's output matrix gives the logits of token i+2+k from the layer's normed output:

    position i           layer 0             layer 1             layer 2
    hidden state         target's h_i        layer 0's at i      layer 1's at i
    embedding            x_{i+1}             x_{i+2}             x_{i+3}
    predicts             x_{i+2}             x_{i+3}             x_{i+4}

With fewer layers than steps the last layer runs recursively: at position i+1 it reads its own state of position i and
the token that it predicted there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from toolkit.heads.decoder_layer import Attend, DecoderLayer, KVSizes, RMSNorm, Rope
from toolkit.heads.draft_head import DraftHead, LayerCopy, WarmStart
from toolkit.heads.families import FamilyRope, family_model, family_of, kv_sizes, layer_config, run_layer
from toolkit.heads.head_config import EngineNames, Features, HeadConfig, HeadError

if TYPE_CHECKING:  # serving does not import pydantic
    from toolkit.train_settings import HeadSettings

# Families whose decoder layer is Llama's: our own layer, which torch.compile and tensor parallelism know, computes it.
LLAMA_LIKE = ("llama",)
# Errors of a layer that is called in a way that it does not know.
FOREIGN = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class MtpConfig(HeadConfig):
    """The variants of published MTP layers. The defaults are those of DeepSeek-V3 in SGLang.

    num_mtp_layers: layer k drafts level k+1; the last one drafts all further levels.
    embedding_first: `eh_proj` reads (embedding, hidden); MiMo-7B reads (hidden, embedding).
    target_hidden: read the target's state before or after its final norm.
    zero_first_embedding: set the embedding at position 0 to zero (MiMo, and vLLM's DeepSeek).
    final_norm: `shared_head.norm` exists; ERNIE 4.5 has none, and the output matrix reads the layer's own output.
    layer_config: the configuration of the decoder layers (`families.layer_config`); None: Llama's layer, by the
        sizes of this configuration.
    """

    kind = "mtp"
    in_target = True
    engine_names = EngineNames(sglang="EAGLE", vllm="mtp")

    num_mtp_layers: int = 1
    embedding_first: bool = True
    target_hidden: Literal["post_norm", "pre_norm"] = "post_norm"
    zero_first_embedding: bool = False
    final_norm: bool = True
    layer_config: dict[str, Any] | None = None

    @property
    def features(self) -> Features:
        return Features(after_norm=self.target_hidden == "post_norm")

    @property
    def mtp_layers(self) -> int:
        return self.num_mtp_layers

    @property
    def layers(self) -> int:
        return 1

    @classmethod
    def from_settings(
        cls, settings: HeadSettings, config: Any, *, vocab_size: int, draft_vocab_size: int, n_layers: int
    ) -> MtpConfig:
        own: dict[str, Any] = {"num_mtp_layers": settings.layers, "sliding_window": settings.sliding_window}
        if settings.layer == "family" and config.model_type not in LLAMA_LIKE:
            if settings.sliding_window is not None:
                raise HeadError(
                    f"train.head.sliding_window is set, and the layer of {config.model_type} takes none from the head; "
                    "leave it out, or set train.head.layer to llama"
                )
            own |= _family_settings(config, settings.layers)
        return cls.from_target_config(config, vocab_size=vocab_size, **own)


def _family_settings(config: Any, layers: int) -> dict[str, Any]:
    """Fields of a new head in the form of its target's family.

    Raises HeadError if the family's layer cannot be built, or a head cannot attend as it does (soft caps, sinks)."""
    family = family_of(config.model_type)
    if family.most is not None and layers > family.most:
        raise HeadError(f"train.head.layers = {layers}, but a {family.title} module has {family.most}; set that number")
    own = layer_config(config, layers, **family.layer)
    try:
        with torch.device("meta"):
            decoder = family_model(own).get_decoder()
            kv_sizes(decoder.layers[0], FamilyRope(decoder.rotary_emb), config.hidden_size)
    except (HeadError, *FOREIGN) as error:
        raise HeadError(
            f"the head's layer cannot be that of {config.model_type}: {error}; set train.head.layer to llama for "
            "Llama's layer, which a copy of the target cannot hold (toolkit export --to native)"
        ) from error
    return {"layer_config": own, **family.variants}


def add_mtp_parts(layer: nn.Module, config: MtpConfig, norm: Callable[..., nn.Module]) -> nn.Module:
    """Add an MTP layer's own parts beside those of its decoder layer, as DeepSeek's parameter names have them."""
    size, eps = config.hidden_size, config.rms_norm_eps
    layer.enorm, layer.hnorm = norm(size, eps=eps), norm(size, eps=eps)
    layer.eh_proj = nn.Linear(2 * size, size, bias=False)
    if config.final_norm:
        layer.shared_head = nn.ModuleDict({"norm": norm(size, eps=eps)})
    return layer


class MtpHead(DraftHead):
    """`layers.N.{enorm, hnorm, eh_proj, self_attn, ..., shared_head.norm}`; embedding and output are the target's."""

    config_class = MtpConfig
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList()
        self._family_rope: FamilyRope | None = None
        if config.layer_config is None:
            layers: Iterable[nn.Module] = (
                DecoderLayer(config, attention_bias=False) for _ in range(config.num_mtp_layers)
            )
            norm: Callable[..., nn.Module] = RMSNorm
            self.rope = Rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)
        else:
            decoder = family_model(config.layer_config).get_decoder()
            layers, norm, self._family_rope = decoder.layers, type(decoder.norm), FamilyRope(decoder.rotary_emb)
        self.layers.extend(add_mtp_parts(layer, config, norm) for layer in layers)

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int, mtp_layer: int = 0
    ) -> Tensor:
        """As `DraftHead.forward`: one pass of layer `mtp_layer`. The module's docstring shows its inputs."""
        config, layer = self.config, self.layer(mtp_layer)
        x = self._input(layer, embeds, hidden, positions)
        if self._family_rope is None:
            x = layer(x, *self.rope(positions, embeds, reach), attend)
        else:
            x = run_layer(layer, x, self._family_rope(positions, x), positions, attend)
        return layer.shared_head["norm"](x) if config.final_norm else x

    def _input(self, layer: Any, embeds: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """The input of the decoder layer, [T, H]; arguments as of `forward`."""
        if self.config.zero_first_embedding:
            embeds = embeds.masked_fill((positions == 0)[:, None], 0.0)
        return layer.eh_proj(self._normed_pair(layer, embeds, hidden))

    @property
    def writes_alone(self) -> bool:
        return len(self.layers) == 1 and self._family_rope is None

    def keys_values(self, embeds: Tensor, hidden: Tensor, positions: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        layer = self.layer(0)
        x = self._input(layer, embeds, hidden, positions)
        found: tuple[Tensor, Tensor] = layer.keys_values(x, *self.rope(positions, embeds, reach))
        return found

    def kv_sizes(self) -> KVSizes:
        if self._family_rope is None:
            return super().kv_sizes()
        return kv_sizes(self.layer(0), self._family_rope, self.config.hidden_size)

    def warm_start(self) -> WarmStart:
        """Copy the target's last layer into the first layer, which predicts one position ahead.

        Further layers do the same task one position later, so they start as copies of the first."""
        first = self.layer(0)
        return WarmStart(
            copies=[LayerCopy(first)],
            last_norm=("shared_head.norm.weight", first.shared_head["norm"]) if self.config.final_norm else None,
            solved=first.eh_proj,
            solved_reads=lambda embeds, features: self._normed_pair(first, embeds, features),
            repeats=list(self.layers)[1:],
        )

    def layer(self, number: int) -> Any:
        """MTP layer `number`: a decoder layer with the parts of `add_mtp_parts`."""
        return self.layers[number]

    def _normed_pair(self, layer: Any, embeds: Tensor, hidden: Tensor) -> Tensor:
        """The input of `eh_proj`: [T, H] and [T, H] -> [T, 2H]."""
        pair = (layer.enorm(embeds), layer.hnorm(hidden))
        return torch.cat(pair if self.config.embedding_first else pair[::-1], dim=-1)
