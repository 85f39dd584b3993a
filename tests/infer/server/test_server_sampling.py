"""Sampling settings over HTTP: the real openai client, a real engine and a tiny random target."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import httpx
import openai
import pytest
import torch

from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.server.completions import Served
from toolkit.infer.server.protocol import CompletionRequest
from toolkit.infer.server.replies import LogprobForm
from toolkit.infer.server.request_params import default_sampling, described, request_params

NAME = "tiny"
USER = [{"role": "user", "content": "count apples"}]


@pytest.fixture(scope="module")
def engine(tiny_target, tiny_draft):
    """The server's engine."""
    served = Engine(tiny_target, tiny_draft, DraftShape.parse("3,2,6"), max_running_requests=4)
    yield served
    served.close()


@pytest.fixture(scope="module")
def url(tiny_target, engine, running):
    shape = DraftShape.parse("3,2,6").name
    served = Served(NAME, tiny_target.tokenizer, engine, engine.context_length, "fp_x", shape)
    with running(served) as address:
        yield address


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def taken(engine, monkeypatch):
    """The requests that the engine is handed."""
    seen, add_request = [], engine.add_request

    def watched(*args, **named):
        seen.append(add_request(*args, **named))
        return seen[-1]

    monkeypatch.setattr(engine, "add_request", watched)
    return seen


@pytest.fixture
def direct(tiny_target):
    """What a plain engine writes for the chat prompt."""
    tokenizer = tiny_target.tokenizer

    def write(**settings):
        text = tokenizer.apply_chat_template(USER, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return Engine(tiny_target).generate([ids], SamplingParams(**settings))[0]

    return write


def ask(client, **fields):
    return client.chat.completions.create(model=NAME, messages=USER, **fields)


def test_the_client_receives_logprobs(client, direct, tiny_target):
    """One entry a token, with the engine's numbers, and the bytes of all entries are the bytes of the text."""
    wanted = direct(max_tokens=20, temperature=0.8, seed=5, logprobs=2)
    whole = ask(client, max_tokens=20, temperature=0.8, seed=5, logprobs=True, top_logprobs=2)
    choice = whole.choices[0]
    entries = choice.logprobs.content
    assert len(entries) == whole.usage.completion_tokens == len(wanted.output_ids)
    for entry, expected in zip(entries, wanted.logprobs, strict=True):
        assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx([v for _, v in expected.top], abs=1e-4)
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
    special = set(tiny_target.tokenizer.all_special_tokens)
    written = b"".join(bytes(entry.bytes) for entry in entries if entry.token not in special)
    assert written.decode(errors="replace") == choice.message.content


def test_streamed_logprobs_equal_whole_ones(client):
    """No entry is lost where text is held back (halves of characters, beginnings of stop strings) or at the end."""
    fields = {
        "max_tokens": 30,
        "temperature": 1.0,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 1,
        "stop": ["zzz", "~"],
    }
    whole = ask(client, **fields).choices[0]
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True, **fields)]
    entries = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert [entry.token for entry in entries] == [entry.token for entry in whole.logprobs.content]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == whole.finish_reason
    assert ask(client, max_tokens=3).choices[0].logprobs is None


def test_settings_reach_the_engine(client, direct, tiny_target):
    """Every field changes the answer as the same setting of the engine does; one that is dropped would show."""
    fields = {
        "presence_penalty": 1.5, "frequency_penalty": 1.2, "logit_bias": {"40": 8.0, "50": -9.0}, "seed": 2,
        "temperature": 0.9, "max_tokens": 24,
    }  # fmt: skip
    extra = {"min_p": 0.02, "top_k": 60, "repetition_penalty": 1.3, "min_tokens": 5, "stop_token_ids": [41]}
    settings = {**fields, **extra, "logit_bias": {40: 8.0, 50: -9.0}, "stop_ids": [41]}
    del settings["stop_token_ids"]
    wanted = direct(**settings, logprobs=0)
    entries = ask(client, **fields, logprobs=True, extra_body=extra).choices[0].logprobs.content
    form = LogprobForm(tiny_target.tokenizer)
    assert [bytes(entry.bytes) for entry in entries] == [form.bytes_of(token) for token in wanted.output_ids]
    for name in settings:
        if name in ("max_tokens", "min_tokens", "stop_ids"):
            continue
        less = direct(**{key: value for key, value in settings.items() if key != name})
        assert less.output_ids != wanted.output_ids, f"{name} changes nothing here, so the test says nothing of it"


