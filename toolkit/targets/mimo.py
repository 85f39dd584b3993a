"""MiMo-7B, which transformers does not have: a Qwen 2 model whose checkpoint also holds an MTP module."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM


class MiMoConfig(Qwen2Config):
    """Qwen 2's configuration; num_nextn_predict_layers counts MTP modules."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen 2 as it is; the MTP modules are read apart (`checkpoint/native_mtp.py`)."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"^model\.mtp_layers\."]


AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)
