"""Answers under a grammar: those of plain constrained decoding with every drafter, and what ends them."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch

from tests.infer.conftest import oracle_engine
from tests.infer.verify.test_grammar_masks import ByToken, some_grammar
from toolkit.infer.drafters.draft_rollout import DraftMasks
from toolkit.infer.drafters.lookup import NgramLookup
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request import grammar
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams

# Nowhere is one text alone left that has several tokenizations: there llguidance allows one of them.
REGEX = r"[a-cth]{2,3}( [a-c]d| [0-9]{2}){2,4}"
PARTS = [*(f" {letter}d" for letter in "abc"), *(f" {number:02}" for number in range(100))]
SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["fox", "dog", "wizard"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
        "quick": {"type": "boolean"},
    },
    "required": ["animal", "count", "tags", "quick"],
    "additionalProperties": False,
}


def begins_text(text: str) -> bool:
    """Whether some text of REGEX begins with `text`, by its definition."""
    letters, space, _ = text.partition(" ")
    if not set(letters) <= set("abcth") or len(letters) > 3 or (space and len(letters) < 2):
        return False
    parts = [text[start : start + 3] for start in range(len(letters), len(text), 3)]
    *whole, last = parts or [""]
    return len(parts) <= 4 and set(whole) <= set(PARTS) and any(part.startswith(last) for part in PARTS)


def constrained_greedy(target, prompt: list[int]) -> list[int]:
    """Greedy decoding by Hugging Face's forward, over the tokens with which REGEX can still be matched."""
    texts = {i: target.tokenizer.decode([i]) for i in range(target.vocab_size)}
    answer, text = [], ""
    while not answer or answer[-1] not in target.stop_ids:
        logits = target.model(torch.tensor([prompt + answer])).logits[0, -1]
        for token in logits.argsort(descending=True, stable=True).tolist():
            stops = token in target.stop_ids and re.fullmatch(REGEX, text)
            if stops or (token not in target.tokenizer.all_special_ids and begins_text(text + texts[token])):
                break
        answer.append(token)
        text += texts[token] if token not in target.stop_ids else ""
    return answer


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 390) for _ in range(rng.choice((3, 9, 17, 30)))] for _ in range(count)]


def test_plain_decoding_is_the_definition(tiny_target):
    """The reference of all other tests, against a loop that knows no grammar library."""
    prompts = prompts_of(4)
    engine = Engine(tiny_target)
    found = engine.generate(prompts, SamplingParams(regex=REGEX, max_tokens=60))
    assert [one.output_ids for one in found] == [constrained_greedy(tiny_target, prompt) for prompt in prompts]
    assert all(one.finish_reason == "stop" for one in found)


def mixed_params(count: int, temperature: float = 0.0) -> list[SamplingParams]:
    """A schema, a regular expression, both beside penalties and log-probabilities, and rows without any of it."""
    kinds = [
        {"json_schema": SCHEMA},
        {},
        {"regex": REGEX},
        {"json_schema": SCHEMA, "frequency_penalty": 0.7, "logit_bias": {40: 1.5}, "logprobs": 2},
        {"frequency_penalty": 0.4, "min_tokens": 4},
        {"json_schema": {"type": "object"}, "top_p": 0.9},
    ]
    return [
        SamplingParams(max_tokens=50, temperature=temperature if i % 4 else 0.0, seed=i, **kinds[i % len(kinds)])
        for i in range(count)
    ]


CASES = [("head", 0.0), ("composed", 0.0), ("oracle-tree", 1.0)]
CASES += [pytest.param(kind, 1.0, marks=pytest.mark.slow) for kind in ("head", "ngram", "oracle")]


def engine_with(target, draft, kind: str, shape: str, plain, **options) -> Engine:
    """An engine that drafts in one of the ways; the oracle drafts what `plain` holds, with mistakes."""
    if kind == "ngram":
        return Engine(target, NgramLookup(1), DraftShape.parse(shape), **options)
    lookup = True if kind == "composed" else None
    if not kind.startswith("oracle"):
        return Engine(target, draft, DraftShape.parse(shape), lookup=lookup, **options)
    answers = {tuple(one.prompt_ids): one.output_ids for one in plain}
    return oracle_engine(target, answers, right=0.8, tree="tree" in kind, **options)


@pytest.mark.parametrize("kind, temperature", CASES)
def test_drafts_change_nothing(tiny_target, tiny_draft, kind, temperature):
    """Chains and trees, fixed and adaptive, rows with and without a grammar in one batch that is smaller than the
    queue: each answer is that of plain decoding. Drafts inside of the grammar are accepted, the others are cut."""
    prompts, params = prompts_of(12), mixed_params(12, temperature)
    plain = Engine(tiny_target).generate(prompts, params)
    accepted = 0
    for shape, adaptive in (("4,1,5", False), ("3,3,10", kind in ("ngram", "composed"))):
        engine = engine_with(tiny_target, tiny_draft, kind, shape, plain, adaptive=adaptive, max_running_requests=5)
        found = engine.generate(prompts, params)
        engine.check_integrity()
        assert [one.output_ids for one in found] == [one.output_ids for one in plain]
        assert [one.finish_reason for one in found] == [one.finish_reason for one in plain]
        accepted += sum(event.accepted for one in found if one.grammar for event in one.events)
    assert accepted > (20 if "oracle" in kind else -1)
    for one in plain:
        if one.grammar is not None and one.finish_reason == "stop":
            text = tiny_target.tokenizer.decode(one.output_ids, skip_special_tokens=True)
            regex = one.params.regex
            assert re.fullmatch(regex, text) if regex else json.loads(text) is not None


