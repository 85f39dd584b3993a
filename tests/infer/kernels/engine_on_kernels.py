"""The engine with every Triton kernel in place, on a CPU. A program, since Triton's interpreter is switched on before:

    TRITON_INTERPRET=1 python -m tests.infer.kernels.engine_on_kernels

Prints one JSON object: the answers of the reference ops, those of the kernels, how often each kernel ran, the most
drafts that a step accepted, and the answers of three schedules with `deterministic`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.infer.kernels.row_products import row_products
from toolkit.infer.kernels import dispatch as choose

VOCABULARY = 20
SEED = 1  # of a target whose answers vary and a head that is right at times
ran: Counter[str] = Counter()
active = choose.REFERENCE
choose.ops_for = lambda device: active  # before others take it from there

from toolkit.checkpoint.draft_dir import DraftCheckpoint  # noqa: E402
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head  # noqa: E402
from toolkit.infer.engine.engine import Engine  # noqa: E402
from toolkit.infer.request.draft_tree import DraftShape  # noqa: E402
from toolkit.infer.request.params import SamplingParams  # noqa: E402
from toolkit.targets.load import Target  # noqa: E402
from toolkit.tokenmap.token_map import TokenMap  # noqa: E402


def counted(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        ran[name] += 1
        return op(*given)

    return run


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def target_and_head(family: str) -> tuple[Target, DraftCheckpoint]:
    """Grouped heads; few tokens, so the head is right at times. gemma2: layers with and without a window of 6, soft
    caps. qwen3: fused layers, with norms of heads."""
    torch.manual_seed(SEED)
    config: PretrainedConfig
    if family == "gemma2":
        config = Gemma2Config(**SIZES, sliding_window=6, attn_logit_softcapping=5.0)
        model: PreTrainedModel = Gemma2ForCausalLM(config)
    else:
        config = Qwen3Config(**SIZES)
        model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    with torch.no_grad():
        if family == "gemma2":
            model.get_input_embeddings().weight /= 8  # they are scaled up, and would drown the layers
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w1"))
    target = Target(model, PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2"), "tiny", None)
    head_config = Eagle3Config.from_target_config(
        config, vocab_size=VOCABULARY, draft_vocab_size=VOCABULARY, aux_layer_ids=(1, 2, 3)
    )
    head = Eagle3Head(head_config).eval().requires_grad_(False)
    return target, DraftCheckpoint(head, TokenMap.from_ids(list(range(VOCABULARY)), VOCABULARY))


def answers(target: Target, draft: DraftCheckpoint, accepted: list[int]) -> list[list[int]]:
    """Ragged prompts, one read in chunks; a chain, a tree, and a chain whose requests draw."""
    memory = {"max_total_tokens": 256, "chunked_prefill_size": 12}
    engine = Engine(target, draft, DraftShape.chain(2), max_running_requests=2, **memory)
    found = []
    drawn = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
    for shape, more in (("2,1,3", {}), ("3,3,8", {}), ("2,1,3", drawn)):
        engine.set_shape(DraftShape.parse(shape))
        prompts = [[3 + i * 5 % 17 for i in range(n)] for n in (4, 19)]
        for request in engine.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True, **more)):
            found.append(request.output_ids)
            accepted += [event.accepted for event in request.events]
    engine.close()
    return found


def in_order(target: Target, draft: DraftCheckpoint) -> list[Any]:
    """Tokens and log-probabilities with `deterministic`: one by one, with a chain, and with a tree in a batch."""
    prompts, found = [[3 + i * 5 % 17 for i in range(n)] for n in (4, 19)], []
    memory = {"max_total_tokens": 256, "chunked_prefill_size": 12}
    asked = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1)
    for shape, rows in ((None, 1), ("2,1,3", 1), ("3,3,8", 2)):
        drafts = {} if shape is None else {"draft": draft, "shape": DraftShape.parse(shape)}
        engine = Engine(target, **drafts, max_running_requests=rows, **memory, deterministic=True)
        requests = engine.generate(prompts, asked)
        found.append([[one.output_ids, [x.logprob for x in one.logprobs]] for one in requests])
        engine.close()
    return found


if __name__ == "__main__":
    families = [target_and_head(family) for family in ("gemma2", "qwen3")]
    accepted: list[int] = []
    wanted = [answer for pair in families for answer in answers(*pair, accepted)]
    kernels = choose.triton_ops()
    every = {field.name: getattr(kernels, field.name) for field in fields(kernels) if field.name != "paged_width"}
    active = replace(kernels, **{name: counted(name, op) for name, op in every.items() if op is not None})
    got = [answer for pair in families for answer in answers(*pair, accepted)]
    with row_products():
        bits = in_order(*families[0])
    print(json.dumps({"wanted": wanted, "got": got, "ran": ran, "accepted": max(accepted), "in_order": bits}))
