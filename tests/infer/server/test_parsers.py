"""The parsers of answers, on texts as the families write them. Each text is divided at every position, and into single
characters: a streamed answer must be the whole one."""

from __future__ import annotations

import json

import pytest

from toolkit.infer.server.answer_pieces import AnswerParser
from toolkit.infer.server.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS, Parsers

SCHEMAS = {"get_weather": {"properties": {"city": {"type": "string"}}}, "add": {}}
PARIS = '{"city": "Paris \\"}{<tool_call>\\\\", "days": [1, {"a": null}]}'


def joined(pieces):
    """[kind, text, number of the call] with neighbours of a kind joined."""
    found = []
    for piece in pieces:
        if found and piece.kind != "call" and (found[-1][0], found[-1][2]) == (piece.kind, piece.index):
            found[-1][1] += piece.text
        else:
            found.append([piece.kind, piece.text, piece.index])
    return found


def read(parsers, parts, prompt_end="", one_call=False, forced=False, schemas=SCHEMAS, cut=False):
    parser: AnswerParser = parsers.start(schemas, prompt_end, forced=forced, one_call=one_call)
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish(cut)
    return joined(pieces)


def every_division(parsers, text, **settings):
    """The pieces of `text`, equal for all divisions into two parts and for single characters."""
    whole = read(parsers, [text], **settings)
    assert read(parsers, list(text), **settings) == whole
    for at in range(1, len(text)):
        assert read(parsers, [text[:at], text[at:]], **settings) == whole, text[:at]
    return whole


def call(name, arguments, index):
    return [["call", name, index], ["arguments", arguments, index]]


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
TWO_CALLS = [
    ("hermes", hermes(PARIS) + "\n" + hermes("{}", "add")),
    ("hermes", hermes(PARIS) + hermes("{}", "add") + "\n"),
    ("llama3-json", f'{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "add", "parameters": {{}}}}'),
    ("llama3-json", f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}\n'
                    '{"name":"add","parameters":{}}'),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, '
                '{"name": "add", "arguments": {}}]'),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{{}}"),
    ("deepseek", DEEPSEEK_V3),
    ("deepseek", DEEPSEEK_V31),
    ("gpt-oss", HARMONY),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text"), TWO_CALLS)
def test_two_calls(family, text):
    """The arguments arrive as they were written, braces, quotes and marks in strings included."""
    found = every_division(Parsers(family, None), text)
    assert found == call("get_weather", PARIS, 0) + call("add", "{}", 1)


@pytest.mark.parametrize(("family", "text"), TWO_CALLS)
def test_arguments_come_in_pieces(family, text):
    """A client that shows a long argument must not wait for its end."""
    parser = Parsers(family, None).start(SCHEMAS, "", forced=False, one_call=False)
    pieces = [piece for character in text for piece in parser.push(character)]
    assert sum(piece.kind == "arguments" and piece.index == 0 for piece in pieces) > 10


@pytest.mark.parametrize(("family", "text"), TWO_CALLS)
def test_one_call_only(family, text):
    """parallel_tool_calls: false ends the answer after the first call."""
    assert every_division(Parsers(family, None), text, one_call=True) == call("get_weather", PARIS, 0)


TAGGED = {
    "qwen3-coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\n3 <b>\n\n</parameter>\n"
    "<parameter=days>\n[1, 2]\n</parameter>\n<parameter=note>\nnot JSON\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=add>\n</function>\n</tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>3 <b>\n</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>"
    "<arg_key>note</arg_key><arg_value>not JSON</arg_value></tool_call>\n"
    "<tool_call>add\n</tool_call>",
}


