"""The states an engine computes while it writes are those of a forward over the whole text, whatever happened to it."""

from __future__ import annotations

import random

import pytest
import torch

from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request
from toolkit.pipeline.feature_capture import record_features

LAYERS = (0, 2, 3)


@torch.no_grad()
def reference(target, ids: list[int]) -> torch.Tensor:
    """[L-1, W] by Hugging Face; its last hidden state is final-normed already."""
    states = target.model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([*(states[layer] for layer in LAYERS), states[-1]], dim=-1)[0, :-1]


@pytest.mark.parametrize(("name", "shape", "room"), [("none", None, 128), ("eagle3", "3,3,8", 240)])
def test_states_of_whole_texts(small_target, build, name, shape, room):
    """fp32, 5e-4 where the states are of size 1. A position twice, left out, or a rejected node's in its place would be
    off by the size of the states; so would a neighbour's row after a row has moved."""
    chance = random.Random(2)
    prompts = [[chance.randrange(1, 24) for _ in range(chance.choice((1, 9, 15)))] for _ in range(12)]
    draft = None if name == "none" else build(name)
    # Prompts in chunks, and fewer pages than the rows want: requests are preempted and read again.
    options = {"max_running_requests": 4, "context_length": 100, "max_total_tokens": room}
    options |= {"chunked_prefill_size": 7, "prefix_cache": False}
    engine = Engine(small_target, draft, None if shape is None else DraftShape.parse(shape), **options)
    recorder = record_features(engine, LAYERS)
    requests = [
        engine.add_request(
            prompt,
            SamplingParams(max_tokens=chance.choice((1, 40, 60)), temperature=0.7, seed=seed, ignore_eos=seed % 4 > 0),
        )
        for seed, prompt in enumerate(prompts)
    ]
    aborted: list[Request] = []
    while engine.has_work():
        engine.step()
        engine.check_integrity()
        running = engine.scheduler.running
        if not aborted and len(running) > 1 and len(running[0].output_ids) > 4:  # one that runs, one that waits
            aborted = [running[0], requests[-1]]
            for request in aborted:
                engine.abort(request)
    engine.close()
    assert sum(request.preemptions for request in requests) > 0 and aborted[0].output_ids and not aborted[1].output_ids
    for request in requests:
        if request.finish_reason != "abort":
            found, wanted = recorder.take(request), reference(small_target, request.prompt_ids + request.output_ids)
            torch.testing.assert_close(found, wanted, rtol=5e-4, atol=5e-4)
            assert recorder.take(request) is None, "what was taken is given away"
    plain = Engine(small_target, **options)
    params = [request.params for request in requests if request not in aborted]
    again = plain.generate([request.prompt_ids for request in requests if request not in aborted], params)
    assert [one.output_ids for one in again] == [one.output_ids for one in requests if one not in aborted]
    assert not any(module._forward_pre_hooks for module in small_target.layers), "closing leaves no hooks"


def test_a_text_out_of_the_prefix_cache_has_none(small_target):
    """Its first pages were not read anew; states that begin in the middle would stand at wrong positions."""
    engine = Engine(small_target, max_running_requests=1)
    recorder = record_features(engine, LAYERS)
    prompt = [(7 * i) % 23 + 1 for i in range(40)]
    first, second = (engine.generate([prompt], SamplingParams(max_tokens=5, ignore_eos=True))[0] for _ in range(2))
    engine.close()
    assert second.cached_tokens > 0 and recorder.take(second) is None
    assert recorder.take(first).shape == (44, 4 * small_target.hidden_size)
