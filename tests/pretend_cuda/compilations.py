"""The variants of Triton kernels that an engine compiles at its start, and those that serving adds. A program:

    python -m tests.pretend_cuda.compilations [--requests 200] [eagle3/4,1,5 adaptive/5,3,12 ..]

Prints one JSON object: by case the number of variants at the start, and the kernels of those that came later. Values do
not matter here, so attention is zero.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from tests.conftest import build_draft, train_tokenizer
from tests.pretend_cuda.device import pretended_cuda
from tests.pretend_cuda.engine_cases import SETTINGS
from tests.pretend_cuda.seen import seen
from toolkit.infer.drafters.ngram_drafter import NgramLookup
from toolkit.infer.engine.engine import Engine
from toolkit.infer.kernels import dispatch
from toolkit.infer.kernels.paged_reference import Pages
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.load.load_engine import build_engine
from toolkit.infer.request.params import SamplingParams
from toolkit.targets.target import Target

CASES = ("none", "eagle3/4,1,5", "eagle3/5,4,16", "adaptive/4,3,12", "ngram/4,1,5", "windowed/4,1,5")
ROWS, CONTEXT, CHUNK = 8, 3072, 256


def build_target(*, windowed: bool) -> Target:
    """Heads as wide as those of real models, and a context that attention splits into many parts; or a window of 300
    keys, and as many key heads as query heads."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer()
    settings = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": CONTEXT, "initializer_range": 0.2,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    if windowed:
        model = MistralForCausalLM(MistralConfig(**settings, num_key_value_heads=4, sliding_window=300))
    else:
        model = LlamaForCausalLM(LlamaConfig(**settings, num_key_value_heads=1))
    return Target(model.to(torch.bfloat16), tokenizer, "small", None)


@contextmanager
def without_attention() -> Iterator[None]:
    """Attention of any size takes no time. To be entered before a device is pretended, which takes the references."""

    def paged(q: Tensor, pages: Pages, *_more: Any) -> Tensor:
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], pages.values.shape[2])

    def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, **_more: Any) -> Tensor:
        return q.new_zeros(*q.shape[:3], v.shape[3])

    ops = replace(dispatch.REFERENCE, attend_causal=paged, attend_tree=paged)
    with (
        patch.object(dispatch, "REFERENCE", ops),
        patch.object(F, "scaled_dot_product_attention", scaled_dot_product_attention),
    ):
        yield


def serve(engine: Engine, requests: int) -> None:
    """Mixed requests as users send them: short and long prompts, a few at a time, of all kinds of sampling."""
    chance, sent = random.Random(0), 0
    kinds = [kind for kinds in SETTINGS.values() for kind in kinds]
    while sent < requests or engine.has_work():
        if sent < requests and chance.random() < 0.2:
            for _ in range(min(chance.choice((1, 1, 3, 12)), requests - sent)):
                length = chance.randint(1, 200) if chance.random() < 0.9 else chance.randint(200, CONTEXT - 64)
                prompt = [chance.randrange(3, engine.target.vocab_size) for _ in range(length)]
                params = SamplingParams(**{"max_tokens": chance.randint(4, 24), **chance.choice(kinds)})
                engine.add_request(prompt, params, speculative=engine.shape is not None and chance.random() < 0.9)
                sent += 1
        engine.step()


def compiled(text: str, host: Target, target: Target, requests: int) -> dict[str, object]:
    name, _, shape = text.partition("/")
    draft = NgramLookup() if name == "ngram" else None
    if name in ("eagle3", "adaptive", "windowed"):
        draft = build_draft(host)
        draft = replace(draft, head=copy.deepcopy(draft.head).to(torch.bfloat16).to("cuda"))
    config = EngineConfig(
        shape=shape or None, adaptive=name == "adaptive" or None, max_running_requests=ROWS, chunked_prefill_size=CHUNK
    )
    seen.compilations.clear()
    replays = seen.replays
    engine = build_engine(config, target, draft).engine
    at_start = dict(seen.compilations)
    serve(engine, requests)
    engine.close()
    late = [key for key in seen.compilations if key not in at_start]
    return {"at_start": len(at_start), "late": [list(key) for key in late], "replays": seen.replays - replays}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("cases", nargs="*", default=CASES)
    args = parser.parse_args()
    hosts = {windowed: build_target(windowed=windowed) for windowed in (False, True)}
    found = {}
    with without_attention(), pretended_cuda():
        for case in args.cases:
            host = hosts[case.startswith("windowed")]
            model = copy.deepcopy(host.model).to("cuda")  # a warm-up is done once for each model
            found[case] = compiled(case, host, replace(host, model=model), args.requests)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
