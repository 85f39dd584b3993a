"""Which layers run fused, that they compute the same, and that others of the model's users see no difference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conftest import train_tokenizer
from toolkit.infer.attention import fused_layer
from toolkit.infer.engine.engine import Engine
from toolkit.infer.kernels import reference
from toolkit.infer.kernels.dispatch import REFERENCE
from toolkit.infer.request.params import SamplingParams
from toolkit.targets.target import Target

SIZES = dict(
    vocab_size=400, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    initializer_range=0.2,
)  # fmt: skip
FUSED = {
    "llama": {},
    "llama-bias": {"attention_bias": True},
    "llama-eager": {"attn_implementation": "eager"},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {},
}
# Another activation in Llama's own layer; SmolLM3 rotates in some layers only, Granite has another residual.
APART = {
    "llama": {"hidden_act": "gelu"},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "granite": {"residual_multiplier": 0.5},
}


def build(family: str, seed: int = 0, **changes: object) -> Target:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family.partition("-")[0], **SIZES | changes)
    return Target(AutoModelForCausalLM.from_config(config), train_tokenizer(), family, None)


@pytest.fixture
def kernels_for_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch that the engine takes for a GPU's kernels."""
    ops = replace(REFERENCE, rms_norm=lambda *given: reference.rms_norm(*given))
    monkeypatch.setattr(fused_layer, "ops_for", lambda _device: ops)


def answers(target: Target, **engine: object) -> list[list[int]]:
    memory = {"max_total_tokens": 1024, "chunked_prefill_size": 12}
    opened = Engine(target, max_running_requests=2, **memory, **engine)
    prompts = [[3 + i * 7 % 300 for i in range(length)] for length in (5, 30)]
    found = opened.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    opened.close()
    return [request.output_ids for request in found]


def fused_count(target: Target, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of layers that ran fused in one answer."""
    calls = set()
    run = fused_layer.FusedLayer.__call__
    monkeypatch.setattr(
        fused_layer.FusedLayer, "__call__", lambda self, *given, **more: (calls.add(self), run(self, *given, **more))[1]
    )
    answers(target)
    return len(calls)


@pytest.mark.parametrize("family", FUSED)
def test_layers_of_llamas_family_run_fused_and_compute_the_same(family, kernels_for_cpu, monkeypatch) -> None:
    """A wrong order of joined rows, a forgotten bias, norm of heads or window writes other tokens."""
    target = build(family, **FUSED[family])
    monkeypatch.setattr(fused_layer, "enabled", False)
    apart = answers(target)
    monkeypatch.setattr(fused_layer, "enabled", True)
    assert answers(target) == apart
    assert fused_count(target, monkeypatch) == SIZES["num_hidden_layers"] + 1  # a copy of one was compared


@pytest.mark.parametrize("family", APART)
def test_other_layers_run_as_they_are(family, kernels_for_cpu, monkeypatch) -> None:
    """Another activation is told by the numbers alone: a copy of one layer was compared."""
    assert fused_count(build(family, **APART[family]), monkeypatch) == (1 if family == "llama" else 0)


def test_the_model_of_others_stays_as_it_was(kernels_for_cpu) -> None:
    """Joined weights are views: transformers' own forward, hooks on layers and the parameters see no difference."""
    target = build("llama")
    ids, seen = torch.arange(9)[None], []
    before, named = target.model(ids).logits, dict(target.model.named_parameters())
    answers(target)
    target.layers[1].register_forward_hook(lambda _module, _given, out: seen.append(out.shape))
    answers(target)
    assert len(seen) > 24, "a fused layer ran without the hooks of its module"
    assert torch.equal(target.model(ids).logits, before)
    assert all(one is named[name] for name, one in target.model.named_parameters())
    q, k = target.layers[0].self_attn.q_proj.weight, target.layers[0].self_attn.k_proj.weight
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()


def test_new_weights_and_biases_reach_fused_layers(kernels_for_cpu, monkeypatch) -> None:
    """Values are copied into the parameters; a joined copy of a bias would keep the old ones."""
    target, other = (build("llama", attention_bias=True, seed=seed) for seed in (0, 1))
    with torch.no_grad():
        for model in (target.model, other.model):
            for name, one in model.named_parameters():
                one.copy_(torch.randn_like(one)) if name.endswith("bias") else None
    before, wanted = answers(target), answers(other)
    with torch.no_grad():
        for name, one in target.model.named_parameters():
            one.copy_(other.model.get_parameter(name))
    assert answers(target) == wanted != before
    target.model.requires_grad_(True)  # a served model can be trained
    target.model(torch.arange(5)[None]).logits.sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_and_dependent_launches_write_the_same_tokens_on_a_gpu(monkeypatch) -> None:
    """A kernel that reads before the one that writes is over shows in some of the tokens. The kernels are the same, so
    the bits are; without fused layers, two logits may be a near-tie."""
    from toolkit.infer.kernels.triton import launch

    target = build("llama", hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, head_dim=128)
    target = replace(target, model=target.model.to("cuda", torch.bfloat16), dtype=torch.bfloat16)
    found = []
    for dependent in (False, True):
        monkeypatch.setattr(launch, "enabled", dependent)
        found += [answers(target, disable_cuda_graph=True), answers(target, cuda_graph_max_bs=2)]
    assert found[1:] == found[:-1]
