"""The engine writes exactly the target's own tokens, whatever is drafted, batched, cut or aborted."""

from __future__ import annotations

import pytest
import torch

from tests.infer.conftest import oracle_engine, places_of
from toolkit.infer.engine.engine import Engine, EngineLoad, load_of
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import EngineError, SamplingError, SamplingParams
from toolkit.infer.request.request import PromptTooLongError, summarise


def ragged_prompts(
    vocab_size: int, lengths: tuple[int, ...] = (5, 9, 1, 17, 3, 30, 2), seed: int = 0
) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def run_checked(engine: Engine, prompts, params, **kwargs) -> list:
    """Engine.generate with the integrity check after every step."""
    settings = params if isinstance(params, list) else [params] * len(prompts)
    requests = [engine.add_request(p, s, **kwargs) for p, s in zip(prompts, settings, strict=True)]
    while engine.has_work():
        engine.step()
        engine.check_integrity()
    return requests


def test_plain_decoding_equals_hugging_face(tiny_target, reference):
    """A wrong position, cache place or padding would change tokens; more requests than rows, lengths 1 to 30."""
    prompts = ragged_prompts(tiny_target.vocab_size)
    params = SamplingParams(max_tokens=40)
    wanted = [reference(tiny_target, prompt, 40) for prompt in prompts]
    got = run_checked(Engine(tiny_target, max_running_requests=3), prompts, params)
    assert [request.output_ids for request in got] == wanted
    assert [request.finish_reason for request in got] == [
        "stop" if w[-1] in tiny_target.stop_ids else "length" for w in wanted
    ]


