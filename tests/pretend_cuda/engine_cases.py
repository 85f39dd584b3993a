"""The engine on a CUDA device that is not there, in many configurations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mode
from typing import Any
from unittest.mock import patch

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.infer.conftest import (
    DSPARK_HEADS,
    build_shared_head,
    build_small_draft,
    build_small_dspark,
    build_small_target,
)
from tests.pretend_cuda.device import pretended_cuda
from tests.pretend_cuda.seen import seen
from toolkit.bench.side_by_side import PerfectDrafter
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.drafters.lookup import NgramLookup
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.server.protocol import CompletionRequest
from toolkit.infer.server.request_params import default_sampling, request_params
from toolkit.targets.target import Target

ROWS = 2
QWEN25 = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
LENGTHS = (5, 19, 2, 9)  # ragged prompts, one read in chunks; more than ROWS, so that rows change
TEXT = [7, 3, 11, 3, 5]  # prompts repeat it, for lookup
# Settings of requests, in turn.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "cut": [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.7, "top_k": 5, "min_p": 0.01}, {}],
    "served": [{}],  # nothing but lengths and seeds: the rest is the server's default for the target
    "asking": [
        {}, {"temperature": 0.8}, {"logprobs": 1, "max_tokens": 9},
        {"logprobs": 3, "logit_bias": {7: 1.0}, "repetition_penalty": 1.2, "min_tokens": 4},
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """draft: a name as in tests/infer/conftest.py, "none", "composed", "adaptive" or "perfect" (the answers).
    settings: of SETTINGS; "served": of a target of Qwen2.5's layers and generation config.
    verify: as of the engine. deterministic: any text; "": without."""

    draft: str
    shape: str
    settings: str
    verify: str = "target"
    deterministic: str = ""

    @classmethod
    def parse(cls, text: str) -> Case:
        return cls(*text.split("/"))


def target_of(case: Case) -> Target:
    small = build_small_target()
    if case.settings != "served":
        return small
    torch.manual_seed(3)
    sizes = {
        key: value for key, value in small.config.to_diff_dict().items() if key not in ("model_type", "architectures")
    }
    model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    for name, weight in model.named_parameters():
        if name.endswith("bias"):  # of queries, keys and values; transformers starts them at 0
            torch.nn.init.normal_(weight, std=0.25)
    model.generation_config.update(**QWEN25)
    return replace(small, model=model)


def draft_of(name: str, target: Target) -> Draft | None:
    if name == "none":
        return None
    if name in ("ngram", "perfect"):
        return NgramLookup(min_n=1)
    if name in ("eagle3", "composed", "adaptive"):
        return build_small_draft(target)
    return build_small_dspark(target, name) if name in DSPARK_HEADS else build_shared_head(target, name)


def engine_of(case: Case, target: Target, verify: str, known: list[list[Any]] | None = None, **how: Any) -> Engine:
    """An engine of the case with a head on the target's device. known: the answers, which "perfect" drafts."""
    draft = draft_of(case.draft, target)
    if isinstance(draft, DraftCheckpoint):
        draft = replace(draft, head=copy.deepcopy(draft.head).to(target.device))
    engine = Engine(
        target, draft, None if draft is None else DraftShape.parse(case.shape), max_running_requests=ROWS,
        context_length=128, verify=verify, adaptive=case.draft == "adaptive",
        deterministic=bool(case.deterministic),
        lookup=True if case.draft == "composed" else None,
        max_total_tokens=1400, chunked_prefill_size=16, short_lived=True, **how,
    )  # fmt: skip
    if case.draft == "perfect":
        drafter = engine.drafter = PerfectDrafter(DraftShape.parse(case.shape).num_steps)
        drafter.answers = {seed: tuple(ids) for seed, (ids, *_) in enumerate(known or ())}
    return engine