def test_n_answers(client):
    """Answer i is that of seed + i alone, streamed too; usage counts all of them and the prompt once."""
    fields = {"max_tokens": 12, "temperature": 1.0}
    alone = [ask(client, seed=9 + i, **fields) for i in range(3)]
    whole = ask(client, seed=9, n=3, **fields)
    texts, reasons = ["", "", ""], [None, None, None]
    for chunk in ask(client, seed=9, n=3, stream=True, stream_options={"include_usage": True}, **fields):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [one.choices[0].message.content for one in alone] and len(set(texts)) > 1
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [one.choices[0].finish_reason for one in alone] and usage == whole.usage
    assert usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)
    assert usage.prompt_tokens == alone[0].usage.prompt_tokens


def test_only_a_client_states_a_seed(client, taken, monkeypatch):
    """A seed that the server made up would keep the default verifier from drawing drafts. Without one the engine gives
    each of n answers its own: they differ."""
    seeds = iter(range(100))
    monkeypatch.setattr("secrets.randbits", lambda _bits: next(seeds))
    fields = {"max_tokens": 12, "temperature": 1.0, "n": 2}
    free = ask(client, **fields)
    ask(client, seed=7, **fields)
    assert [request.states_seed for request in taken] == [False, False, True, True]
    assert [request.params.seed for request in taken[2:]] == [7, 8]
    assert len({choice.message.content for choice in free.choices}) == 2


def test_a_request_may_have_a_draft_shape_of_its_own(client, taken):
    """The engine drafts it, for that request alone; what the engine does not draft is a 400 that names the field."""
    fields = {"max_tokens": 8, "temperature": 0.0}
    answers = [
        ask(client, **fields, extra_body={"ignore_eos": True, **extra})
        for extra in ({}, {"shape": "2,1,3"}, {"shape": "3,2,6"}, {"speculative": False})
    ]
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert answers[1].usage.speculative["shape"] == "chain 2 (2,1,3)"
    assert [{event.offered for event in request.events} for request in taken] == [{5}, {2}, {5}, {0}]
    for extra, says in (
        ({"shape": "4,1,5"}, r"engine drafts tree 3x2/6 \(3,2,6\)"),
        ({"shape": "wide"}, "three numbers .* are needed"),
    ):
        with pytest.raises(openai.BadRequestError, match=says) as caught:
            ask(client, **fields, extra_body=extra)
        assert caught.value.param == "shape"


LIMITS = [-1, 5e-324, float("nan"), 2**31 - 1, 2**63 - 1, 10**400]
NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
NUMBERS += ["seed", "max_tokens", "min_tokens", "n", "priority", "timeout"]


def bodies_at_the_limits():
    """(the wrong field, body) for every numeric field at the limits of its type and of tensors'."""
    for name in NUMBERS:
        yield from ((name, {name: value}) for value in LIMITS)
    for value in LIMITS:
        yield "logit_bias", {"logit_bias": {"5": value}}
        yield "stop_token_ids", {"stop_token_ids": [value]}
        yield "prompt", {"prompt": [9, value]}
        if isinstance(value, int):
            yield "logit_bias", {"logit_bias": {str(value): 1}}
    yield "logit_bias", {"logit_bias": {"9" * 5000: 1}}
    yield "shape", {"shape": "9" * 5000 + ",1,5"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stop_token_ids": [999999]}, "stop_token_ids has the id 999999; the target's vocabulary is 0.."),
        ({"logit_bias": {"999999": 1}}, "logit_bias has the id 999999; the target's vocabulary is 0.."),
        ({"logit_bias": {"abc": 1}}, "'logit_bias.abc': a token id of at most 9 digits is needed, got 'abc'"),
        ({"stop_token_ids": [5], "regex": "a"}, "stop_token_ids is [5]; regex is given too"),
    ],
)
def test_errors_name_what_the_client_sent(url, fields, says):
    """Not the engine's settings, nor values in Python's form."""
    reply = httpx.post(f"{url}/v1/completions", json={"model": NAME, "prompt": [9], **fields})
    assert reply.status_code == 400 and says in reply.json()["error"]["message"]


