"""`deterministic`: an answer's tokens and log-probabilities have the same bits in every schedule.

The models are tiny and random, in bfloat16. Their sizes and attentions differ: what a library computes by the number of
rows, or in the last places of a vector, shows at some of them.
"""

from __future__ import annotations

import copy
import random
import time
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.infer.attention import batch_invariant as attention_modules
from toolkit.infer.attention.metadata import prompt_metadata
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.drafters.lookup import NgramLookup
from toolkit.infer.engine.cpu_door import pack, quantize_model
from toolkit.infer.engine.engine import Engine
from toolkit.infer.kernels import batch_invariant
from toolkit.infer.kernels.paged_reference import Scoring
from toolkit.infer.kernels.reference import additive_mask, attend
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams, UnsupportedTargetError
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap

WORDS = 52
# The second and third have no native attention (heads of 20, windows, caps); the second no native products, and no size
# that is a multiple of a vector.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-odd": {
        "hidden_size": 62,
        "intermediate_size": 102,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 20,
    },  # fmt: skip
    "gemma2": {"sliding_window": 8, "head_dim": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gpt2": {"num_key_value_heads": 4},
}
SHAPES = ("1,1,2", "4,1,5", "3,3,8", "4,4,16", "5,8,32")
NO_PREFIXES = {"prefix_cache": False}


