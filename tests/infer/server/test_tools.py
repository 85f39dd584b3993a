"""Tools, reasoning and responses through the openai client, against a server whose engine writes what a test says."""

from __future__ import annotations

import copy
import json

import openai
import pytest

from tests.infer.server.test_app import NAME, USER, Scripted
from toolkit.infer.server.answer_parser import Parsers
from toolkit.infer.server.protocol import ChatRequest, forced_schema

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD = {"type": "function", "function": {"name": "add"}}
PARIS, ROME = '{"city": "Paris — ✨"}', '{"city": "Rome"}'
CALLS = "".join(f'<tool_call>\n{{"name": "get_weather", "arguments": {one}}}\n</tool_call>\n' for one in (PARIS, ROME))


@pytest.fixture(scope="module")
def server(scripted, tiny_target, running):
    scene = Scripted(scripted, tiny_target.tokenizer)
    scene.engine.context_length = 1024
    served = scene.served()
    object.__setattr__(served, "parsers", Parsers("hermes", "qwen3"))
    with running(served) as url:
        scene.url = url
        yield scene


@pytest.fixture
def scene(server):
    """The module's server, which writes reasoning, a sentence and two calls."""
    server.text = f"<think>\nWhere?\n</think>\n\nI look.\n{CALLS}"
    script = server.engine.script
    yield server
    server.engine.script, server.engine.run = script, 3


def seen_prompt(scene):
    """A list that gets the text of every prompt from now on."""
    prompts, script = [], scene.engine.script
    scene.engine.script = lambda ids: (prompts.append(scene.tokenizer.decode(ids)), script(ids))[1]
    return prompts


@pytest.mark.parametrize("run", [1, 40])
def test_whole_and_streamed_calls_are_equal(scene, run):
    """However many tokens a step accepts: reasoning, content, two calls with ids, and the finish reason."""
    scene.engine.run = run
    whole = scene.ask(tools=[WEATHER])
    message = whole.choices[0].message
    assert (message.content, message.reasoning_content) == ("I look.", "Where?")
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [
        ("get_weather", PARIS),
        ("get_weather", ROME),
    ]
    assert len({c.id for c in message.tool_calls}) == 2 and whole.choices[0].finish_reason == "tool_calls"
    streamed = {"content": "", "reasoning": "", "calls": {}, "reasons": []}
    for chunk in scene.ask(tools=[WEATHER], stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            streamed["content"] += choice.delta.content or ""
            streamed["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            streamed["reasons"] += [choice.finish_reason] if choice.finish_reason else []
            for delta in choice.delta.tool_calls or ():  # a call comes in one piece
                if delta.id:
                    streamed["calls"][delta.index] = [delta.function.name, delta.function.arguments]
        usage = chunk.usage
    assert streamed == {
        "content": "I look.",
        "reasoning": "Where?",
        "calls": {0: ["get_weather", PARIS], 1: ["get_weather", ROME]},
        "reasons": ["tool_calls"],
    }
    assert usage == whole.usage
    thought = scene.ids("<think>\nWhere?\n</think>")  # counted from where the opening mark is whole
    expected = len(thought) - len(scene.ids("<think>")) + 1
    assert usage.completion_tokens_details.reasoning_tokens == pytest.approx(expected, abs=1)


def test_without_tools_a_call_is_text(scene):
    """Who offers none must get what the model wrote; `none` takes the offer back."""
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = scene.ask(**fields).choices[0]
        assert choice.message.content == f"I look.\n{CALLS}" and choice.message.tool_calls is None
        assert choice.finish_reason == "stop"


def test_one_call_ends_the_answer(scene):
    """Nothing is generated beyond the first call where a client takes only one."""
    one = scene.ask(tools=[WEATHER], parallel_tool_calls=False)
    both = scene.ask(tools=[WEATHER])
    assert [c.function.arguments for c in one.choices[0].message.tool_calls] == [PARIS]
    assert one.choices[0].finish_reason == "tool_calls"
    assert one.usage.completion_tokens < both.usage.completion_tokens


def test_a_cut_call_says_length(scene):
    """Half of the arguments must not look complete. As history they are an object for the template, and no 400."""
    choice = scene.ask(tools=[WEATHER], max_tokens=90).choices[0]
    assert choice.finish_reason == "length" and choice.message.tool_calls
    cut = choice.message.tool_calls[0].function.arguments
    assert PARIS.startswith(cut) and cut != PARIS
    prompts = seen_prompt(scene)
    scene.ask(messages=[*USER, choice.message.model_dump(), *USER], tools=[WEATHER])
    assert f'"arguments": {json.dumps({"arguments": cut}, ensure_ascii=False)}}}\n</tool_call>' in prompts[0]


def test_the_prompt_of_a_template_without_tools(scene):
    """The tools, the calls and the results of a turn are in it as text, in the form that the parser reads."""
    prompts = seen_prompt(scene)
    calls = [
        {"id": f"call_{at}", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        for at, arguments in enumerate((PARIS, ROME))
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": "sun"},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": [{"type": "text", "text": "rain"}],
            "name": "get_weather",
        },
    ]
    scene.ask(messages=messages, tools=[WEATHER, ADD])
    system, user, assistant, results = prompts[0].split("<|im_start|>")[1:5]
    assert system.startswith("system\nBe brief.\n\n") and json.dumps(WEATHER) in system and '"name": "add"' in system
    assert assistant.startswith(
        f'assistant\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
    )
    responses = [f"<tool_response>\n{word}\n</tool_response>" for word in ("sun", "rain")]
    assert results == "user\n" + "\n".join(responses) + "<|im_end|>\n"


TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}[{{ message.role }}"
    "{% if message.name %} {{ message.name }}{% endif %}]{{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
    "{% if enable_thinking is false %}<think></think>{% endif %}"
)


def test_a_template_with_tools(scripted, tiny_target, running):
    """It gets the tools with all their fields, arguments as objects, the function's name with a result, and the
    variables that it reads; a variable that it does not read is refused."""
    tokenizer = copy.deepcopy(tiny_target.tokenizer)
    tokenizer.chat_template = TOOL_TEMPLATE
    scene = Scripted(scripted, tokenizer)
    prompts = seen_prompt(scene)
    call = {"id": "x", "type": "function", "function": {"name": "get_weather", "arguments": ROME}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "rain"},
    ]
    served = scene.served()
    object.__setattr__(served, "parsers", Parsers.of(tokenizer, "hermes"))
    with running(served) as scene.url:
        kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
        scene.ask(messages=messages, tools=[ADD], extra_body=kwargs)
        with pytest.raises(openai.BadRequestError) as caught:
            scene.ask(extra_body={"chat_template_kwargs": {"chat_template": "{{ 1 }}"}})
        assert caught.value.param == "chat_template_kwargs.chat_template"
        with pytest.raises(openai.BadRequestError) as caught:
            scene.ask(reasoning_effort="high")
        assert caught.value.param == "reasoning_effort"
        object.__setattr__(served.parsers, "calls", None)
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            scene.ask(tools=[ADD])  # calls that nobody reads would be answered as text, in silence
    described = {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}
    expected = json.dumps([{"type": "function", "function": described}])
    assert prompts[0] == expected + "[user]count apples[assistant]Rome[tool get_weather]rain<think></think>"