def test_no_number_of_a_request_ends_a_step_of_its_neighbours(url):
    """A number that overflows a tensor of the batch ended the step, and with it every request in flight."""
    base = {"model": NAME, "prompt": [9, 9], "max_tokens": 1, "temperature": 1.0, "speculative": False}
    kind = {"Content-Type": "application/json"}
    failed, neighbours, done = [], [], threading.Event()

    def neighbour():
        while not done.is_set():
            body = base | {"max_tokens": 40, "ignore_eos": True, "top_k": 5}
            neighbours.append(client.post("/v1/completions", json=body).status_code)

    threads = [threading.Thread(target=neighbour) for _ in range(2)]
    with httpx.Client(base_url=url, timeout=60) as client:
        for thread in threads:
            thread.start()
        for field, fields in bodies_at_the_limits():
            reply = client.post("/v1/completions", content=json.dumps(base | fields), headers=kind)
            error = {"param": field} if reply.status_code == 200 else reply.json()["error"]
            right = (error["param"] or "").startswith(field) or error["code"] == "context_length_exceeded"
            if reply.status_code not in (200, 400, 408) or not (right or field == "timeout"):
                failed.append((str(fields)[:80], reply.status_code, error))
        done.set()
        for thread in threads:
            thread.join()
    assert not failed and set(neighbours) == {200}


@pytest.mark.parametrize(
    ("stated", "taken"),
    [
        ({"top_k": -1, "top_p": 0.5, "temperature": 1e-9}, {"top_p": 0.5, "temperature": 0.0}),
        ({"temperature": "0.7", "top_p": True, "top_k": 2**70, "min_p": float("nan")}, {}),
    ],
)
def test_odd_defaults_of_a_target_never_fail_a_request(stated, taken):
    """A server was ready, and refused every request that stated no settings of its own."""
    config = SimpleNamespace(to_diff_dict=lambda: stated)
    defaults = default_sampling(SimpleNamespace(model=SimpleNamespace(generation_config=config)))
    assert defaults == SamplingParams(**{"temperature": 1.0, **taken}) and described(defaults)
    body = CompletionRequest.model_validate({"model": NAME, "prompt": "x"})
    assert request_params(body, defaults, 9).temperature == defaults.temperature


def test_an_echoed_prompt_has_the_logprobs_of_the_model(client, tiny_target):
    """What lm-evaluation-harness scores: sums over a continuation, and whether each of its tokens is the best one."""
    prompts = [[9, 40, 41, 50] * 30, [7, 8]]
    for fields in ({"max_tokens": 1, "echo": True}, {"max_tokens": 0, "echo": True}):
        reply = client.completions.create(model=NAME, prompt=prompts, logprobs=2, temperature=0, **fields)
        assert [choice.index for choice in reply.choices] == [0, 1] and reply.usage.prompt_tokens == 122
        for choice, prompt in zip(reply.choices, prompts, strict=True):
            logits = tiny_target.model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
            wanted = logits[range(len(prompt) - 1), prompt[1:]].tolist()
            found = choice.logprobs
            assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
            assert found.token_logprobs[1 : len(prompt)] == pytest.approx(wanted, abs=1e-4)
            best = [max(one.values()) for one in found.top_logprobs[1 : len(prompt)]]
            assert best == pytest.approx(logits[: len(prompt) - 1].max(dim=-1).values.tolist(), abs=1e-4)
            assert len(found.tokens) == len(prompt) + fields["max_tokens"] == len(found.text_offset)
            assert choice.text.startswith(tiny_target.tokenizer.decode(prompt))
    assert reply.usage.completion_tokens == 0


def test_several_prompts_and_the_best_of_several_answers(client):
    """Prompts are answered in order, as alone; of `best_of` answers the most probable ones return."""
    fields = {"model": NAME, "max_tokens": 6, "temperature": 1.0, "seed": 3, "logprobs": 0}
    alone = [client.completions.create(prompt=one, **fields).choices[0].text for one in ("count", "the fox")]
    both = client.completions.create(prompt=["count", "the fox"], **fields)
    assert [choice.text for choice in both.choices] == alone
    every = client.completions.create(prompt="count", n=5, **fields).choices
    best = client.completions.create(prompt=["count"], n=2, best_of=5, **fields)
    means = sorted(sum(one.logprobs.token_logprobs) / len(one.logprobs.tokens) for one in every)
    found = [sum(one.logprobs.token_logprobs) / len(one.logprobs.tokens) for one in best.choices]
    assert found == pytest.approx([means[-1], means[-2]]) and best.usage.completion_tokens > 12
    streamed = [chunk.choices[0] for chunk in client.completions.create(prompt="count", stream=True, **fields)]
    assert sum((one.logprobs.token_logprobs for one in streamed if one.logprobs), []) == pytest.approx(
        every[0].logprobs.token_logprobs, abs=1e-4
    )
    assert "".join(one.text for one in streamed) == every[0].text
