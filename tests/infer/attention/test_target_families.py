"""Model families the engine reproduces exactly, and families it must refuse rather than answer wrongly."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.infer.conftest import oracle_engine
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.errors import TargetError
from toolkit.heads.eagle2 import Eagle2Config, Eagle2Head
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.infer.attention import target_forward
from toolkit.infer.engine.engine import Engine
from toolkit.infer.graphs import compiled_forward
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams, UnsupportedTargetError
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap

VOCABULARY = 48  # few tokens: an untrained head is right now and then
SIZES = dict(
    vocab_size=VOCABULARY,
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
LATENT = {  # DeepSeek's multi-head latent attention: keys of 16, values of 12
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
ROUTED = {name: value for name, value in LATENT.items() if "expert" in name or "group" in name or "moe" in name}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256}
# Windows of 8 are smaller than most prompts and than every answer: prompts, trees and answers all cross them.
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen2-windows": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "head_dim": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 8, "head_dim": 16, "sliding_window_pattern": 2},
    "phi3": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4, "sliding_window": 8},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16, "sliding_window": 8},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v3-yarn": {**LATENT, "rope_parameters": YARN},
    "glm4": {"head_dim": 16},
    "glm4_moe": {**ROUTED, "first_k_dense_replace": 1, "head_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "cohere2": {"sliding_window": 8, "head_dim": 16, "sliding_window_pattern": 2, "logit_scale": 0.3},
    "olmo2": {},
    "olmo3": {"sliding_window": 8},
    "smollm3": {},
    "starcoder2": {"sliding_window": 8},
    "gpt_neox": {},
    "gpt2": GPT2,
}
SCALED_EMBEDDINGS = ("gemma2", "gemma3_text")  # multiplied by sqrt(hidden size): unscaled ones would drown the layers
# Windows, soft caps, sinks, values narrower than keys, experts, learned positions: what differs for an attention.
TYPICAL = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "gpt2")
REFUSED = {
    "bloom": ({}, "called for layers \\[\\]"),  # ALiBi, in an attention of its own
    "stablelm": ({}, "does not hand the keywords"),
}


def build(name: str, settings: dict, tokenizer, dtype: torch.dtype = torch.float32) -> Target:
    """A random model whose answers vary: its weights are large, and stop ids (0, 2) hardly ever win."""
    torch.manual_seed(0)
    family = name.split("-")[0]
    config = AutoConfig.for_model(family, **{**SIZES, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for part, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        elif part.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=1.0)
        elif part.endswith("A_log"):  # linear attention that forgets slowly: a wrong state changes later tokens
            torch.nn.init.constant_(parameter, math.log(0.02))
    with torch.no_grad():
        model.get_output_embeddings().weight[[0, 2]] = 0
        if family in SCALED_EMBEDDINGS:
            model.get_input_embeddings().weight /= 8
    return Target(model=model, tokenizer=tokenizer, name=name, revision=None)


def build_head(target: Target) -> DraftCheckpoint:
    """An untrained EAGLE-3 head over 40 of the 48 tokens."""
    torch.manual_seed(1)
    config = Eagle3Config.from_target_config(
        target.config, vocab_size=VOCABULARY, draft_vocab_size=40, aux_layer_ids=(1, 2, 3)
    )
    head = Eagle3Head(config).eval().requires_grad_(False)
    return DraftCheckpoint(head=head, token_map=TokenMap.from_ids([0, 2, *range(10, 48)], VOCABULARY))


def build_shared_head(target: Target, config_class: type, head_class: type) -> DraftCheckpoint:
    """An untrained head that scores by the target's own output matrix."""
    torch.manual_seed(1)
    head = head_class(config_class.from_target_config(target.config, vocab_size=VOCABULARY))
    return DraftCheckpoint(
        head=head.eval().requires_grad_(False), token_map=TokenMap.from_ids(range(VOCABULARY), VOCABULARY)
    )


