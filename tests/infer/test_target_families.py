"""Model families the engine reproduces exactly, and families it must refuse rather than answer wrongly."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.infer.engine import Engine
from toolkit.infer.sampling_params import SamplingParams
from toolkit.infer.target_forward import UnsupportedTargetError
from toolkit.target.load import Target

SIZES = dict(
    vocab_size=400,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
# Windows of 8 are smaller than the prompts, so a bridge that ignores them writes other tokens.
FAMILIES = {
    "qwen2": {},
    "qwen2-windows": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "head_dim": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 8, "head_dim": 16, "sliding_window_pattern": 2},
    "phi3": {"sliding_window": 8},
    "olmo2": {},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "num_experts_per_tok": 2},
}
REFUSED = {
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16, "sliding_window": 8},
    "deepseek_v3": {
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 4,
    },
}


def build(name: str, settings: dict, tokenizer) -> Target:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.split("-")[0], **{**SIZES, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return Target(model=model, tokenizer=tokenizer, name=name, revision=None)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_exact(family, tiny_target, reference, oracle):
    """Plain and speculative (chains and trees with long accepted runs) equal Hugging Face's generate, in fp32."""
    target = build(family, FAMILIES[family], tiny_target.tokenizer)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 390, (n,), generator=generator).tolist() for n in (14, 5, 21)]
    wanted = [reference(target, prompt, 24) for prompt in prompts]
    params = SamplingParams(max_tokens=24)
    engine = Engine(target, max_batch=2)
    assert [request.output_ids for request in engine.generate(prompts, params)] == wanted
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, wanted, strict=True)}
    for tree in (False, True):
        engine.drafter = oracle(answers, target.vocab_size, right=0.85, tree=tree)
        requests = [engine.add_request(prompt, params) for prompt in prompts]
        while engine.has_work():
            engine.step()
        assert [request.output_ids for request in requests] == wanted
        assert sum(event.accepted for request in requests for event in request.events) > 10


@pytest.mark.parametrize("family", REFUSED)
def test_family_is_refused(family, tiny_target):
    """Attention sinks and latent attention are not implemented: a clear error at construction, no wrong answers."""
    target = build(family, REFUSED[family], tiny_target.tokenizer)
    with pytest.raises(UnsupportedTargetError, match="engine"):
        Engine(target)
    assert target.model.config._attn_implementation != "toolkit"


def test_length_dependent_rope_limits_the_context(tiny_target):
    """Dynamic ropes change all positions once a length is passed, which cached keys cannot follow."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    target = build("llama", {"rope_parameters": rope}, tiny_target.tokenizer)
    assert Engine(target).max_context == 64