@pytest.mark.parametrize(("shape", "max_batch"), [("4,1,5", 1), ("5,3,30", 3)])
def test_random_head_changes_nothing(tiny_target, tiny_draft, reference, shape, max_batch):
    """A head that is nearly always wrong: rejected nodes must leave no trace in the caches."""
    prompts = ragged_prompts(tiny_target.vocab_size)
    engine = Engine(tiny_target, tiny_draft, DraftShape.parse(shape), max_running_requests=max_batch)
    got = run_checked(engine, prompts, SamplingParams(max_tokens=24))
    engine.close()
    assert [request.output_ids for request in got] == [reference(tiny_target, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize(("tree", "max_batch"), [(False, 1), (True, 4)])
def test_oracle_drafts_change_nothing(tiny_target, reference, tree, max_batch):
    """Long accepted runs at scattered tree nodes: a key moved to a wrong place would change later tokens."""
    prompts = ragged_prompts(tiny_target.vocab_size)
    answers = [(tuple(prompt), reference(tiny_target, prompt, 50)) for prompt in prompts]
    engine = oracle_engine(tiny_target, dict(answers), right=0.8, tree=tree, max_running_requests=max_batch)
    got = run_checked(engine, prompts, [SamplingParams(max_tokens=50)] * len(prompts), speculative=True)
    assert [request.output_ids for request in got] == [answer for _, answer in answers]
    assert summarise(event for request in got for event in request.events).accept_length > 2


def test_cache_after_accepted_trees_equals_sequential_decoding(tiny_target, reference):
    """After compaction the target's cache must hold what plain decoding would have written, place by place."""
    prompts = ragged_prompts(tiny_target.vocab_size, (6, 11, 4))
    answers = [(tuple(prompt), reference(tiny_target, prompt, 40)) for prompt in prompts]
    spec = oracle_engine(tiny_target, dict(answers), right=0.8, tree=True, max_running_requests=3)
    requests = [spec.add_request(prompt, SamplingParams(max_tokens=40, ignore_eos=True)) for prompt in prompts]
    for request in requests:
        request.speculative = True
    for _ in range(5):
        spec.step()
    assert max(event.accepted for request in requests for event in request.events) > 1
    for row, request in enumerate(requests):
        plain = Engine(tiny_target, max_running_requests=1)
        twin = plain.add_request(request.prompt_ids, SamplingParams(max_tokens=40, ignore_eos=True))
        while twin.length < request.length:
            plain.step()
        kept = request.length - 1
        for layer in range(spec.target.n_layers):
            for name in ("keys", "values"):
                ours, wanted = (
                    getattr(one._cache, name)[layer][places_of(one._cache.pool, kept, at)[0]]
                    for one, at in ((spec, row), (plain, 0))
                )
                assert torch.allclose(ours, wanted, atol=2e-4)


def test_shape_can_change_between_steps(small_target, small_draft):
    """What the drafter keeps between rounds must not depend on the shape."""
    prompts = ragged_prompts(24, (5, 8))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    engine = Engine(small_target, small_draft, max_running_requests=2)
    wanted = [request.output_ids for request in engine.generate(prompts, params, speculative=False)]
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    for shape in ["1,1,2", "5,3,20", "6,1,7", "2,4,9"] * 20:
        engine.set_shape(DraftShape.parse(shape))
        engine.step()
    engine.close()
    assert [request.output_ids for request in requests] == wanted


def test_stop_id_and_limit_inside_an_accepted_run(tiny_target, reference):
    """Every possible cut: the answer ends exactly at the stop id or limit, and only cut events are truncated."""
    prompt = ragged_prompts(tiny_target.vocab_size, (7,))[0]
    answer = reference(tiny_target, prompt, 40)
    for cut in (1, 2, 5, 6, 8, 11):
        for by_stop in (False, True):
            stop = answer[cut - 1]
            end = answer.index(stop) + 1 if by_stop else cut
            params = SamplingParams(
                max_tokens=40 if by_stop else cut, stop_ids=(stop,) if by_stop else (), ignore_eos=True
            )
            engine = oracle_engine(tiny_target, {tuple(prompt): answer}, right=1.0, tree=True, max_running_requests=1)
            request = engine.add_request(prompt, params)
            request.speculative = True
            while engine.has_work():
                engine.step()
                engine.check_integrity()
            assert request.output_ids == answer[:end]
            assert request.finish_reason == ("stop" if by_stop else "length")
            assert [event.truncated for event in request.events[:-1]] == [False] * (len(request.events) - 1)
            assert all((event.committed < event.accepted + 1) == event.truncated for event in request.events)
            assert len(request.token_from_draft) == end and not request.token_from_draft[0]


def test_event_log_equals_a_hand_count(tiny_target, reference):
    """With drafts that are always right a chain of 4 commits 5 a step; 1 + 5 + 5 + 5 tokens, then a cut at 18."""
    prompts = ragged_prompts(tiny_target.vocab_size)
    prompt, answer = next((p, a) for p in prompts if len(a := reference(tiny_target, p, 40)) > 20)
    engine = oracle_engine(tiny_target, {tuple(prompt): answer}, right=1.0, tree=False, max_running_requests=1)
    request = engine.add_request(prompt, SamplingParams(max_tokens=18))
    request.speculative = True
    while engine.has_work():
        engine.step()
    assert [event.committed for event in request.events] == [5, 5, 5, 2]
    assert [event.accepted for event in request.events] == [4, 4, 4, 4]
    assert request.token_from_draft == ([False] + [True] * 4) * 3 + [False] + [True] * 2
    stats = summarise(request.events)
    assert (stats.verify_steps, stats.truncated_steps, stats.accept_length) == (3, 1, 5.0)
    assert all(event.batch == 1 and event.verify_s > 0 for event in request.events)


def test_answer_ends_at_the_context_limit(tiny_target, tiny_draft):
    """Drafted nodes past the context must not be committed, and positions stay in range."""
    prompt = ragged_prompts(tiny_target.vocab_size, (10,))[0]
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    plain = Engine(tiny_target, context_length=24).generate([prompt], params)[0]
    engine = Engine(tiny_target, tiny_draft, context_length=24)
    spec = engine.generate([prompt], params)[0]
    engine.close()
    assert plain.output_ids == spec.output_ids and len(spec.output_ids) == 14 and spec.finish_reason == "length"


def test_bad_requests_are_refused(tiny_target):
    """Each message names what came and what is possible; nothing is queued."""
    engine = Engine(tiny_target, context_length=20)
    with pytest.raises(PromptTooLongError, match="25 tokens.*holds 20.*at most 19"):
        engine.add_request([1] * 25, SamplingParams())
    with pytest.raises(EngineError, match="ids from 1 to 100000"):
        engine.add_request([1, 100000], SamplingParams())
    with pytest.raises(SamplingError, match="temperature .* lie in"):  # no float32 holds it: the step would fail
        SamplingParams(temperature=10**400)
    assert not engine.has_work()


def test_other_users_of_the_model_keep_their_attention(tiny_target, tiny_draft):
    """Training runs the same model with sdpa in the same process."""
    engine = Engine(tiny_target, tiny_draft)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
    engine.close()
    assert tiny_target.model.config._attn_implementation == "sdpa"
    assert torch.isfinite(tiny_target.model(input_ids=torch.tensor([[5, 6, 7]])).logits).all()


def test_load(small_target):
    """Rows, the queue and pages, at every stage; kept prefixes are no load of the running requests."""
    engine = Engine(small_target, max_running_requests=1, context_length=64, max_total_tokens=640)
    assert load_of(engine) == EngineLoad(0, 0, 0, 0, 640)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    first, second = (engine.add_request(range(1, 21), params) for _ in range(2))
    assert load_of(engine) == EngineLoad(0, 2, 0, 0, 640)
    engine.step()
    load = load_of(engine)
    assert (load.running, load.waiting, load.request_tokens) == (1, 1, 32) and load.cached_tokens >= 32
    assert second.admitted_at is None
    assert first.submitted_at <= first.admitted_at <= first.first_token_at
    while engine.has_work():
        engine.step()
    assert load_of(engine) == EngineLoad(0, 0, 0, 16, 640)
    assert first.finished_at <= second.admitted_at <= second.first_token_at


def test_rows_without_room_are_counted(small_target):
    """Once each: an operator sees that the cache is too small, not how often the queue was looked at."""
    engine = Engine(small_target, max_running_requests=2, context_length=64, max_total_tokens=80)
    engine.generate([[3] * 40, [5] * 40], SamplingParams(max_tokens=9, ignore_eos=True))
    assert load_of(engine).refused_rows == 1
