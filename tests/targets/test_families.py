"""Every family that a user may name: the same words reach the same parts, or the target is refused by name."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.errors import TargetError
from toolkit.targets.features import AuxCapture, check_packing, target_features
from toolkit.targets.load import read_target
from toolkit.targets.target import Target

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}
FAMILIES = {
    "llama": {},
    "gemma2": {"head_dim": 16, "final_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 16, "sliding_window": 32},
    "olmo2": {},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
    "gpt_neox": {},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
}
# Their modelling code builds its mask without the positions.
NOT_PACKED = {"gpt_oss"}


def random_model(family: str, vocab_size: int, **extra):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, "vocab_size": vocab_size, **extra})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def test_a_soft_cap_of_the_attention_is_not_left_out(tiny_target, sample_ids):
    """Older releases of transformers run Gemma 2 by SDPA, without its cap, and say nothing. In bf16 the difference is
    smaller than what the engine's check at load allows."""
    capped = {"head_dim": 16, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1}
    model, wanted = (random_model("gemma2", tiny_target.vocab_size, **capped) for _ in range(2))
    wanted.set_attn_implementation("eager")
    model.config._attn_implementation_internal = "sdpa"  # as those releases choose
    target = Target(model=model, tokenizer=tiny_target.tokenizer, name="gemma2")
    assert torch.equal(target.model(sample_ids).logits, wanted.eval()(sample_ids).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_each_family(family, tiny_target, sample_ids):
    """Layers, norm and head taken by name must be those the forward uses, soft caps and logit factors included."""
    model = random_model(family, tiny_target.vocab_size, **FAMILIES[family])
    target = Target(model=model, tokenizer=tiny_target.tokenizer, name=family)
    assert (target.n_layers, target.hidden_size, target.vocab_size) == (4, 64, tiny_target.vocab_size)
    assert target.embed_tokens.num_embeddings == target.vocab_size and target.max_context == 256
    seen = []

    def record(module, arguments, output):
        seen.append((module, arguments[0], output if isinstance(output, torch.Tensor) else output[0]))

    for module in (*target.layers, target.final_norm):
        module.register_forward_hook(record)
    hidden = target.body(input_ids=sample_ids, use_cache=False).last_hidden_state
    assert [module for module, _, _ in seen] == [*target.layers, target.final_norm]
    for (_, _, output), (_, following, _) in zip(seen, seen[1:], strict=False):
        assert torch.equal(output, following)
    assert torch.equal(seen[-1][2], hidden)
    assert torch.equal(target.logits(hidden), model(sample_ids).logits)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_each_family_loads_from_a_directory(family, tiny_target, tmp_path, sample_ids):
    """Saved and loaded by name, with its tied or untied head, the model gives the same logits.

    transformers has no sdpa attention for GPT-OSS: asking for it by name would refuse the family.
    """
    model = random_model(family, tiny_target.vocab_size, **FAMILIES[family]).eval()
    model.save_pretrained(tmp_path)
    tiny_target.tokenizer.save_pretrained(tmp_path)
    target = read_target(tmp_path)
    assert torch.equal(target.model(sample_ids).logits, model(sample_ids).logits)


@pytest.mark.parametrize("family, extra", [("mamba", {}), ("bart", {})])
def test_other_bodies_are_refused_by_name(family, extra, tiny_target):
    """A state-space model or a translator's decoder has no layers, norm or head where ours are read."""
    model = random_model(family, tiny_target.vocab_size, **extra)
    with pytest.raises(TargetError, match=f"\\({family}\\) cannot be a target"):
        Target(model=model, tokenizer=tiny_target.tokenizer, name=family)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "gpt_oss"])
def test_packed_sequences_do_not_see_each_other(family, tiny_target):
    """Two sequences in a row give each the states it has alone (1e-4 of values near 1), or the model is refused: a
    family that reads across would train heads on features that serving never sees."""
    model = random_model(family, tiny_target.vocab_size, **FAMILIES[family])
    target = Target(model=model, tokenizer=tiny_target.tokenizer, name=family)
    try:
        check_packing(target)
    except TargetError as error:
        assert family in NOT_PACKED and "train.data.pack=false" in str(error)
        return
    assert family not in NOT_PACKED
    ids = torch.arange(60)[None] * 7 % target.vocab_size
    starts = torch.tensor([0, 21]).repeat_interleave(torch.tensor([21, 39]))[None]
    capture = AuxCapture(target, (1, 3))
    packed = target_features(target, capture, ids, starts).aux
    for part in (slice(0, 21), slice(21, 60)):
        alone = target_features(target, capture, ids[:, part]).aux
        torch.testing.assert_close(packed[:, part], alone, atol=1e-4, rtol=1e-4)
    capture.remove()