HEADS = {
    "eagle3": build_head,
    "eagle2": lambda target: build_shared_head(target, Eagle2Config, Eagle2Head),
    "mtp": lambda target: build_shared_head(target, MtpConfig, MtpHead),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_exact(family, small_target, reference):
    """Plain and speculative answers equal Hugging Face's generate, in fp32, where runs of up to four are accepted.

    The oracle's random trees make accepted nodes lie anywhere, so entries move in the cache. Answers that were all
    alike would hide what an attention does wrong: they must vary.
    """
    target = build(family, FAMILIES[family], small_target.tokenizer)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in (14, 5, 21, 9, 17)]
    wanted = [reference(target, prompt, 24) for prompt in prompts]
    assert len({token for answer in wanted for token in answer}) > 12, "the answers hardly vary"
    params = SamplingParams(max_tokens=24)
    engine = Engine(target, max_running_requests=2)
    assert [request.output_ids for request in engine.generate(prompts, params, speculative=False)] == wanted
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, wanted, strict=True)}
    for tree in (False, True):
        engine = oracle_engine(target, answers, right=0.85, tree=tree, max_running_requests=2)
        requests = engine.generate(prompts, params)
        assert [request.output_ids for request in requests] == wanted
        assert max(event.accepted for request in requests for event in request.events) > 2


def greedy_after(target: Target, prompt: list[int], answer: list[int]) -> list[int]:
    """What the model itself finds most probable behind the prompt and behind each token of the answer but the last:
    the answer, where that is greedy."""
    with torch.inference_mode():
        ids = torch.tensor([prompt + answer[:-1]])
        return target.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].argmax(dim=-1).tolist()


LITTLE = {"max_total_tokens": 160, "chunked_prefill_size": 60}  # prefixes are kept, prompts cut, and pages run out
AMPLE = {"prefix_cache": False}


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=pytest.mark.slow if one in ("gemma2", "gpt_oss") else ()) for one in TYPICAL],
)
def test_heads_on_family_are_exact(family, small_target):
    """Every head on the family's features, chain and tree, one request and a ragged sixteen; also with
    reused prefixes, prompts in chunks and preemptions. Entries that are off by one in any of them change answers."""
    target = build(family, FAMILIES[family], small_target.tokenizer)
    generator = torch.Generator().manual_seed(1)
    stem = torch.randint(3, VOCABULARY, (18,), generator=generator).tolist()
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in range(16)]
    prompts = [stem + one if len(one) < 4 else one for one in prompts]
    wanted = [
        one.output_ids for one in Engine(target).generate(prompts, SamplingParams(max_tokens=36, ignore_eos=True))
    ]
    assert [greedy_after(target, *pair) for pair in zip(prompts, wanted, strict=True)] == wanted
    accepted = 0
    for head, little in (("eagle3", "3,4,14"), ("eagle2", "3,1,4"), ("mtp", "3,4,14")):
        draft = HEADS[head](target)
        for shape in ("3,1,4", "3,4,14"):
            memory, count, tokens = (LITTLE, 4, 36) if shape == little else (AMPLE, 16, 10)
            engine = Engine(target, draft, DraftShape.parse(shape), context_length=80, **memory)
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            done = engine.generate(prompts[:1], params) + engine.generate(prompts[:count], params)
            engine.check_integrity()
            engine.close()
            assert [one.output_ids for one in done] == [one[:tokens] for one in wanted[:1] + wanted[:count]]
            for seen in ([one.preemptions for one in done], [one.cached_tokens for one in done]):
                assert any(seen) == (shape == little)
            assert shape == little or max(event.batch for one in done for event in one.events) == 16
            accepted += sum(event.accepted for one in done for event in one.events)
    assert accepted > 0, "no head was ever right, so nothing but the root was ever committed"


def again(run):
    """In the place of a CUDA graph: the round runs once more."""
    run()
    return run