@pytest.mark.parametrize("family", TAGGED)
def test_arguments_between_tags(family):
    """A value has the type of the function's schema: a city "3" stays text. Calls that are cut or unknown."""
    parsers = Parsers(family)
    wanted = json.dumps({"city": "3 <b>\n", "days": [1, 2], "note": "not JSON"})
    text = f"So:\n{TAGGED[family]}\nDone."
    calls = call("get_weather", wanted, 0) + call("add", "{}", 1)
    assert every_division(parsers, text) == [["content", "So:", -1], *calls, ["content", "Done.", -1]]
    assert every_division(parsers, TAGGED[family][:130], cut=True)[1][1].startswith('{"city": "3 <b>\\n"')
    unknown = TAGGED[family].replace("get_weather", "other").partition("<tool_call>\n<function=add>")[0]
    if family == "qwen3-coder":
        assert every_division(parsers, unknown) == [["content", unknown, -1]]


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "[1, NaN]"])
def test_no_number_of_json(value):
    """Python reads and writes them; a client's JSON parser raises."""
    text = f"<function=add><parameter=a>{value}</parameter></function>"
    assert every_division(Parsers("qwen3-coder"), text) == call("add", json.dumps({"a": value}), 0)
    written = f"[add(a={value.replace('-Infinity', '-1e999').replace('NaN', '1e999')})]"
    assert every_division(Parsers("pythonic"), written) == [["content", written, -1]]


@pytest.mark.parametrize(
    ("end", "wanted"),
    [
        ("<parameter=a>1</parameter>", '{"a": 1}'),
        ("<parameter=a>1</parameter>\n<parameter=b>\nx y", '{"a": 1, "b": "x y"}'),
        ("", "{}"),
    ],
)
def test_a_model_that_ends_its_answer_within_a_call(end, wanted):
    """The finish reason is then "tool_calls": its arguments must be whole. Not where max_tokens has cut it."""
    text = f"<tool_call>\n<function=add>\n{end}"
    assert every_division(Parsers("qwen3-coder"), text) == call("add", wanted, 0)
    cut = every_division(Parsers("qwen3-coder"), text, cut=True)
    assert "}" not in "".join(one[1] for one in cut)


FORGOTTEN = {
    "qwen3-coder": ("<tool_call>\n<function=add>\n<parameter=a>\n{}\n", "</function>\n</tool_call>"),
    "glm45": ("<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{}", "</tool_call>"),
}


@pytest.mark.parametrize("family", FORGOTTEN)
def test_a_value_without_its_closing_tag(family):
    """Small models forget it. The end of the call, or a call after it, is no part of the value. A value that has its
    closing tag may hold any tag that ends a call."""
    opened, ends = FORGOTTEN[family]
    parsers, first = Parsers(family), call("add", '{"a": "x y"}', 0)
    text = opened.format("x y") + ends
    assert every_division(parsers, text) == every_division(parsers, text, cut=True) == first
    assert every_division(parsers, text + "\nDone.") == [*first, ["content", "Done.", -1]]
    assert every_division(parsers, f"{text}\n{TAGGED[family]}")[:4] == [
        *first, *call("get_weather", json.dumps({"city": "3 <b>\n", "days": [1, 2], "note": "not JSON"}), 1),
    ]  # fmt: skip
    closes = "</parameter>" if family == "qwen3-coder" else "</arg_value>"
    held = opened.format("x </tool_call> y") + closes + ends
    assert every_division(parsers, held) == call("add", json.dumps({"a": "x </tool_call> y"}), 0)


def test_a_forced_list():
    """tool_choice "required" makes the answer a JSON list, whatever the family."""
    text = f'[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "add", "arguments": {{}}}}]'
    for family in ("hermes", "gpt-oss", None):
        found = every_division(Parsers(family, None), text, forced=True)
        assert found == call("get_weather", PARIS, 0) + call("add", "{}", 1)


def test_pythonic_calls():
    """Literals of Python become JSON; several calls, nested values, both kinds of quotes."""
    text = """<|python_start|>[get_weather(city='Par[is', days=[1, {"a": None}], hot=True), add()]<|python_end|>"""
    wanted = json.dumps({"city": "Par[is", "days": [1, {"a": None}], "hot": True})
    for written in (text, text.removeprefix("<|python_start|>").removesuffix("<|python_end|>")):
        found = every_division(Parsers("pythonic", None), written)
        assert found == call("get_weather", wanted, 0) + call("add", "{}", 1)


