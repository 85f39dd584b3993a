"""The parsers of answers, on texts as the families write them. Each text is divided at every position, and into single
characters: a streamed answer must be the whole one."""

from __future__ import annotations

import json

import pytest

from toolkit.infer.server.answer_parser import REASONING_PARSERS, TOOL_CALL_PARSERS, Parsers

SCHEMAS = {"get_weather": {"properties": {"city": {"type": "string"}}}, "add": {}}
PARIS = '{"city": "Paris \\"}{<tool_call>\\\\", "days": [1, {"a": null}]}'


def read(parsers, parts, prompt_end="", one_call=False, forced=False, cut=False):
    """(kind, text, name, number of the call) of the pieces, with neighbours of a kind joined; calls are whole."""
    parser = parsers.start(SCHEMAS, prompt_end, forced=forced, one_call=one_call)
    found = []
    for piece in [piece for part in parts for piece in parser.push(part)] + parser.finish(cut):
        if found and piece.kind == found[-1][0] != "call":
            found[-1] = (piece.kind, found[-1][1] + piece.text, "", -1)
        else:
            found.append((piece.kind, piece.text, piece.name, piece.index))
    return found


def every_division(parsers, text, **settings):
    """The pieces of `text`, equal for all divisions into two parts and for single characters."""
    whole = read(parsers, [text], **settings)
    assert read(parsers, list(text), **settings) == whole
    for at in range(1, len(text)):
        assert read(parsers, [text[:at], text[at:]], **settings) == whole, text[:at]
    return whole


def call(name, arguments, index=0):
    return ("call", arguments, name, index)


def content(text):
    return ("content", text, "", -1)


def reasoning(text):
    return ("reasoning", text, "", -1)