HEADS = ["eagle2", "mtp-three-layers", "dspark", "dspark-dfly"]


@pytest.mark.parametrize("name", HEADS)
def test_every_head_under_a_grammar(small_target, build, name):
    """Heads of every kind, with several layers too, against Hugging Face's forward: the tokens after each token are
    given by a table. A second stage that reads nodes that were cut, or features of them, would change tokens later."""
    allowed = some_grammar(5, 24)
    prompts = [[(7 * i + j) % 23 + 1 for j in range(4 + 3 * i)] for i in range(5)]
    wanted = []
    for prompt in prompts:
        text = list(prompt)
        while len(text) < len(prompt) + 20 and (len(text) == len(prompt) or text[-1] not in small_target.stop_ids):
            logits = small_target.model(torch.tensor([text])).logits[0, -1]
            text.append(int(logits.masked_fill(~allowed[text[-1]], -torch.inf).argmax()))
        wanted.append(text[len(prompt) :])
    for shape in ("4,1,5", "3,3,10"):
        engine = Engine(small_target, build(name), DraftShape.parse(shape), max_running_requests=3)
        requests = [engine.add_request(prompt, SamplingParams(max_tokens=20)) for prompt in prompts]
        for request in requests:
            request.grammar = ByToken(allowed)
        while engine.has_work():
            engine.step()
        engine.close()
        assert [request.output_ids for request in requests] == wanted
        assert sum(event.accepted for request in requests for event in request.events) > 0


@pytest.mark.parametrize("verify", ["rejection", "auto"])
def test_drawn_drafts_stay_in_the_grammar(tiny_target, tiny_draft, verify):
    """The rules that draw drafts from the head's distribution, beside greedy rows and rows without a grammar."""
    prompts, params = prompts_of(12), mixed_params(12, 1.0)
    engine = Engine(tiny_target, tiny_draft, DraftShape.chain(4), verify=verify, max_running_requests=5)
    found = engine.generate(prompts, [SamplingParams(**{**vars(one), "seed": None}) for one in params])
    plain = engine.generate(prompts, params, speculative=False)
    done = [one for one in found if one.params.regex and one.finish_reason == "stop"]
    assert done
    for one in done:
        assert re.fullmatch(REGEX, tiny_target.tokenizer.decode(one.output_ids, skip_special_tokens=True))
    for one, other in zip(found, plain, strict=True):
        if one.params.temperature == 0:
            assert one.output_ids == other.output_ids


def test_a_head_is_told_the_grammar(tiny_target, tiny_draft, monkeypatch):
    """Masked level by level, its drafts stay inside of the grammar: more of them reach the target than if they were
    only cut, in chains and in trees, and the tokens stay the same."""
    params = [SamplingParams(regex=REGEX, max_tokens=40), SamplingParams(max_tokens=8)]
    for shape, levels in (("4,1,5", 4), ("3,3,10", 3)):
        engine = Engine(tiny_target, tiny_draft, DraftShape.parse(shape))
        told = engine.generate([[5, 6, 7], [8]], params)
        with monkeypatch.context() as patch:
            patch.setattr(DraftMasks, "of", lambda *_: None)
            cut = engine.generate([[5, 6, 7], [8]], params)
        assert [one.output_ids for one in told] == [one.output_ids for one in cut]
        offered = [sum(event.offered for event in found[0].events) for found in (told, cut)]
        assert offered[0] > 1.5 * offered[1]
        assert max(event.depth_offered for event in told[0].events) == levels


@pytest.mark.parametrize("at_once", [True, False])
def test_a_grammar_that_fails_ends_its_own_request_alone(tiny_target, tiny_draft, monkeypatch, at_once):
    """At the first token, or later; the other requests of the batch do not notice, and the engine goes on."""
    monkeypatch.setitem(grammar.LIMITS, "max_items_in_row", 3)
    schema = {"type": "array", "items": {"type": ["integer", "array", "object", "string"]}}
    engine = Engine(tiny_target, tiny_draft, DraftShape.parse("3,3,10"))
    prompts, free = prompts_of(3), SamplingParams(max_tokens=12)
    alone = engine.generate(prompts[:1] + prompts[2:], free)
    for _ in range(2):
        params = [free, SamplingParams(max_tokens=12, json_schema=schema), free]
        first, failed, last = (engine.add_request(*one) for one in zip(prompts, params, strict=True))
        if at_once:
            failed.grammar.failure = "the grammar failed after 0 tokens"
        while engine.has_work():
            engine.step()
            engine.check_integrity()
        assert failed.finish_reason == "abort" and "the grammar failed" in failed.stop_reason
        assert len(failed.output_ids) == (0 if at_once else 1)
        assert [first.output_ids, last.output_ids] == [one.output_ids for one in alone]
