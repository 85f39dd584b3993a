"""/v1/responses through the openai client; /tokenize and /detokenize."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.infer.server.test_app import NAME
from tests.infer.server.test_tools import PARIS, ROME, scene, seen_prompt, server
from toolkit.infer.server.responses import ResponseForm, ResponsesRequest
from toolkit.infer.server.tool_calls import Piece

assert scene and server  # fixtures
CHAT_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}


def respond(scene, **fields):
    return scene.client().responses.create(**{"model": NAME, "input": "count apples", **fields})


def shown(response):
    """The items without their random ids."""
    items = []
    for item in response.output:
        text = item.arguments if item.type == "function_call" else item.content[0].text
        items.append((item.type, text, item.status))
    return items


@pytest.mark.parametrize("run", [1, 40])
def test_whole_and_streamed_items_are_equal(scene, run):
    """The events build the response that their last one carries, and that is the one that is not streamed."""
    scene.engine.run = run
    whole = respond(scene, tools=[TOOL])
    assert shown(whole) == [
        ("message", "I look.", "completed"),
        ("function_call", PARIS, "completed"),
        ("function_call", ROME, "completed"),
    ]
    assert whole.output_text == "I look." and whole.status == "completed"
    with scene.client().responses.stream(model=NAME, input="count apples", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert shown(final) == shown(whole)
    assert final.usage == whole.usage and whole.usage.output_tokens_details.reasoning_tokens > 0
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "I look." and (len(deltas) > 1 or run > 1)
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [PARIS, ROME]


def test_a_cut_response_is_incomplete(scene):
    """Both ways say why it ended."""
    whole = respond(scene, max_output_tokens=20)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    last = list(respond(scene, max_output_tokens=20, stream=True))[-1]
    assert last.type == "response.incomplete" and shown(last.response) == shown(whole)


def test_a_response_that_is_cut_by_the_server():
    """OpenAI's types have no reason "abort": clients match on them. What was written is there."""
    form = ResponseForm(ResponsesRequest.model_validate({"model": NAME, "input": "x"}))
    form.choice(0, [Piece("content", "The fo")], "abort")
    assert form.last({})[0].startswith("event: response.failed\n")
    whole = openai.types.responses.Response.model_validate(form.whole((), {}))
    assert whole.status == "failed" and whole.incomplete_details is None and whole.error.code == "server_error"
    assert shown(whole) == [("message", "The fo", "incomplete")]


def test_the_items_of_a_dialogue_become_its_prompt(scene):
    """An answer's items come back as one message, with the results of its calls after it."""
    prompts = seen_prompt(scene)
    first = respond(scene, tools=[TOOL])
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
        for item in first.output
        if item.type == "function_call"
    ]
    items = [{"role": "user", "content": [{"type": "input_text", "text": "count"}]}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    respond(scene, input=[*items, *outputs], instructions="Be brief.", tools=[TOOL])
    system, user, assistant, results = prompts[-1].split("<|im_start|>")[1:5]
    assert system.startswith("system\nBe brief.\n") and user == "user\ncount<|im_end|>\n"
    assert assistant.startswith("assistant\nI look.\n<tool_call>") and assistant.count(": {") == 2
    assert results.count("<tool_response>\nsun") == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"max_output_tokens": 5000}, "input"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ],
)
def test_what_is_not_translated(scene, fields, param):
    """As in chats: a 400 with the name of the field, as responses have it."""
    with pytest.raises(openai.BadRequestError) as caught:
        scene.client().responses.create(model=NAME, **{"input": "x", **fields})
    assert caught.value.param == param


def test_tokenize_and_detokenize(scene):
    """In vLLM's form, of texts and of chats, so that a client can count a prompt before it sends it."""

    def post(path, **body):
        return httpx.post(f"{scene.url}{path}", json=body, timeout=20)

    text = "the fox — ✨"
    reply = post("/tokenize", model=NAME, prompt=text, return_token_strs=True).json()
    assert reply["tokens"] == scene.ids(text) and reply["count"] == len(reply["tokens"])
    assert len(reply["token_strs"]) == reply["count"] and reply["max_model_len"] == 1024
    assert post("/detokenize", tokens=reply["tokens"]).json() == {"prompt": text}
    prompts = seen_prompt(scene)
    usage = scene.ask().usage
    chat = post("/tokenize", messages=[{"role": "user", "content": "count apples"}]).json()
    assert chat["count"] == usage.prompt_tokens and chat["token_strs"] is None
    assert post("/detokenize", tokens=chat["tokens"]).json()["prompt"] == prompts[0]
    bare = post("/tokenize", messages=[{"role": "user", "content": "count apples"}], add_generation_prompt=False)
    assert bare.json()["count"] < chat["count"]
    for path, body, param in [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "tools": 2 * [CHAT_TOOL]}, "tools"),
        ("/detokenize", {"tokens": [10**30]}, "tokens[0]"),
    ]:
        answer = post(path, **body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
