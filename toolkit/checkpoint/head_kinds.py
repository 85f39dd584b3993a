"""The kinds of head a draft directory can hold, and the config keys that other engines read of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch

from toolkit.heads.eagle2 import Eagle2Config, Eagle2Head
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.heads.head_config import HeadConfig
from toolkit.heads.mtp import MtpConfig, MtpHead

DraftHead = Eagle3Head | Eagle2Head | MtpHead

AUX_CONVENTION = "hidden_states: id k is the input of layer k, the output of layer k-1"
LAST_CONVENTION = "the target's last hidden state after its final norm, as its output matrix reads it"
BEFORE_NORM_CONVENTION = "the target's last hidden state before its final norm"


@dataclass(frozen=True)
class HeadKind:
    """name: the word in config.json. own_vocabulary: the head has a token map and an output matrix of its own.

    serving_keys(config): the keys of other engines beside the config's own fields. features(config): which of the
    target's hidden states it reads, in words and numbers. variants: config fields that are written only where they
    differ from their default, so that a plain head's config.json says nothing another loader reads differently.
    """

    name: str
    config_class: type[HeadConfig]
    head_class: Callable[[Any], DraftHead]
    own_vocabulary: bool
    serving_keys: Callable[[Any], dict[str, Any]]
    features: Callable[[Any], dict[str, Any]]
    variants: frozenset[str] = frozenset()

    def empty_head(self, config: HeadConfig) -> DraftHead:
        """A head whose weights are all to be loaded: NaN, so that a forgotten one is loud."""
        head = self.head_class(config)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.fill_(float("nan"))
        return head

    def lacking(self, values: dict[str, Any]) -> list[str]:
        """Names of the config's fields that `values` has not; variants may be absent."""
        wanted = (one.name for one in fields(self.config_class) if one.name not in self.variants)
        return [name for name in wanted if values.get(name) is None]

    def config_values(self, config: HeadConfig) -> dict[str, Any]:
        """The config's fields as JSON holds them, without the variants that are at their default."""
        plain = {
            one.name
            for one in fields(self.config_class)
            if one.name in self.variants and getattr(config, one.name) == one.default
        }
        return {name: value for name, value in config.to_dict().items() if name not in plain}

    def config_from(self, values: dict[str, Any]) -> HeadConfig:
        names = {one.name for one in fields(self.config_class)}
        return self.config_class.from_dict({name: value for name, value in values.items() if name in names})


WINDOW = frozenset({"sliding_window"})
EAGLE3_VARIANTS = frozenset(one.name for one in fields(Eagle3Config) if one.default is not MISSING)


def _eagle3_keys(config: Eagle3Config) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": config.num_hidden_layers,
        "attention_bias": config.attention_bias,
        "norm_before_residual": config.norm_before_residual,
    }


def _eagle2_keys(config: Eagle2Config) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "bias": config.fc_bias,
        "qkv_bias": config.attention_bias,
    }


def _mtp_keys(config: MtpConfig) -> dict[str, Any]:
    # No other engine serves MTP layers apart from their target, so there is no architecture's name to borrow.
    return {
        "architectures": ["MtpDraftHead"],
        "model_type": "mtp_draft_head",
        "num_nextn_predict_layers": config.num_mtp_layers,
    }


def _mtp_features(config: MtpConfig) -> dict[str, Any]:
    return {"features": LAST_CONVENTION if config.target_hidden == "post_norm" else BEFORE_NORM_CONVENTION}


KINDS = {
    kind.name: kind
    for kind in (
        HeadKind(
            "eagle3",
            Eagle3Config,
            Eagle3Head,
            True,
            _eagle3_keys,
            lambda config: {
                "aux_layer_ids": list(config.aux_layer_ids),
                "aux_layer_ids_convention": AUX_CONVENTION,
            },
            EAGLE3_VARIANTS,
        ),
        HeadKind(
            "eagle2",
            Eagle2Config,
            Eagle2Head,
            False,
            _eagle2_keys,
            lambda _config: {"features": LAST_CONVENTION},
            WINDOW,
        ),
        HeadKind("mtp", MtpConfig, MtpHead, False, _mtp_keys, _mtp_features, WINDOW),
    )
}


def window_keys(config: HeadConfig) -> dict[str, Any]:
    """What vLLM and speculators read of a sliding window, which they take from `layer_types` alone."""
    if config.sliding_window is None:
        return {}
    layers = int(getattr(config, "num_hidden_layers", 0) or getattr(config, "num_mtp_layers", 1))
    return {"sliding_window": config.sliding_window, "layer_types": ["sliding_attention"] * layers}


def kind_of(config: HeadConfig) -> HeadKind:
    """The kind whose config this is."""
    return next(kind for kind in KINDS.values() if type(config) is kind.config_class)
