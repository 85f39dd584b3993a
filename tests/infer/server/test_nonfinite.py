"""A request whose logits are not finite ends with an error, in every form of reply; all others are as without it."""

from __future__ import annotations

import copy

import httpx
import pytest
import torch

from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.server.completions import Served
from toolkit.targets.target import Target

BROKEN = 77  # the token whose embedding is NaN
PROMPTS = [[5, 6, 7], [30, 31] * 9, [40]]


@pytest.fixture(scope="module")
def broken_target(tiny_target):
    model = copy.deepcopy(tiny_target.model)
    model.get_input_embeddings().weight.data[BROKEN] = float("nan")
    return Target(model=model, tokenizer=tiny_target.tokenizer, name="broken")


@pytest.mark.parametrize("shape", [None, "3,2,6"])
@pytest.mark.parametrize(("temperature", "scored"), [(0.0, None), (1.0, None), (0.0, 0)])
def test_logits_alone_are_judged_too(tiny_target, tiny_draft, monkeypatch, shape, temperature, scored):
    """An overflow in the output matrix leaves finite states, and the answer was nonsense. So it is with a prompt that
    is scored: JSON has no NaN."""
    settings = {"max_tokens": 16, "temperature": temperature, "ignore_eos": True, "prompt_logprobs": scored}
    params = [SamplingParams(seed=n, **settings) for n in range(3)]
    draft = {} if shape is None else {"draft": tiny_draft, "shape": DraftShape.parse(shape)}
    engine = Engine(tiny_target, prefix_cache=False, **draft)
    wanted = [request.output_ids for request in engine.generate(PROMPTS, params)]
    finish, seen = Target.finish_scores, []

    def finished(target, scores):
        seen.append(scores.flatten(0, -2))
        return finish(target, scores)

    monkeypatch.setattr(Target, "finish_scores", finished)
    engine.generate(PROMPTS[:1], params[:1], speculative=False)
    broken = torch.cat(seen)[1 if scored is not None else 9]  # of a token of the prompt, or after ten tokens

    def overflowing(target, scores):
        hit = torch.isclose(scores, broken, atol=1e-3).all(dim=-1, keepdim=True)
        return finish(target, scores.masked_fill(hit & (torch.arange(scores.shape[-1]) == 50), torch.inf))

    monkeypatch.setattr(Target, "finish_scores", overflowing)
    first, *rest = engine.generate(PROMPTS, params)
    assert first.failed and "not finite" in first.stop_reason
    assert first.output_ids == wanted[0][: len(first.output_ids)] and len(first.output_ids) < 10
    assert [one.output_ids for one in rest] == wanted[1:]
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("shape", [None, "3,2,6"])
def test_nothing_of_it_reaches_other_requests(tiny_target, broken_target, tiny_draft, shape):
    """A page with NaN that another request gets poisons it: what is masked is multiplied by 0, and 0 * nan is nan."""
    params = SamplingParams(max_tokens=24, logit_bias={BROKEN: -100})
    draft = {} if shape is None else {"draft": tiny_draft, "shape": DraftShape.parse(shape)}
    plain = Engine(tiny_target).generate(PROMPTS, params)
    wanted = [request.output_ids for request in plain]
    engine = Engine(broken_target, **draft)
    for _ in range(2):
        first, other, *rest = engine.generate([[5, BROKEN, 6] * 8, *PROMPTS], params, speculative=False)
        assert first.failed and not first.output_ids and "not finite" in first.stop_reason
        assert [one.output_ids for one in (other, *rest)] == wanted
    engine.close()


def test_every_reply_form_says_so(broken_target, running):
    """A stream has sent its status, so an event says it; text of NaN must never look like an answer."""
    engine = Engine(broken_target)
    word = broken_target.tokenizer.decode([BROKEN])
    served = Served("tiny", broken_target.tokenizer, engine, engine.context_length, "fp", None)
    chat = {"messages": [{"role": "user", "content": word}]}
    with running(served) as url:
        for path, fields in [
            ("completions", {"prompt": [5, BROKEN]}),
            ("chat/completions", chat),
            ("responses", {"input": word}),
        ]:
            body = {"model": "tiny", "temperature": 1.0, **fields}
            reply = httpx.post(f"{url}/v1/{path}", json=body, timeout=20)
            assert reply.status_code == 500 and "not finite" in reply.json()["error"]["message"], path
            streamed = httpx.post(f"{url}/v1/{path}", json={**body, "stream": True}, timeout=20)
            assert "not finite" in streamed.text, path
        after = {"model": "tiny", "prompt": [5], "logit_bias": {str(BROKEN): -100}}  # it must not draw the broken token
        assert httpx.post(f"{url}/v1/completions", json=after, timeout=20).status_code == 200
        assert "toolkit_nonfinite_answers_total 6.0" in httpx.get(f"{url}/metrics").text
    assert torch.isfinite(engine._cache.keys[0]).all()
