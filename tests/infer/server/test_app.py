"""The real openai client against a real uvicorn server on a loopback port."""

from __future__ import annotations

import contextlib
import json

import httpx
import openai
import pytest

from tests.infer.running_server import until
from toolkit import __version__
from toolkit.infer.server.app import AddressError, listen
from toolkit.infer.server.completions import Served
from toolkit.infer.server.replies import Writing

NAME = "tiny"
USER = [{"role": "user", "content": "count apples"}]


class Scripted:
    """A served ScriptedEngine whose every answer is `text` (until a test changes it)."""

    def __init__(self, engine_class, tokenizer):
        self.tokenizer = tokenizer
        self.text = "The quick brown fox — 漢字 ✨ — jumps.\n\nEND of it"
        stop_id = tokenizer.eos_token_id
        self.engine = engine_class(lambda _: self.ids(self.text), run=3, stop_id=stop_id)
        self.url = ""

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def served(self):
        return Served(NAME, self.tokenizer, self.engine, self.engine.context_length, "fp_x", "chain 4")

    def client(self):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)

    def ask(self, **fields):
        return self.client().chat.completions.create(**{"model": NAME, "messages": USER, **fields})

    def post(self, body, path="/v1/chat/completions"):
        return httpx.post(f"{self.url}{path}", json=body, timeout=20)


@pytest.fixture(scope="module")
def server(scripted, tiny_target, running):
    scene = Scripted(scripted, tiny_target.tokenizer)
    with running(scene.served()) as url:
        scene.url = url
        yield scene


@pytest.fixture
def scene(server):
    """The module's server with its script put back after the test."""
    text = server.text
    yield server
    server.text, server.engine.step_seconds, server.engine.run = text, 0.0, 3
    server.engine.aborted.clear()


def streamed(chunks):
    """(text, finish reason, usage) of a stream of chat chunks."""
    text, reason, usage = "", None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason, usage


