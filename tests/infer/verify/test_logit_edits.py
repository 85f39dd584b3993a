"""Penalties, bias and min_tokens against a definition that walks token by token, and under speculation."""

from __future__ import annotations

import pytest
import torch

from tests.infer.conftest import oracle_engine
from toolkit.infer.engine.engine import Engine
from toolkit.infer.kernels.tree_reference import ancestor_mask
from toolkit.infer.request.draft_tree import DraftShape, DraftTree
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request, summarise
from toolkit.infer.verify.logits_processors import LogitEdits

VOCAB = 12


def by_definition(logits: torch.Tensor, prompt: list[int], answer: list[int], params: SamplingParams, stops) -> list:
    """The logits [V] of the next token as OpenAI, Hugging Face and vLLM define the settings, token by token."""
    result = []
    for token, value in enumerate(logits.tolist()):
        if token in prompt or token in answer:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * answer.count(token)
        value -= params.presence_penalty * (token in answer)
        value += dict(params.logit_bias).get(token, 0.0)
        result.append(-torch.inf if token in stops and len(answer) < params.min_tokens else value)
    return result


ALL_ON = {
    "repetition_penalty": 1.7, "frequency_penalty": 0.6, "presence_penalty": 0.9,
    "logit_bias": {3: -2.0, 7: 1.5}, "min_tokens": 6,
}  # fmt: skip


@pytest.mark.parametrize("names", [[name] for name in ALL_ON] + [list(ALL_ON)], ids=lambda names: "+".join(names))
def test_every_node_of_a_tree_gets_its_own_edits(names):
    """Each node counts the committed tokens and its own path: no sibling, no padding, the root only once.

    Two edited rows with other settings and lengths stand around a row without any; the nodes are looked at in parts,
    and the answers grow in between.
    """
    own = SamplingParams(**{name: ALL_ON[name] for name in names})
    params = [own, SamplingParams(), SamplingParams(frequency_penalty=-0.5, repetition_penalty=0.8)]
    prompts = [[1, 2, 2], [4], [5, 5, 6, 0, 1]]
    requests = [Request(p, s, stop_set=frozenset({2, 9})) for p, s in zip(prompts, params, strict=True)]
    edits = LogitEdits(requests, [0, 2], VOCAB, torch.device("cpu"))
    parents = torch.tensor([[-1, 0, 0, 1, 1, 3]] * 3)
    depths = torch.tensor([[0, 1, 1, 2, 2, 3]] * 3)
    generator = torch.Generator().manual_seed(0)
    for grown in ([3, 3], [7, 1, 3, 2], [9]):
        for request in requests:
            request.output_ids += grown
        drafts = torch.tensor([[3, 7, 3, 2, 3], [1, 2, 3, 4, 5], [2, 9, 2, 11, 2]])
        roots = torch.tensor([[request.output_ids[-1]] for request in requests])
        tokens = torch.cat((roots, drafts), dim=1)
        mask = ancestor_mask(parents[:, 1:], 3)
        tree = DraftTree(tokens, parents, depths, mask, mask[:, 0] | True, 3, False)
        positions = torch.tensor([[r.length] for r in requests])[[0, 2]] + depths[[0, 2]]
        logits = torch.randn(2, 6, VOCAB, generator=generator) * 3
        got = logits.clone()
        for first, last in ((0, 2), (2, 6)):
            part = got[:, first:last].clone()
            edits.apply(part, positions[:, first:last], tree, first)
            got[:, first:last] = part
        for row, request in enumerate((requests[0], requests[2])):
            for node in range(6):
                path = [int(tokens[row * 2, n]) for n in range(1, 6) if mask[row * 2, node, n]]
                answer = request.output_ids + path
                wanted = by_definition(logits[row, node], request.prompt_ids, answer, request.params, request.stop_set)
                assert torch.allclose(got[row, node], torch.tensor(wanted), atol=1e-5)