def hermes(arguments, name="get_weather"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


DEEPSEEK_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n" + PARIS + "\n```"
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
DEEPSEEK_V31 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>" + PARIS + "<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
HARMONY = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + PARIS + "<|call|>"
    "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{}<|call|>"
)
TWO_CALLS = {
    "hermes": ("hermes", hermes(PARIS) + "\n" + hermes("{}", "add")),
    "llama-bare": (
        "llama3-json",
        f'{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "add", "parameters": {{}}}}',
    ),
    "llama-mark": (
        "llama3-json",
        f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}\n'
        '{"name":"add","parameters":{}}',
    ),
    "mistral-list": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "add", "arguments": {{}}}}]',
    ),
    "mistral-v11": ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{{}}"),
    "deepseek-v3": ("deepseek", DEEPSEEK_V3),
    "deepseek-v3.1": ("deepseek", DEEPSEEK_V31),
    "gpt-oss": ("gpt-oss", HARMONY),
}


@pytest.mark.parametrize("form", TWO_CALLS)
def test_two_calls(form):
    """The arguments arrive as they were written, braces, quotes and marks in strings included. With
    parallel_tool_calls: false the answer ends after the first call."""
    family, text = TWO_CALLS[form]
    both = [call("get_weather", PARIS), call("add", "{}", 1)]
    assert every_division(Parsers(family, None), text) == both
    assert read(Parsers(family, None), list(text), one_call=True) == both[:1]


TAGGED = {
    "qwen3-coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\n3 <b>\n\n</parameter>\n"
    "<parameter=days>\n[1, 2]\n</parameter>\n<parameter=note>\nnot JSON\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=add>\n</function>\n</tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>3 <b>\n</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>"
    "<arg_key>note</arg_key><arg_value>not JSON</arg_value></tool_call>\n"
    "<tool_call>add\n</tool_call>",
}
TAGGED_ARGUMENTS = json.dumps({"city": "3 <b>\n", "days": [1, 2], "note": "not JSON"})


@pytest.mark.parametrize("family", TAGGED)
def test_arguments_between_tags(family):
    """A value has the type of the function's schema: a city "3" stays text. A call that max_tokens has cut must not
    look complete."""
    parsers = Parsers(family)
    calls = [call("get_weather", TAGGED_ARGUMENTS), call("add", "{}", 1)]
    assert every_division(parsers, f"So:\n{TAGGED[family]}\nDone.") == [content("So:"), *calls, content("Done.")]
    assert every_division(parsers, TAGGED[family][:130], cut=True)[0][1].startswith('{"city": "3 <b>\\n"')
    assert "}" not in every_division(parsers, TAGGED[family][:130], cut=True)[0][1]
    unknown = TAGGED["qwen3-coder"].replace("get_weather", "other").partition("<tool_call>\n<function=add>")[0]
    assert every_division(Parsers("qwen3-coder"), unknown) == [content(unknown)]


def test_a_model_that_ends_its_answer_within_a_call():
    """The finish reason is then "tool_calls": its arguments must be whole."""
    text = "<tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>\nx y"
    assert every_division(Parsers("qwen3-coder"), text) == [call("add", '{"a": 1, "b": "x y"}')]


def test_a_value_without_its_closing_tag():
    """Small models forget it. The end of the call is no part of the value."""
    for family, written in (
        ("qwen3-coder", "<tool_call>\n<function=add>\n<parameter=a>\nx y\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>x y</tool_call>"),
    ):
        wanted = [call("add", '{"a": "x y"}'), content("Done.")]
        assert every_division(Parsers(family), f"{written}\nDone.") == wanted


def test_a_forced_list():
    """tool_choice "required" makes the answer a JSON list, whatever the family."""
    text = f'[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "add", "arguments": {{}}}}]'
    for family in ("hermes", "gpt-oss", None):
        both = [call("get_weather", PARIS), call("add", "{}", 1)]
        assert every_division(Parsers(family, None), text, forced=True) == both


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "see:\n<tool_call>\n{broken"),
        ("hermes", 'x <tool_call>{"name": "unknown", "arguments": {}}</tool_call> y'),
        ("hermes", '<tool_call>{"name": "a\\qb", "arguments": {}}'),
        ("llama3-json", '{"answer": 3, "name": "add "} more'),
        ("llama3-json", "  \n"),
        ("mistral", "[TOOL_CALLS] add and more"),
        ("deepseek", "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"),
    ],
)
def test_what_is_no_call_is_content(family, text):
    """Nothing that the model wrote is lost, and no client is asked to run a function that it does not have."""
    assert every_division(Parsers(family, None), text) == [content(text)]


def test_other_forms_of_a_call():
    """Keys in another order, arguments as a string, none at all; a brace forgotten by a small model."""
    for written, arguments in [
        ('{"arguments": {"a": "</tool_call>"}, "name": "add"}', '{"a": "</tool_call>"}'),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "add"}', "{}"),
        ('{"name": "add", "arguments": {"a": 1}', '{"a": 1}'),
        ('{"name": "add", "arguments": {"a": 1', '{"a": 1'),
    ]:
        text = f"So:\n<tool_call>{written}</tool_call>\nDone."
        found = every_division(Parsers("hermes", None), text)
        assert found == [content("So:"), call("add", arguments), content("Done.")]


def test_an_answer_cut_within_a_call():
    """max_tokens may end it anywhere: what has come of the arguments stays."""
    ((_, arguments, name, _),) = every_division(Parsers("hermes", None), hermes(PARIS)[:60], cut=True)
    assert name == "get_weather" and PARIS.startswith(arguments) and arguments


@pytest.mark.parametrize(
    ("text", "prompt_end", "wanted"),
    [
        ("<think>\nhm </thin\n</think>\n\nYes.", "", [reasoning("hm </thin"), content("Yes.")]),
        ("hm\n</think>\n\nYes.", "<think>\n", [reasoning("hm"), content("Yes.")]),
        ("hm, cut ", "<think>\n", [reasoning("hm, cut ")]),
        ("Yes <think> no.", "", [content("Yes <think> no.")]),
        ("Yes.", "<think>\n\n</think>\n\n", [content("Yes.")]),
    ],
)
def test_reasoning(text, prompt_end, wanted):
    """The prompt may open the reasoning or close it; an answer may be all reasoning."""
    assert every_division(Parsers(None, "qwen3"), text, prompt_end=prompt_end) == wanted


def test_reasoning_of_deepseek_r1_needs_no_mark():
    """Its older templates open none, and some answers begin without one."""
    parsers = Parsers(None, "deepseek-r1")
    assert every_division(parsers, "hm</think>Yes.") == [reasoning("hm"), content("Yes.")]
    assert every_division(parsers, "Yes.", prompt_end="</think>") == [content("Yes.")]


def test_reasoning_before_a_call():
    """What the model only thinks of calling is no call."""
    text = f"<think>{hermes('{}')}</think>\n{hermes(PARIS)}"
    assert every_division(Parsers("hermes", "qwen3"), text) == [reasoning(hermes("{}")), call("get_weather", PARIS)]


def test_harmony_channels():
    """Analysis is reasoning, a preamble and the final channel are content; a header that is cut gives no text."""
    text = (
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|>"
        + f"<|start|>assistant{HARMONY.partition('<|start|>')[0]}<|start|>assistant<|channel|>final<|message|>Sunny."
    )
    found = every_division(Parsers("gpt-oss", "gpt-oss"), text)
    assert found == [reasoning("Let me see."), content("I look."), call("get_weather", PARIS), content("Sunny.")]
    assert every_division(Parsers("gpt-oss", None), "Plain.") == [content("Plain.")]
    unknown = "<|channel|>commentary to=browser.search<|message|>{}<|end|><|start|>assist"
    assert every_division(Parsers("gpt-oss", None), unknown) == [reasoning("{}")]


def test_broken_text_never_raises():
    """A model may write anything; the marks in every order and cut at every place."""
    parts = ["<tool_call>", '{"name": "add", ', "[TOOL_CALLS]", "add", "<|channel|>", "<|message|>", "<function=add>"]
    for family in TOOL_CALL_PARSERS:
        for parsers in (Parsers(family), Parsers(family, REASONING_PARSERS[0])):
            for at in range(len(parts)):
                text = "".join(parts[at:] + parts[:at]) * 2
                for cut in range(0, len(text), 17):
                    assert read(parsers, list(text[:cut])) == read(parsers, [text[:cut]])


TEMPLATES = {
    "{{ tools }}<tool_call></tool_call><think></think>": ("hermes", "qwen3"),
    "{{ tools }}<tool_call><function=f>": ("qwen3-coder", None),
    "{{ tools }}<tool_call><arg_key>": ("glm45", None),
    "{{ tools }}": (None, None),
    "{{ tools }}[TOOL_CALLS]": ("mistral", None),
    "{{ tools }}<｜tool▁calls▁begin｜></think>": ("deepseek", "qwen3"),
    "{{ tools }}<|python_tag|>": ("llama3-json", None),
    "{{ tools }}<|start|><|channel|>analysis": ("gpt-oss", "gpt-oss"),
    "{{ messages }}": ("hermes", None),
}


def test_recognised_by_the_template():
    """`auto` goes by the marks of the family; a template with an unknown form has none."""

    class Tokenizer:
        def get_chat_template(self, tools):
            return self.chat_template

    tokenizer = Tokenizer()
    for tokenizer.chat_template, wanted in TEMPLATES.items():
        recognised = Parsers.of(tokenizer)
        assert (recognised.calls, recognised.reasoning) == wanted
    assert Parsers.of(tokenizer, "none", "none") == Parsers(None, None)
    assert Parsers.of(tokenizer, "mistral", "deepseek-r1") == Parsers("mistral", "deepseek-r1")