@pytest.mark.parametrize(
    "text",
    ["[1, 2]", "[", "[get_weather(city)]", "[get_weather(1)]", "[other(a=1)]", "[f(a=open('x'))]", "[add()", "hi"],
)
def test_no_pythonic_call(text):
    """A list that is no list of calls is an answer like another."""
    assert every_division(Parsers("pythonic", None), text) == [["content", text, -1]]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "no call at all\n"),
        ("hermes", "a < b and <tool"),
        ("hermes", "see:\n<tool_call>\n{broken"),
        ("hermes", 'x <tool_call>{"name": "unknown", "arguments": {}}</tool_call> y'),
        ("hermes", '<tool_call>{"name": "add"'),
        ("hermes", '<tool_call>{"name": "a\\qb", "arguments": {}}'),
        ("hermes", "<tool_call> <tool_call> x"),
        ("llama3-json", '{"answer": 3, "name": "add"}'),
        ("llama3-json", '{"name": "unknown", "parameters": {"a": 1}} more'),
        ("llama3-json", '{"name": "add", "parameters"'),
        ("llama3-json", "  \n"),
        ("llama3-json", "{}"),
        ("mistral", "[TOOL_CALLS] add and more"),
        ("mistral", "[TOOL"),
        ("deepseek", "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"),
    ],
)
def test_what_is_no_call_is_content(family, text):
    """Nothing that the model wrote is lost, and no client is asked to run a function that it does not have."""
    assert every_division(Parsers(family, None), text) == [["content", text, -1]]


def test_other_forms_of_a_call():
    """Keys in another order, arguments as a string, none at all; a brace forgotten by a small model."""
    parsers = Parsers("hermes", None)
    for written, arguments in [
        ('{"arguments": {"a": "</tool_call>"}, "name": "add"}', '{"a": "</tool_call>"}'),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "add"}', "{}"),
        ('{"name": "add", "arguments": {"a": 1}', '{"a": 1}'),
        ('{"name": "add", "arguments": {"a": 1', '{"a": 1'),
    ]:
        text = f"So:\n<tool_call>{written}</tool_call>\nDone."
        found = every_division(parsers, text)
        assert found == [["content", "So:", -1], *call("add", arguments, 0), ["content", "Done.", -1]]


def test_an_answer_cut_within_a_call():
    """max_tokens may end it anywhere: what has come of the arguments stays."""
    found = every_division(Parsers("hermes", None), hermes(PARIS)[:60])
    assert found[0] == ["call", "get_weather", 0] and PARIS.startswith(found[1][1]) and len(found) == 2


@pytest.mark.parametrize(
    ("text", "prompt_end", "wanted"),
    [
        ("<think>\nhm </thin\n</think>\n\nYes.", "", [["reasoning", "hm </thin", -1], ["content", "Yes.", -1]]),
        ("hm\n</think>\n\nYes.", "<think>\n", [["reasoning", "hm", -1], ["content", "Yes.", -1]]),
        ("<think>hm</think>Yes.", "<think>\n", [["reasoning", "hm", -1], ["content", "Yes.", -1]]),
        ("hm, cut ", "<think>\n", [["reasoning", "hm, cut ", -1]]),
        ("Yes <think> no.", "", [["content", "Yes <think> no.", -1]]),
        ("<thi", "", [["content", "<thi", -1]]),
        ("\n</think>Yes.", "<think>", [["content", "Yes.", -1]]),
        ("Yes.", "<think>\n\n</think>\n\n", [["content", "Yes.", -1]]),
    ],
)
def test_reasoning(text, prompt_end, wanted):
    """The prompt may open the reasoning or close it; an answer may be all reasoning."""
    assert every_division(Parsers(None, "qwen3"), text, prompt_end=prompt_end) == wanted