def answers(case: Case, engine: Engine, step: Callable[[], Any] | None = None) -> list[list[Any]]:
    """Of every request: its tokens, the drafts accepted by step (not of adaptive drafting, which looks at the clock),
    and the tokens of its log-probabilities. One of those that ask is not speculative."""
    generator, kinds, requests = torch.Generator().manual_seed(1), SETTINGS[case.settings], []
    for i, length in enumerate(LENGTHS):
        prompt = torch.randint(1, 24, (length,), generator=generator).tolist()
        if case.draft in ("composed", "ngram"):
            prompt = (TEXT * length)[:length]
        seed = None if case.verify == "auto" and i % 2 else i  # "auto" draws drafts for requests that state no seed
        asked = {"max_tokens": 10 + i, "seed": seed, **kinds[i % len(kinds)]}
        if case.settings == "served":
            body = CompletionRequest(model="small", prompt=prompt, **asked)
            params = request_params(body, default_sampling(engine.target), engine.context_length)
        else:
            params = SamplingParams(**asked)
        requests.append(engine.add_request(prompt, params, speculative=(i, case.settings) != (3, "asking")))
    while engine.has_work():
        (step or engine.step)()
        engine.check_integrity()
    engine.close()
    timed = case.draft == "adaptive"
    return [
        [one.output_ids, [] if timed else [event.accepted for event in one.events], [x.token_id for x in one.logprobs]]
        for one in requests
    ]


class Rounds:
    """Steps an engine, and notes the most reads and pageable uploads of a step that reads no prompt and records no
    round, and the pinned uploads and replays of each."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.reads, self.uploads = 0, 0
        self.pinned: list[int] = []  # uploads from pinned memory of every such step
        self.replays: list[int] = []
        self.lines: set[str] = set()  # of the reads and uploads

    def step(self) -> None:
        prompts = bool(self._engine.scheduler.waiting) or self._engine.scheduler.reading is not None
        seen.clear()
        recordings, replays = seen.recordings, seen.replays
        self._engine.step()
        if not prompts and seen.recordings == recordings:
            self.reads = max(self.reads, seen.reads.total())
            self.uploads = max(self.uploads, seen.uploads.total())
            self.pinned.append(seen.pinned)
            self.replays.append(seen.replays - replays)
            self.lines |= {*seen.reads, *seen.uploads}


def compared(case: Case, engine: Engine, wanted: list[list[Any]]) -> dict[str, Any]:
    """The case's answers beside the CPU's, and what its rounds did. engine: on the device."""
    rounds = Rounds(engine)
    got = answers(case, engine, rounds.step)
    return {
        "different": [[mine, theirs] for mine, theirs in zip(got, wanted, strict=True) if mine != theirs],
        "reads": rounds.reads,
        "uploads": rounds.uploads,
        "pinned": mode(rounds.pinned),
        "lines": sorted(rounds.lines),
        "replays": mode(rounds.replays),
        "eager_rounds": engine.eager_rounds,
        "accepted": max((most for _, accepted, _ in got for most in accepted), default=0),
    }


def compare_rounds(text: str) -> dict[str, dict[str, Any]]:
    """By kind of rounds ("eager" or "recorded") what differs from the CPU's answers, the reads and uploads of a step,
    and how many uploads from pinned memory and replays most of its steps make."""
    host, case, found = target_of(Case.parse(text)), Case.parse(text), {}
    # Drafts that are drawn run eagerly, so with graphs "auto" is "target".
    verify = {"eager": case.verify, "recorded": "target" if case.verify == "auto" else case.verify}
    with patch("secrets.randbits", lambda _bits: 5):  # the seeds of requests that state none
        known = answers(case, engine_of(case, host, case.verify)) if case.draft == "perfect" else None
        wanted = {one: answers(case, engine_of(case, host, one, known)) for one in set(verify.values())}
        with pretended_cuda():
            target = replace(host, model=copy.deepcopy(host.model).to("cuda"))
            for kind in verify:
                engine = engine_of(case, target, case.verify, known, disable_cuda_graph=kind == "eager")
                found[kind] = compared(case, engine, wanted[verify[kind]])
    return found