def test_the_schema_of_a_forced_call():
    """A list of calls of the offered functions; references inside of a function's schema still lead to their place."""
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"$ref": "#"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": node}}, ADD]
    body = {"model": NAME, "messages": USER, "tools": tools, "tool_choice": "required"}
    schema = forced_schema(ChatRequest.model_validate(body))
    assert [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]] == ["f", "add"]
    moved = schema["$defs"]["tool0"]
    assert moved["properties"]["next"] == {"$ref": "#/$defs/tool0/$defs/N"}
    assert moved["$defs"]["N"] == {"$ref": "#/$defs/tool0"}
    assert schema["maxItems"] > 1 and schema["$defs"]["tool1"] == {"type": "object", "properties": {}}


def test_special_tokens_that_mark_calls(scripted, tiny_target, running):
    """Mistral's mark is a special token, which gives no text elsewhere; a prompt may end inside of the reasoning."""
    tokenizer = copy.deepcopy(tiny_target.tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    scene = Scripted(scripted, tokenizer)
    scene.text = f"I ✨[TOOL_CALLS]get_weather{ROME}"
    served = scene.served()
    object.__setattr__(served, "parsers", Parsers("mistral"))
    with running(served) as scene.url:
        message = scene.ask(tools=[WEATHER]).choices[0].message
        plain = scene.ask().choices[0].message
    assert message.content == "I ✨" and message.tool_calls[0].function.arguments == ROME
    assert len(message.tool_calls[0].id) == 9  # Mistral's templates refuse other ids
    assert plain.content == f"I ✨get_weather{ROME}"


@pytest.mark.parametrize(("run", "stream"), [(1, False), (40, True)])
def test_stop_strings_act_on_the_content(scene, run, stream):
    """A model that thinks about a stop string must still answer; the count ends with the token of the stop."""
    scene.engine.run = run
    scene.text = "<think>\nNot 7 yet.\n</think>\n\nAt 漢7 it ends."
    if stream:
        chunks = [c for c in scene.ask(stop=["漢7", "yet"], stream=True) if c.choices]
        content = "".join(c.choices[0].delta.content or "" for c in chunks)
        reasoning = "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        whole = scene.ask(stop=["漢7", "yet"])
        message, reason = whole.choices[0].message, whole.choices[0].finish_reason
        content, reasoning = message.content, message.reasoning_content
        assert whole.usage.completion_tokens == len(scene.ids(scene.text.partition(" it")[0]))
    assert (content, reasoning, reason) == ("At ", "Not 7 yet.", "stop")
    held = scene.ask(stop=["7", "ends.!"], extra_body={"min_tokens": 200}).choices[0].message.content
    assert held == "At 漢7 it ends."