def mixed_settings(count: int, temperature: float) -> list[SamplingParams]:
    """Rows with nothing, with one setting and with all, greedy and sampled beside each other."""
    singles = [{name: ALL_ON[name]} for name in ALL_ON]
    choices = [{}, *singles, {**ALL_ON, "min_p": 0.05, "top_p": 0.95, "logprobs": 3}, {"logprobs": 0}]
    return [
        SamplingParams(
            max_tokens=40,
            temperature=temperature if i % 3 else 0.0,
            seed=i,
            ignore_eos=True,
            stop_ids=(11,),
            **choices[i % len(choices)],
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(("shape", "temperature"), [("4,1,5", 0.9), ("4,4,16", 0.0)])
def test_speculation_changes_nothing_with_all_settings_on(small_target, small_draft, shape, temperature):
    """Counts off by one draft, or of a sibling, would change tokens; more requests than rows, all settings mixed."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 24, (n,), generator=generator).tolist() for n in (5, 9, 1, 17, 3, 30, 2, 4)] * 3
    params = mixed_settings(len(prompts), temperature)
    engine = Engine(small_target, small_draft, DraftShape.parse(shape), max_running_requests=5)
    plain = engine.generate(prompts, params, speculative=False)
    spec = engine.generate(prompts, params)
    alone = [engine.generate([prompts[i]], params[i])[0] for i in (6, 14)]
    engine.close()
    assert [request.output_ids for request in spec] == [request.output_ids for request in plain]
    assert [request.output_ids for request in alone] == [plain[i].output_ids for i in (6, 14)]
    assert sum(event.accepted for request in spec for event in request.events) > 10
    for one, other in zip(spec, plain, strict=True):
        assert one.stop_reason == other.stop_reason
        assert [entry.token_id for entry in one.logprobs] == (one.output_ids if one.params.logprobs is not None else [])
        for left, right in zip(one.logprobs, other.logprobs, strict=True):
            assert left.logprob == pytest.approx(right.logprob, abs=1e-4)


def test_penalties_inside_long_accepted_runs(small_target):
    """Drafts that are right many at a time: the counts of a node come from its ancestors in the same step."""
    settings = {**ALL_ON, "max_tokens": 50, "ignore_eos": True, "stop_ids": (5,)}
    prompts = [[3, 4, 5], [8, 9, 10, 11], [20]]
    params = [SamplingParams(temperature=t, seed=7, **settings) for t in (0.0, 1.0, 1.0)]
    wanted = Engine(small_target).generate(prompts, params)
    answers = {tuple(prompt): one.output_ids for prompt, one in zip(prompts, wanted, strict=True)}
    engine = oracle_engine(small_target, answers, right=0.85, tree=True, max_running_requests=3)
    got = engine.generate(prompts, params)
    assert [request.output_ids for request in got] == [request.output_ids for request in wanted]
    assert summarise(event for request in got for event in request.events).accept_length > 2


def test_min_tokens_ends_inside_an_accepted_run(small_target):
    """The stop ids are masked up to min_tokens exactly, whatever part of a run that is, and not one token longer."""
    prompt = [3, 4, 5]
    free = Engine(small_target).generate([prompt], SamplingParams(max_tokens=30, ignore_eos=True))[0].output_ids
    stop = max(set(free), key=free.count)
    assert free.count(stop) > 3 or len(set(free)) < 8
    for least in (1, 5, 8, 13):
        params = SamplingParams(max_tokens=30, ignore_eos=True, stop_ids=(stop,), min_tokens=least)
        plain = Engine(small_target).generate([prompt], params)[0]
        answers = {tuple(prompt): plain.output_ids}
        engine = oracle_engine(small_target, answers, right=1.0, tree=True, max_running_requests=1)
        got = engine.generate([prompt], params)[0]
        assert got.output_ids == plain.output_ids
        assert stop not in got.output_ids[:least]
        if got.finish_reason == "stop":
            assert got.output_ids[-1] == got.stop_reason == stop and len(got.output_ids) > least
