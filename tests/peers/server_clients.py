"""Ordinary calls of the clients that people use, against a server: `python server_clients.py URL MODEL`.

Runs in an environment of its own with openai and langchain-openai. Prints one JSON object a client: its name,
version and the calls that passed. An answer that is not what the client documents ends it with an error.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

ASKED = "Name three rivers."
QUESTION = [{"role": "user", "content": ASKED}]
CITY = {"city": {"type": "string", "maxLength": 12}}
PARAMETERS = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}
FUNCTION = {"name": "get_weather", "description": "The weather of a city", "parameters": PARAMETERS}
WEATHER = {"type": "function", "function": FUNCTION}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
DIALOGUE = [
    {"role": "user", "content": "Weather in Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]
LIMITS = {"temperature": 0, "max_tokens": 24}
WHOLE = {"temperature": 0, "max_tokens": 200}


class Water(BaseModel):
    """A form that any model fills within the limit, a random one too."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["river", "lake"]
    name: str = Field(max_length=12)
    salty: bool


FORMAT = {"type": "json_schema", "json_schema": {"name": "water", "schema": Water.model_json_schema()}}


def check_message(message: Any) -> int:
    """A message has text, or calls whose arguments are JSON. Returns the number of calls."""
    calls = getattr(message, "tool_calls", None) or []
    assert calls or isinstance(message.content, str)
    for call in calls:
        json.loads(call.function.arguments)
    return len(calls)


def check_weather(arguments: str) -> None:
    """The arguments of a call that was asked for are those of the function."""
    found = json.loads(arguments)
    assert list(found) == ["city"] and isinstance(found["city"], str), arguments


def text_of(chunks: Any) -> str:
    """The text of a streamed chat."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def with_openai(url: str, model: str) -> list[str]:
    """All that the client offers for text: chats, completions, responses."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
    return [*openai_chats(client, model), *openai_forms(client, model), *openai_responses(client, model)]