def test_reasoning_of_deepseek_r1_needs_no_mark():
    """Its older templates open none, and some answers begin without one."""
    parsers = Parsers(None, "deepseek-r1")
    assert every_division(parsers, "hm</think>Yes.") == [["reasoning", "hm", -1], ["content", "Yes.", -1]]
    assert every_division(parsers, "Yes.", prompt_end="</think>") == [["content", "Yes.", -1]]


def test_reasoning_before_a_call():
    """What the model only thinks of calling is no call."""
    text = f"<think>{hermes('{}')}</think>\n{hermes(PARIS)}"
    found = every_division(Parsers("hermes", "qwen3"), text)
    assert found == [["reasoning", hermes("{}"), -1], *call("get_weather", PARIS, 0)]


def test_harmony_channels():
    """Analysis is reasoning, a preamble and the final channel are content; a header that is cut gives no text."""
    text = (
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|>"
        + f"<|start|>assistant{HARMONY.partition('<|start|>')[0]}<|start|>assistant<|channel|>final<|message|>Sunny."
    )
    found = every_division(Parsers("gpt-oss", "gpt-oss"), text)
    assert found == [
        ["reasoning", "Let me see.", -1],
        ["content", "I look.", -1],
        *call("get_weather", PARIS, 0),
        ["content", "Sunny.", -1],
    ]
    assert every_division(Parsers("gpt-oss", None), "Plain.") == [["content", "Plain.", -1]]
    unknown = "<|channel|>commentary to=browser.search<|message|>{}<|end|><|start|>assist"
    assert every_division(Parsers("gpt-oss", None), unknown) == [["reasoning", "{}", -1]]


@pytest.mark.parametrize("family", TOOL_CALL_PARSERS)
def test_broken_text_never_raises(family):
    """A model may write anything; the marks in every order and cut at every place."""
    parts = [
        "<tool_call>",
        '{"name": "add", ',
        "[TOOL_CALLS]",
        "add",
        "<|channel|>",
        "<|message|>",
        "<｜tool▁call▁begin｜>",
    ]
    for reasoning in (None, *REASONING_PARSERS):
        for at in range(len(parts)):
            text = "".join(parts[at:] + parts[:at]) * 2
            for cut in range(0, len(text), 7):
                every = read(Parsers(family, reasoning), [text[:cut]])
                assert read(Parsers(family, reasoning), list(text[:cut])) == every


TEMPLATES = {
    "{{ tools }}<tool_call></tool_call><think></think>": ("hermes", "qwen3"),
    "{{ tools }}<tool_call><function=f>": ("qwen3-coder", None),
    "{{ tools }}<tool_call><arg_key>": ("glm45", None),
    "{{ tools }}": (None, None),
    "{{ tools }}[TOOL_CALLS]": ("mistral", None),
    "{{ tools }}<｜tool▁calls▁begin｜></think>": ("deepseek", "qwen3"),
    "{{ tools }}<|python_tag|>": ("llama3-json", None),
    "{{ tools }}[func_name1(params_name1=params_value1]": ("pythonic", None),
    "{{ tools }}<|start|><|channel|>analysis": ("gpt-oss", "gpt-oss"),
    "{{ messages }}": ("hermes", None),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_recognised_by_the_template(template):
    """`auto` goes by the marks of the family; a template with an unknown form has none."""

    class Tokenizer:
        chat_template = template

        def get_chat_template(self, tools):
            return template

    found = Parsers.of(Tokenizer())
    assert (found.calls, found.reasoning) == TEMPLATES[template]
    assert Parsers.of(Tokenizer(), "none", "none") == Parsers(None, None)
    assert Parsers.of(Tokenizer(), "mistral", "deepseek-r1") == Parsers("mistral", "deepseek-r1")