@cache
def build(
    name: str, packed: bool, quantization: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> tuple[Target, DraftCheckpoint]:
    """A random target of few tokens and an untrained head, which is right now and then. packed: as load_engine does."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 0,
        "bos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    config = AutoConfig.for_model(name.split("-")[0], **{**sizes, **FAMILIES[name]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15, mean=float(parameter.dim() == 1))
    words = {f"w{i}": i for i in range(WORDS)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w1")), eos_token="w0")
    model = model.to(dtype).eval().requires_grad_(False)
    if quantization is not None:
        quantize_model(model, quantization, dtype, name)
    target = Target(model, tokenizer, name, dtype=dtype, quantization=quantization)
    head_config = Eagle3Config.from_target_config(
        target.config, vocab_size=WORDS, draft_vocab_size=40, aux_layer_ids=(1, 2, 3)
    )
    head = Eagle3Head(head_config).to(dtype).eval().requires_grad_(False)
    draft = DraftCheckpoint(head=head, token_map=TokenMap.from_ids([0, *range(10, 49)], WORDS))
    if packed:
        pack(target, draft, "none")
    return target, draft


@dataclass(frozen=True)
class Asked:
    """Prompts on shared beginnings, with greedy and sampled settings."""

    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)

    @classmethod
    def of(cls, seed: int, count: int) -> Asked:
        chance, asked = random.Random(seed), cls()
        stems = [[chance.randrange(1, WORDS) for _ in range(length)] for length in (70, 33, 16)]
        for number in range(count):
            tail = [chance.randrange(1, WORDS) for _ in range(chance.randint(1, 20))]
            stem = chance.choice(stems)
            asked.prompts.append(stem[: chance.randint(1, len(stem))] + tail)
            asked.params.append(
                SamplingParams(
                    max_tokens=chance.randint(4, 30), temperature=chance.choice((0.0, 0.8, 1.3)), seed=number,
                    top_p=chance.choice((1.0, 0.9)), top_k=chance.choice((0, 0, 12)), ignore_eos=True,
                    repetition_penalty=chance.choice((1.0, 1.0, 1.2)), logprobs=chance.choice((0, 1, 3, 20, None)),
                    presence_penalty=chance.choice((0.0, 0.0, 0.5)), min_p=chance.choice((0.0, 0.0, 0.02)),
                    logit_bias=chance.choice(((), (), ((5, 2.0),))),
                )
            )  # fmt: skip
        return asked


def written(engine: Engine, asked: Asked, chance: random.Random | None = None) -> list[Any]:
    """What an engine writes, with its log-probabilities. chance: requests arrive at random; None: one by one."""
    requests, left = [], list(zip(asked.prompts, asked.params, strict=True))
    while left or engine.has_work():
        if left and (not engine.has_work() if chance is None else chance.random() < 0.5):
            requests.append(engine.add_request(*left.pop(0)))
        engine.step()
    engine.close()
    return [(one.output_ids, one.logprobs) for one in requests]


def random_schedule(chance: random.Random, target: Target, draft: DraftCheckpoint, **options: Any) -> Engine:
    """An engine with a random batch, chunk size, cache, number of pages, draft and shape."""
    kind = chance.choice(("none", "head", "head", "ngram"))
    shape = DraftShape.parse(chance.choice(SHAPES))
    drafts = {"none": {}, "head": {"draft": draft}, "ngram": {"draft": NgramLookup(min_n=1)}}[kind]
    if drafts:
        options |= {"shape": shape if kind == "head" else DraftShape.chain(shape.num_steps), **drafts}
        options["adaptive"] = chance.random() < 0.3
        options["lookup"] = True if kind == "head" and chance.random() < 0.3 else None
    options |= {"prefix_cache": chance.random() < 0.7, "chunked_prefill_size": chance.choice((7, 16, 64, 1024))}
    options |= {"max_total_tokens": chance.choice((None, 416)), "max_running_requests": chance.choice((1, 3, 8))}
    return Engine(target, context_length=160, **options)


def plain_answers(target: Target, asked: Asked, **options: Any) -> list[Any]:
    """Each request alone, without drafts and reuse."""
    return written(Engine(target, max_running_requests=1, **NO_PREFIXES, **options), asked)


@pytest.mark.parametrize(("name", "packed"), [("llama", True), ("llama-odd", False), ("gemma2", True), ("gpt2", False)])
def test_bits_are_those_of_the_request_alone(name, packed):
    """A product, a sum or a function that rounds by what is computed beside it changes a log-probability, then a token:
    of random schedules one would show it. Nothing here depends on the clock but adaptive shapes, which must not
    matter."""
    target, draft = build(name, packed)
    asked, chance = Asked.of(1, 8), random.Random(f"{name} {packed}")
    wanted = plain_answers(target, asked, deterministic=True)
    for _ in range(2):
        assert written(random_schedule(chance, target, draft, deterministic=True), asked, chance) == wanted


@pytest.mark.slow
def test_preempted_requests_keep_their_bits():
    """Short prompts are taken in together, their answers outgrow the cache: the last lose their pages and are read
    again."""
    target, draft = build("llama", True)
    some = Asked.of(2, 12)
    asked = Asked([ids[:6] for ids in some.prompts], [replace(one, max_tokens=70) for one in some.params])
    memory = {"prefix_cache": False, "chunked_prefill_size": 16, "max_total_tokens": 208, "context_length": 160}
    engine = Engine(target, draft, DraftShape.parse("4,4,16"), max_running_requests=8, deterministic=True, **memory)
    requests = engine.generate(asked.prompts, asked.params)
    engine.close()
    assert sum(one.preemptions for one in requests) >= 4
    assert [(one.output_ids, one.logprobs) for one in requests] == plain_answers(target, asked, deterministic=True)


@pytest.mark.soak
def test_twenty_seconds_of_random_schedules():
    """As above, with new requests in every round, and quantised and float32 targets too."""
    end, seed = time.monotonic() + 20, 0
    while time.monotonic() < end:
        chance = random.Random(seed)
        name, dtype = chance.choice(list(FAMILIES)), chance.choice((torch.bfloat16, torch.bfloat16, torch.float32))
        quantization = chance.choice((None, "int8")) if name != "gpt2" else None  # its Conv1D are refused
        target, draft = build(name, quantization is None, quantization, dtype)
        asked, options = Asked.of(seed, 12), {"deterministic": True}
        wanted = plain_answers(target, asked, **options)
        for _ in range(3):
            found = written(random_schedule(chance, target, draft, **options), asked, chance)
            assert found == wanted, f"seed {seed}: {name}, {dtype}, {quantization}"
        seed += 1


@pytest.mark.parametrize(
    ("dtype", "quantization"), [pytest.param(torch.float32, None, marks=pytest.mark.slow), (torch.bfloat16, "int8")]
)
def test_of_float32_and_quantised_targets(quantization, dtype):
    """The products of int8 weights and of float32 are other code."""
    target, draft = build("llama", quantization is None, quantization, dtype)
    asked, chance = Asked.of(2, 8), random.Random(3)
    wanted = plain_answers(target, asked, deterministic=True)
    assert written(random_schedule(chance, target, draft, deterministic=True), asked, chance) == wanted


def test_a_product_that_rounds_by_row_count_is_found(monkeypatch):
    """The comparison must be able to fail: here products of several rows round otherwise than those of one."""
    target, draft = build("llama", packed=False)
    asked = Asked.of(1, 6)
    options = {"deterministic": True, **NO_PREFIXES}
    wanted = written(Engine(target, **options), asked)

    def by_count(product, x):
        out = product(x)
        return out if x[..., 0].numel() == 1 else out * (1 + 2**-7)

    monkeypatch.setattr(attention_modules, "in_row_blocks", by_count)
    with pytest.raises(UnsupportedTargetError, match="in parts of 1, 1.* differ in bits"):  # before the first request
        Engine(target, **options)
    monkeypatch.setattr(TargetForward, "_compare_bits", lambda _forward: None)
    drafted = written(Engine(target, draft, DraftShape.chain(4), **options), asked)
    assert sum(one != other for one, other in zip(drafted, written(Engine(target, **options), asked), strict=True)) > 3
    monkeypatch.undo()
    assert written(Engine(target, draft, DraftShape.chain(4), **options), asked) == wanted


def test_log_probabilities_of_a_forward_over_the_whole_text():
    """What reinforcement learning compares: a rollout's log-probabilities, and those of one forward over prompt and
    answer by the same engine. A ratio other than 1 would be the engine's rounding."""
    target, draft = build("llama", packed=True)
    asked = Asked.of(4, 4)
    engine = Engine(target, draft, DraftShape.parse("4,4,16"), deterministic=True)
    params = [replace(one, logprobs=1) for one in asked.params]
    for request in engine.generate(asked.prompts, params):
        ids = torch.tensor([request.prompt_ids + request.output_ids])
        found = teacher_forced(engine, ids)[0, len(request.prompt_ids) - 1 : -1]
        chosen = found.gather(1, torch.tensor(request.output_ids)[:, None]).squeeze(1)
        assert chosen.tolist() == [one.logprob for one in request.logprobs]
    engine.close()


@torch.inference_mode()
def teacher_forced(engine: Engine, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [1, T, V] after every token of ids [1, T], by one forward."""
    forward, tokens = engine._forward, ids.shape[1]
    pool = PagePool(1, tokens)
    pool.grow(0, tokens)
    metadata = prompt_metadata(KVCache(forward.kv_shape, pool, in_order=True), 0, [0], tokens)
    hidden = forward(ids, torch.arange(tokens)[None], metadata)
    return engine.target.logits(hidden).float().log_softmax(dim=-1)


def test_other_numbers_of_threads():
    """Threads divide products and loops of long prompts; where the parts end must not matter."""
    target, _ = build("llama", packed=True)
    asked = Asked.of(5, 6)
    wanted = plain_answers(target, asked, deterministic=True)
    try:
        torch.set_num_threads(2)
        assert plain_answers(target, asked, deterministic=True) == wanted
    finally:
        torch.set_num_threads(1)


def test_what_the_option_does_not_hold_for():
    """A mixture of experts multiplies by matrices that are no linear layers; it would answer, with other bits."""
    config = AutoConfig.for_model(
        "mixtral", vocab_size=WORDS, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64,
    )  # fmt: skip
    tokenizer = build("llama", packed=False)[0].tokenizer
    target = Target(AutoModelForCausalLM.from_config(config), tokenizer, "experts")
    with pytest.raises(UnsupportedTargetError, match="`deterministic` is set, and model.layers.0"):
        Engine(target, deterministic=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bits_on_a_gpu(name, dtype):
    """As on a CPU: batches, kept prefixes, chunks, chains and trees."""
    target, draft = build(name, packed=False, dtype=dtype)
    target = replace(target, model=copy.deepcopy(target.model).to("cuda"))
    draft = replace(draft, head=copy.deepcopy(draft.head).to("cuda"))
    asked, chance = Asked.of(1, 16), random.Random(name)
    wanted = plain_answers(target, asked, deterministic=True)
    for _ in range(6):
        assert written(random_schedule(chance, target, draft, deterministic=True), asked, chance) == wanted


def test_attention_in_order_is_attention():
    """The definition for every target without a native attention, against softmax over the keys that a query sees."""
    generator = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(size, generator=generator) for size in ((2, 4, 5, 8), (2, 70, 2, 8), (2, 70, 2, 6)))
    allowed = torch.rand(2, 5, 70, generator=generator) < 0.5
    allowed[:, :, 3] = True
    sinks = torch.randn(4, generator=generator)
    for scoring in (Scoring(0.3), Scoring(0.3, softcap=2.0), Scoring(0.3, sinks=sinks)):
        found = batch_invariant.attend_in_order(q, keys, values, allowed, scoring)
        mask = additive_mask(allowed, 2, torch.float32)
        wanted = attend(
            q, keys.transpose(1, 2), values.transpose(1, 2), mask, scaling=0.3, softcap=scoring.softcap,
            sinks=scoring.sinks,
        )  # fmt: skip
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
