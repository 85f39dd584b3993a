"""Tool calls whose arguments stand between tags, one by one: Qwen3-Coder, Qwen3.5, GLM-4.5.

    <tool_call><function=f><parameter=city>\\nRome\\n</parameter></function></tool_call>             qwen3-coder
    <tool_call>f\\n<arg_key>city</arg_key>\\n<arg_value>Rome</arg_value>\\n</tool_call>              glm45

A value is text where the function's schema says so, or where it is no JSON; else it is the JSON that it reads as.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.infer.server.answer_pieces import SteppedParser
from toolkit.infer.server.tool_calls import MOST_HEAD_CHARACTERS

WORDS = {"True": True, "False": False, "None": None}  # Python's, which models write too


@dataclass(frozen=True)
class TagFormat:
    """opens: tags before a call; head: from there to the first argument; argument: from key_opens to value_closes;
    ends: tags after the arguments."""

    opens: tuple[str, ...]
    head: re.Pattern[str]
    key_opens: str
    value_closes: str
    argument: re.Pattern[str]
    ends: tuple[str, ...]


FORMATS = {
    "qwen3-coder": TagFormat(
        ("<tool_call>", "<function="),
        re.compile(r"(?:<tool_call>\s*)?<function=\s*(?P<name>[^>\s]+)\s*>"),
        "<parameter=",
        "</parameter>",
        re.compile(r"<parameter=\s*(?P<key>[^>]+?)\s*>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL),
        ("</function>", "</tool_call>"),
    ),
    "glm45": TagFormat(
        ("<tool_call>",),
        re.compile(r"<tool_call>\s*(?P<name>[\w.-]+)\s*(?=<arg_key>|</tool_call>)"),
        "<arg_key>",
        "</arg_value>",
        re.compile(r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL),
        ("</tool_call>",),
    ),
}


class TagCalls(SteppedParser):
    """Parses the calls of one format. schemas: the JSON schemas of the offered functions' arguments, by name.

    An argument is known when its closing tag has come, or when it is certain that none will come: the next call begins
    after a tag that ends this one, or the answer ends.
    """

    def __init__(self, family: str, schemas: Mapping[str, Any]) -> None:
        super().__init__(self._content)
        self._form = FORMATS[family]
        self._schemas = schemas
        self._opened = ""  # whitespace and tag that were taken as the beginning of a call
        self._name = ""
        self._separator = "{"  # what comes before the next argument
        self.markers = (*self._form.opens, *self._form.ends)

    def _content(self) -> bool:
        opened = self._content_before(self._form.opens)
        if opened is None:
            return False
        self._opened = opened
        return self._go(self._head)

    def _head(self) -> bool:
        mark = self._opened.lstrip()
        match = self._form.head.match(mark + self._text)
        if match is not None and match["name"] in self._schemas:
            self._name, self._separator = match["name"], "{"
            self._write("call", self._name)
            self._text = self._text[match.end() - len(mark) :]
            return self._go(self._arguments)
        hopeless = (
            self._ended or len(self._text) > MOST_HEAD_CHARACTERS or any(e in self._text for e in self._form.ends)
        )
        if match is None and not hopeless:
            return False
        self._write("content", self._opened)
        return self._go(self._content)

    def _arguments(self) -> bool:
        start = self._text.lstrip()
        if start.startswith(self._form.key_opens):
            start = self._with_closing_tag(start)
        closed = self._form.value_closes in start  # else a long value would be searched anew at every token
        if match := self._form.argument.match(start) if closed else None:
            key, value = json.dumps(match["key"]), json.dumps(self._value(match["key"], match["value"]))
            self._write("arguments", f"{self._separator}{key}: {value}")
            self._separator = ", "
            self._text = start[match.end() :]
            return True
        if not start.startswith(self._form.ends):
            expected = (self._form.key_opens, *self._form.ends)
            goes_on = start.startswith(self._form.key_opens) or any(mark.startswith(start) for mark in expected)
            if self._cut if self._ended else goes_on:
                return False
        self._write("arguments", "{}" if self._separator == "{" else "}")
        return self._go(self._gap)

    def _with_closing_tag(self, text: str) -> str:
        """The text of an argument, with the tag that the model forgot at the end of the value."""
        closes = text.find(self._form.value_closes)
        end = _first_of(self._form.ends, text)
        if end is not None and (closes < 0 or end < closes):  # else the usual case: no more to be searched
            next_call = _first_of(self._form.opens, text, end)
            if self._ended and closes < 0 or next_call is not None and (closes < 0 or next_call < closes):
                return text[:end] + self._form.value_closes + text[end:]
        return text + self._form.value_closes if self._ended and not self._cut and closes < 0 else text

    def _gap(self) -> bool:
        """After a call: the tags that end it."""
        self._text = self._text.lstrip()
        for mark in self._form.ends:
            if self._text.startswith(mark):
                self._text = self._text[len(mark) :]
                return True
        if not self._text or self._may_begin(self._form.ends):
            return False
        return self._go(self._content)

    def _value(self, key: str, text: str) -> Any:
        schema = self._schemas[self._name]
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        described = properties.get(key) if isinstance(properties, Mapping) else None
        if isinstance(described, Mapping) and described.get("type") == "string":
            return text
        try:
            value = WORDS[text] if text in WORDS else json.loads(text)
            json.dumps(value, allow_nan=False)
        except (ValueError, RecursionError):  # NaN and 1e999 are no JSON, though Python reads them
            return text
        return value


def _first_of(marks: Sequence[str], text: str, start: int = 0) -> int | None:
    """Where the first of the marks begins from `start` on; None without one."""
    return min((at for mark in marks if (at := text.find(mark, start)) >= 0), default=None)