@pytest.mark.compile
@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "deepseek_v3", "gpt2"])
def test_family_is_exact_in_compiled_rounds(family, small_target, reference, monkeypatch):
    """Windows, soft caps, sinks, values narrower than keys, experts, unnamed arguments: what each layer asks of its
    attention goes through the compiler unchanged, while layers of a kind share what was compiled."""
    target = build(family, FAMILIES[family], small_target.tokenizer)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in (14, 5)]
    monkeypatch.setattr(compiled_forward, "BACKEND", "eager")
    engine = Engine(
        target, build_head(target), DraftShape.parse("3,4,14"), max_running_requests=2, capture=again,
        torch_compile=True,
    )  # fmt: skip
    requests = engine.generate(prompts, SamplingParams(max_tokens=24))
    engine.close()
    assert [request.output_ids for request in requests] == [reference(target, prompt, 24) for prompt in prompts]
    assert sum(event.accepted for request in requests for event in request.events) > 0


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# Windows, soft caps, sinks, values narrower than keys, learned positions: each layer goes through the kernels.
ON_GPU = ("qwen3", "gemma2", "gpt_oss", "deepseek_v3", "gpt2")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("family", ON_GPU)
def test_family_is_exact_on_a_gpu(family, small_target, reference):
    """Through the kernels, in fp32: prompts read in chunks, chain and tree, a ragged batch of five.

    The wanted answers are Hugging Face's on the same GPU.
    """
    target = build(family, FAMILIES[family], small_target.tokenizer)
    target.model.to("cuda")
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in (14, 5, 40, 9, 17)]
    wanted = [reference(target, prompt, 24) for prompt in prompts]
    head = build_head(target)
    head.head.to("cuda")
    memory = {"max_total_tokens": 464, "chunked_prefill_size": 12}
    engine = Engine(target, head, DraftShape.chain(3), max_running_requests=5, context_length=128, **memory)
    accepted = 0
    for shape in ("3,1,4", "3,4,14"):
        engine.set_shape(DraftShape.parse(shape))
        requests = engine.generate(prompts, SamplingParams(max_tokens=24))
        assert [request.output_ids for request in requests] == wanted
        engine.check_integrity()
        accepted += sum(event.accepted for request in requests for event in request.events)
    engine.close()
    assert accepted > 0, "the head was never right, so nothing but the root was ever committed"


@pytest.mark.parametrize("family", REFUSED)
def test_family_is_refused(family, small_target):
    """State spaces, position biases, attention outside transformers' interface: an error at construction that says why.

    Never wrong answers, and the model keeps the attention it had.
    """
    settings, cause = REFUSED[family]
    with pytest.raises(TargetError, match=cause):
        target = build(family, settings, small_target.tokenizer)
        before = target.model.config._attn_implementation
        try:
            Engine(target)
        finally:
            assert target.model.config._attn_implementation == before


@pytest.mark.parametrize("says", [None, 9])
def test_a_window_that_differs_from_the_models_mask_is_refused(says, small_target):
    """The engine goes by the layer's keyword; a few probed tokens cannot show that the model's mask is another one."""
    target = build("gemma2", FAMILIES["gemma2"], small_target.tokenizer)
    Engine(target)
    target.layers[0].self_attn.sliding_window = says
    with pytest.raises(UnsupportedTargetError, match="layer 0 .* masks it in another way"):
        Engine(target)


def test_an_unknown_attention_keyword_is_refused(small_target, monkeypatch):
    """A family that asks its attention for something new must not be served as if it had not."""
    target = build("gpt_oss", FAMILIES["gpt_oss"], small_target.tokenizer)
    body = target.body
    forward = body.forward
    monkeypatch.setattr(body, "forward", lambda **given: forward(**given, head_bias=torch.ones(4)))
    with pytest.raises(UnsupportedTargetError, match="GptOssAttention calls its attention with head_bias"):
        Engine(target)


DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def test_length_dependent_rope_limits_the_context(small_target):
    """Dynamic ropes change all positions once a length is passed, which cached keys cannot follow."""
    target = build("llama", {"rope_parameters": DYNAMIC_ROPE}, small_target.tokenizer)
    assert Engine(target).context_length == 64


def test_memory_that_runs_out_is_not_an_unsupported_family(tiny_target, monkeypatch):
    def fails(*_given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(target_forward.TargetForward, "compare_logits", fails)
    with pytest.raises(TargetError, match="memory ran out on cpu .*CUDA out of memory") as caught:
        Engine(tiny_target)
    assert not isinstance(caught.value, UnsupportedTargetError)