def openai_chats(client: Any, model: str) -> list[str]:
    """Chat, stream with usage, n, tools, a tool's result, completions."""
    chats = client.chat.completions
    fields = {"model": model, "messages": QUESTION, **LIMITS}
    text = chats.create(**fields).choices[0].message.content
    chunks = list(chats.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert text == text_of(chunks) and chunks[-1].usage.completion_tokens > 0
    assert len(chats.create(**fields, n=2).choices) == 2
    check_message(chats.create(**fields, tools=[WEATHER]).choices[0].message)
    assert list(chats.create(**fields, tools=[WEATHER], stream=True))[-1].choices[0].finish_reason
    asked = {**fields, **WHOLE, "tools": [WEATHER], "tool_choice": "required"}
    choice = chats.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls" and check_message(choice.message) > 0
    check_weather(choice.message.tool_calls[0].function.arguments)
    deltas = [chunk.choices[0].delta.tool_calls or [] for chunk in chats.create(**asked, stream=True)]
    parts = [call.function.arguments or "" for calls in deltas for call in calls if call.index == 0]
    assert "".join(parts) == choice.message.tool_calls[0].function.arguments
    assert chats.create(**{**fields, "messages": DIALOGUE}, tools=[WEATHER]).choices
    assert client.completions.create(model=model, prompt="The", max_tokens=4).choices[0].text
    streamed = client.completions.create(model=model, prompt="The", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed)
    calls = ["tools", "tools streamed", "required", "required streamed", "tool result"]
    return ["chat", "stream", "n", *calls, "completions", "completions streamed"]


def openai_forms(client: Any, model: str) -> list[str]:
    """json_schema whole and streamed, json_object, parse with a model and with a tool, the streams that parse."""
    import openai

    class GetWeather(BaseModel):
        city: str = Field(max_length=12)

    chats = client.chat.completions
    fields = {"model": model, "messages": QUESTION, **WHOLE}
    text = chats.create(**fields, response_format=FORMAT).choices[0].message.content
    water = Water.model_validate_json(text)
    assert text_of(chats.create(**fields, response_format=FORMAT, stream=True)) == text
    assert chats.parse(**fields, response_format=Water).choices[0].message.parsed == water
    with chats.stream(**fields, response_format=Water) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == water
    assert {"content.delta", "content.done"} <= kinds
    tools = [openai.pydantic_function_tool(GetWeather)]
    message = chats.parse(**fields, tools=tools, tool_choice="required").choices[0].message
    assert isinstance(message.tool_calls[0].function.parsed_arguments, GetWeather)
    choice = chats.create(**fields, response_format={"type": "json_object"}).choices[0]
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
    return ["json_schema", "json_schema streamed", "parse", "stream that parses", "parse with tools", "json_object"]


def openai_responses(client: Any, model: str) -> list[str]:
    """Responses whole and streamed, with a form, with tools and a tool's result."""
    answers = client.responses
    short = {"model": model, "input": ASKED, "temperature": 0, "max_output_tokens": 24}
    text = client.chat.completions.create(model=model, messages=QUESTION, **LIMITS).choices[0].message.content
    events = list(answers.create(**short, stream=True))
    assert answers.create(**short).output_text == events[-1].response.output_text == text
    assert text == "".join(event.delta for event in events if event.type == "response.output_text.delta")
    longer = {**short, "max_output_tokens": 200}
    water = answers.parse(**longer, text_format=Water).output_parsed
    assert isinstance(water, Water)
    with answers.stream(**longer, text_format=Water) as stream:
        assert any(event.type == "response.output_text.delta" for event in stream)
        assert stream.get_final_response().output_parsed == water
    named = {"type": "json_schema", "name": "water", "schema": Water.model_json_schema()}
    assert Water.model_validate_json(answers.create(**longer, text={"format": named}).output_text) == water
    asked = {**longer, "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}
    (call, *_) = [item for item in answers.create(**asked).output if item.type == "function_call"]
    check_weather(call.arguments)
    done = [event for event in answers.create(**asked, stream=True) if event.type.endswith("arguments.done")]
    assert done[0].arguments == call.arguments
    turns = [{"role": "user", "content": "Weather in Rome?"}, call.model_dump(exclude_none=True)]
    turns += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    assert answers.create(**{**short, "input": turns}).output
    forms = ["responses.parse", "responses.stream that parses", "responses json_schema"]
    return ["responses", "events", *forms, "responses tools", "tool events", "responses tool result"]


def with_langchain(url: str, model: str) -> list[str]:
    """ChatOpenAI: invoke, stream, batch, bind_tools, a tool's result, structured output, the responses API."""
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    settings = {"model": model, "base_url": url, "api_key": "none", "max_retries": 0}
    chat = ChatOpenAI(**settings, **LIMITS, stream_usage=True)
    whole = chat.invoke(ASKED)
    assert whole.content and whole.usage_metadata["output_tokens"] > 0
    assert whole.content == "".join(chunk.content for chunk in chat.stream(ASKED))
    assert len(chat.batch(["One", "Two"])) == 2
    bound = chat.bind_tools([WEATHER])
    answer = bound.invoke("Weather in Rome?")
    assert answer.content or answer.tool_calls or answer.invalid_tool_calls
    assert list(bound.stream("Weather in Rome?"))
    longer = ChatOpenAI(**settings, **WHOLE)
    forced = longer.bind_tools([WEATHER], tool_choice="get_weather")
    (call, *_) = forced.invoke("Weather in Rome?").tool_calls
    assert call["name"] == "get_weather" and list(call["args"]) == ["city"]
    chunks = list(forced.stream("Weather in Rome?"))
    assert sum(chunks[1:], chunks[0]).tool_calls[0]["args"] == call["args"]
    given = {"name": "get_weather", "args": {"city": "Rome"}, "id": "call_1"}
    turns = [HumanMessage("Weather?"), AIMessage("", tool_calls=[given]), ToolMessage("sunny", tool_call_id="call_1")]
    assert isinstance(bound.invoke(turns), AIMessage)
    formed = longer.with_structured_output(Water)
    assert isinstance(formed.invoke(ASKED), Water)
    assert list(formed.stream(ASKED))[-1] == formed.invoke(ASKED)
    assert isinstance(longer.with_structured_output(Water, method="function_calling").invoke(ASKED), Water)
    as_object = longer.with_structured_output(Water, method="json_mode", include_raw=True).invoke(ASKED)
    assert as_object["raw"].content.lstrip().startswith("{")
    assert ChatOpenAI(**settings, **LIMITS, use_responses_api=True).invoke(ASKED).text == whole.content
    responses = ChatOpenAI(**settings, **WHOLE, use_responses_api=True)
    assert isinstance(responses.with_structured_output(Water).invoke(ASKED), Water)
    assert responses.bind_tools([WEATHER], tool_choice="get_weather").invoke("Weather in Rome?").tool_calls
    tools = ["bind_tools", "tools streamed", "tool_choice", "tool_choice streamed", "tool result"]
    forms = ["structured output", "structured output streamed", "by function calling", "json_mode"]
    return ["invoke", "stream", "batch", *tools, *forms, "responses", "responses structured", "responses tools"]


CLIENTS = {"openai": with_openai, "langchain-openai": with_langchain}

if __name__ == "__main__":
    for name, run in CLIENTS.items():
        passed = run(*sys.argv[1:3])
        print(json.dumps({"client": name, "version": version(name), "passed": passed}), flush=True)