def test_whole_and_streamed_answers_are_equal(scene):
    """Both ways go through one detokenizer; a difference would mean that streaming loses or repeats text."""
    whole = scene.ask()
    text, reason, usage = streamed(scene.ask(stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].message.content == scene.text == text
    assert whole.choices[0].finish_reason == reason == "stop"
    assert whole.usage == usage
    assert streamed(scene.ask(stream=True))[2] is None


def test_usage_counts_drafts(scene):
    """OpenAI's prediction details and our accept_length come from the same event log."""
    scene.engine.run = 3
    answer = scene.ask(max_tokens=10)
    usage, choice = answer.usage, answer.choices[0]
    assert choice.finish_reason == "length" and scene.text.startswith(choice.message.content)
    # 1 token of the prefill, then three steps of two drafts and a bonus
    assert (usage.completion_tokens, usage.total_tokens) == (10, usage.prompt_tokens + 10)
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (6, 6)
    assert usage.speculative["accept_length"] == 3.0
    assert usage.speculative["verify_steps"] == 3
    assert usage.speculative["accept_rate"] == [1.0, 1.0, 0.0, None]
    assert usage.speculative["shape"] == "chain 4"


@pytest.mark.parametrize(("run", "stream"), [(1, True), (5, False)])
def test_stop_string_is_cut_exactly(scene, run, stream):
    """The cut and the token count must not depend on how many drafts a step accepted."""
    scene.engine.run = run
    stop = ["字 ✨", "END"]
    if stream:
        answer = streamed(scene.ask(stop=stop, stream=True, stream_options={"include_usage": True}))
    else:
        whole = scene.ask(stop=stop)
        answer = whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage
    assert answer[0] == "The quick brown fox — 漢" and answer[1] == "stop"
    ids = scene.ids(scene.text)
    needed = next(n for n in range(len(ids)) if "字 ✨" in scene.tokenizer.decode(ids[:n]))
    assert answer[2].completion_tokens == needed


def test_completions_endpoint(scene):
    """Text and token-id prompts, whole and streamed."""
    client = scene.client()
    whole = client.completions.create(model=NAME, prompt="the fox", max_tokens=100)
    chunks = client.completions.create(model=NAME, prompt=scene.ids("the fox"), max_tokens=100, stream=True)
    assert whole.choices[0].text == scene.text == "".join(chunk.choices[0].text for chunk in chunks)
    assert client.completions.create(model=NAME, prompt="the fox").usage.completion_tokens == 16


def test_token_ids(scene):
    """As vLLM and SGLang name them, of each answer, with the stop id; rollouts are written from them."""
    whole = {"model": NAME, "prompt": scene.ids("the fox"), "max_tokens": 100, "n": 2, "return_token_ids": True}
    cut = {"model": NAME, "messages": USER, "max_tokens": 100, "return_token_ids": True, "stop": ["END"]}
    ids = scene.ids(scene.text)
    for choice in scene.post(whole, "/v1/completions").json()["choices"]:
        assert choice["prompt_token_ids"] == whole["prompt"]
        assert choice["token_ids"] == [*ids, scene.tokenizer.eos_token_id]
    reply = scene.post(cut).json()
    written = reply["choices"][0]["token_ids"]
    assert written == ids[: reply["usage"]["completion_tokens"]] and "END" in scene.tokenizer.decode(written)
    assert "token_ids" not in scene.post({"model": NAME, "messages": USER}).json()["choices"][0]
    assert httpx.get(f"{scene.url}/version").json() == {"version": __version__}


def test_wrong_model(scene):
    """OpenAI's 404, so that clients raise NotFoundError."""
    with pytest.raises(openai.NotFoundError) as caught:
        scene.ask(model="gpt-9")
    assert caught.value.code == "model_not_found" and "'tiny'" in caught.value.body["message"]
    with pytest.raises(openai.NotFoundError):
        scene.client().models.retrieve("gpt-9")
    body = json.dumps({"model": "\ud800", "messages": USER})  # the message quotes what UTF-8 does not have
    headers = {"content-type": "application/json"}
    assert httpx.post(f"{scene.url}/v1/chat/completions", content=body, headers=headers).status_code == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"verbosity": "low"}, "verbosity"),
        ({"logit_bias": {"the": 1}}, "logit_bias.the"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_bad_requests_name_the_field(scene, fields, param):
    """Nothing is ignored in silence: a 400 in OpenAI's shape with the field at fault."""
    body = json.dumps({"model": NAME, "messages": USER, **fields})
    response = httpx.post(
        f"{scene.url}/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param
    assert param.rpartition(".")[2] in error["message"]


LONG = "secret " * 3000


def test_an_error_does_not_send_the_request_back(scene):
    """Clients log errors: they quote the beginning of a wrong value, not a whole prompt."""
    for fields in ({"messages": [{"role": "user", "content": {"text": LONG}}]}, {"model": LONG}, {LONG: 1}):
        answer = scene.post({"model": NAME, "messages": USER, **fields})
        assert 400 <= answer.status_code < 500 and len(answer.content) < 2500, answer.text


def test_neutral_fields_are_accepted(scene):
    """Clients that send every default must not be turned away."""
    answer = scene.post(
        {
            "model": NAME, "messages": [{**USER[0], "name": None}], "n": 1, "logprobs": False, "presence_penalty": 0.0,
            "top_logprobs": 0, "min_p": 0, "repetition_penalty": 1, "min_tokens": 0, "stop_token_ids": [],
            "frequency_penalty": 0, "tools": [], "tool_choice": "auto", "user": "me",
            "logit_bias": None, "seed": -5, "top_k": -1, "ignore_eos": False, "stop": None, "metadata": {"a": "b"},
            "response_format": {"type": "text"}, "store": True, "verbosity": "medium",
            "prediction": {"type": "content", "content": "x"},
        }
    )  # fmt: skip
    assert answer.status_code == 200, answer.text


def test_other_errors_have_the_same_shape(scene):
    """Broken JSON, an unknown path and a wrong method too."""
    broken = httpx.post(
        f"{scene.url}/v1/chat/completions", content=b'{"model": ', headers={"content-type": "application/json"}
    )
    missing, method = httpx.get(f"{scene.url}/v1/nothing"), httpx.get(f"{scene.url}/v1/chat/completions")
    assert [r.status_code for r in (broken, missing, method)] == [400, 404, 405]
    for response in (broken, missing, method):
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    kind = {"content-type": "application/json"}
    bare = httpx.post(f"{scene.url}/v1/chat/completions", json=[1])
    empty = httpx.post(f"{scene.url}/v1/chat/completions", headers=kind)
    untyped = httpx.post(f"{scene.url}/v1/chat/completions", content=b"{}")  # curl -d without a header
    for response in (bare, empty, untyped):
        assert response.status_code == 400 and "Content-Type: application/json" in response.json()["error"]["message"]
    not_utf8 = httpx.post(f"{scene.url}/v1/chat/completions", content=b'{"model": "\xff"}', headers=kind)
    for response in (broken, bare, empty, untyped, not_utf8):
        assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts(scene, stream):
    """A client that goes away must free its row long before its answer would have ended (400 tokens, 4 s)."""
    scene.text, scene.engine.run, scene.engine.step_seconds = "apples " * 400, 1, 0.01
    body = {"model": NAME, "messages": USER, "max_tokens": 400, "stream": stream}
    with httpx.Client(base_url=scene.url, timeout=httpx.Timeout(20, read=0.3)) as client:
        with contextlib.suppress(httpx.ReadTimeout):
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                for _ in response.iter_bytes():
                    break
    until(lambda: scene.engine.aborted)
    assert len(scene.engine.aborted) == 1
    assert len(scene.engine.aborted[0].output_ids) < 400


def test_engine_failure_is_a_500_and_the_next_request_works(scene):
    """A failing step must reach the client as an error, streamed or not, and leave the server alive."""
    for stream in (False, True):
        scene.engine.fail_next_step = RuntimeError("out of pages")
        with pytest.raises(openai.APIError, match="out of pages") as caught:
            streamed(scene.ask(stream=stream)) if stream else scene.ask()
        assert stream or caught.value.status_code == 500
    assert scene.ask().choices[0].message.content == scene.text
    assert httpx.get(f"{scene.url}/health").status_code == 200


def test_a_stream_with_an_error_of_the_server_ends(scene, monkeypatch):
    """Whatever fails while an answer is read: the client must hear of it, not wait for ever."""

    def read(self, update):
        raise LookupError("no such token")

    with monkeypatch.context() as patch:
        patch.setattr(Writing, "read", read)
        with pytest.raises(openai.APIError, match="LookupError: no such token"):
            streamed(scene.ask(stream=True))
    assert scene.ask().choices[0].message.content == scene.text


def test_health_is_red_when_the_engine_thread_is_dead(scripted, tiny_target, running):
    """A load balancer must stop sending requests to a server whose engine is gone."""
    scene = Scripted(scripted, tiny_target.tokenizer)
    scene.engine.has_work = lambda: True  # cannot be emptied
    with running(scene.served()) as scene.url:
        scene.engine.fail_next_step = RuntimeError("device lost")
        with pytest.raises(openai.InternalServerError):
            scene.ask()
        until(lambda: httpx.get(f"{scene.url}/health").status_code == 503)
        with pytest.raises(openai.InternalServerError, match="does not run"):
            scene.ask()


def test_port_in_use_is_a_clear_error():
    """Found before the model is loaded."""
    with listen("127.0.0.1", 0) as taken:
        with pytest.raises(AddressError, match="try another host or port"):
            listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(AddressError, match="0-65535"):
        listen("127.0.0.1", 99999)
