"""Tool calls in the text of an answer: calls whose arguments are a JSON object, in the written forms of the families.

    <tool_call>\\n{"name": "f", "arguments": {"a": 1}}\\n</tool_call>      hermes: Hermes, Qwen 2.5, Qwen 3
    {"name": "f", "parameters": {"a": 1}}; {..}                          llama3-json: after <|python_tag|> or bare
    [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, ..]               mistral
    [TOOL_CALLS]f[ARGS]{"a": 1}                                          mistral, since tokenizer v11
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json\\n{"a": 1}\\n```..  deepseek: V3, R1
    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>           deepseek: V3.1
    head ------------------------------------^ arguments    ^ gap

The arguments are passed on as they are written. What does not become a call of an offered function is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from toolkit.infer.server.answer_pieces import SteppedParser

MOST_HEAD_CHARACTERS = 1000  # a longer beginning is no call
WHITESPACE = " \t\r\n"
OBJECT_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
# An object with such a first key is no call.
OTHER_KEY = re.compile(r'\{\s*(?:"(?!(?:name|arguments|parameters|type|id)")[^"]*"|[^"\s])')


@dataclass(frozen=True)
class CallFormat:
    """How a family writes calls.

    opens: marks before calls; ends: marks after them. bare: characters that begin calls at the answer's beginning
    without a mark. head: what stands between mark and arguments where a call is no object of its own. gap: characters
    between calls, besides whitespace. listed: an object after a gap is another call.
    """

    opens: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare: str = ""
    head: re.Pattern[str] | None = None
    gap: str = "}"
    listed: bool = False


NAME = r"(?P<name>[\w.-]{1,64})"
FORMATS = {
    "hermes": CallFormat(("<tool_call>",), ("</tool_call>",)),
    "llama3-json": CallFormat(("<|python_tag|>",), bare="{", gap="};,", listed=True),
    "mistral": CallFormat(
        ("[TOOL_CALLS]",),
        head=re.compile(NAME + r"(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)"),
        gap="},]",
        listed=True,
    ),
    "deepseek": CallFormat(
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        head=re.compile(rf"(?:function<｜tool▁sep｜>)?\s*{NAME}\s*(?:```json|<｜tool▁sep｜>)?\s*(?=\{{)"),
        gap="`",
    ),
    # The answer of a request whose tool_choice asks for a call: a grammar makes it a list of calls.
    "forced": CallFormat(bare="[{", gap="},]", listed=True),
}
EXTRA_MARKERS = {"mistral": ("[ARGS]", "[CALL_ID]"), "deepseek": ("<｜tool▁sep｜>",)}


class JsonEnd:
    """Finds the end of one bracketed value that comes in parts. `done`: it has ended, or is no such value."""

    def __init__(self, quotes: str = '"') -> None:
        self._quotes = quotes
        self._depth = 0
        self._quote = ""  # the quotation mark of the string that is open
        self._escaped = False
        self.done = False

    def read(self, text: str) -> int:
        """Number of characters of `text` that belong to the value."""
        for at, character in enumerate(text):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in self._quotes:
                self._quote = character
            elif character in "{[(":
                self._depth += 1
            elif character in ")]}":
                self._depth -= 1
                if self._depth == 0:
                    self.done = True
                    return at + 1
            elif character == "<":  # the mark after a call whose brackets are not closed
                self.done = True
                return at
        return len(text)


class JsonCalls(SteppedParser):
    """Parses the calls of one format. names: the offered functions."""

    def __init__(self, family: str, names: Collection[str]) -> None:
        super().__init__(self._first)
        self._form = FORMATS[family]
        self._names = names
        self.markers = (*self._form.opens, *self._form.ends, *EXTRA_MARKERS.get(family, ()))
        self._opened = ""
        self._value, self._scanned = JsonEnd(), 0

    def _first(self) -> bool:
        """The answer's beginning, where calls of some families need no mark."""
        start = self._text.lstrip()
        if not start and not self._ended:
            return False
        return self._to_head("") if start[:1] in tuple(self._form.bare) else self._go(self._content)

    def _content(self) -> bool:
        opened = self._content_before(self._form.opens)
        return False if opened is None else self._to_head(opened)

    def _head(self) -> bool:
        """Between the mark and the arguments."""
        start = self._text.lstrip(WHITESPACE + ("[" if self._form.listed else ""))
        mark = next((mark for mark in self._form.opens if start.startswith(mark)), None)
        if mark is not None:
            taken = len(self._text) - len(start) + len(mark)
            self._opened, self._text = self._opened + self._text[:taken], self._text[taken:]
            return True
        if not self._ended and any(mark.startswith(start) for mark in self._form.opens):
            return False
        is_object = start.startswith("{")
        head = OBJECT_HEAD if is_object else self._form.head
        if match := head.match(start) if head is not None else None:
            return self._begin(match, start)
        if is_object:
            return self._other_object(start)
        hopeless = self._ended or len(start) > MOST_HEAD_CHARACTERS or any(mark in start for mark in self._form.ends)
        return self._refuse() if hopeless or (start and head is None) else False

    def _begin(self, match: re.Match[str], start: str) -> bool:
        name = unquoted(match["name"])
        if name not in self._names:
            return self._refuse()
        self._write("call", name)
        self._text, self._opened, self._value = start[match.end() :], "", JsonEnd()
        return self._go(self._arguments)

    def _other_object(self, start: str) -> bool:
        """An object whose keys are in another order, or whose arguments are no object: read when it is whole."""
        if OTHER_KEY.match(start):
            return self._refuse()
        self._scanned += self._value.read(start[self._scanned :])
        if not self._value.done:
            return self._refuse() if self._ended else False
        call = call_of(start[: self._scanned])
        if call is None or call[0] not in self._names:
            return self._refuse()
        self._write("call", call[0])
        self._write("arguments", call[1])
        self._text, self._opened = start[self._scanned :], ""
        return self._go(self._gap)

    def _to_head(self, opened: str) -> bool:
        """Expect a call. opened: what was taken as its beginning; content if it is none."""
        self._opened, self._value, self._scanned = opened, JsonEnd(), 0
        return self._go(self._head)

    def _refuse(self) -> bool:
        """No call after all: what was taken is content, and the rest is searched for calls as before."""
        self._write("content", self._opened)
        self._opened = ""
        return self._go(self._content)

    def _arguments(self) -> bool:
        length = self._value.read(self._text)
        self._write("arguments", self._text[:length])
        self._text = self._text[length:]
        return self._go(self._gap) if self._value.done else False

    def _gap(self) -> bool:
        """After a call: its end, another call, or content."""
        self._text = self._text.lstrip(WHITESPACE + self._form.gap)
        if not self._text:
            return False
        for mark in self._form.ends:
            if self._text.startswith(mark):
                self._text = self._text[len(mark) :]
                return True
        if self._may_begin(self._form.ends):
            return False
        return self._to_head("") if self._form.listed and self._text[0] == "{" else self._go(self._content)


def unquoted(name: str) -> str:
    """A name without its JSON quotation marks, if it has any; "" if it is not valid."""
    try:
        return str(json.loads(name, strict=False)) if name.startswith('"') else name
    except ValueError:
        return ""


def call_of(written: str) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a call written as one JSON object; None if it is no call."""
    try:
        call: Any = json.loads(written, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        return call["name"], arguments.encode("utf-8", "replace").decode()
    return call["name"], json.dumps({} if arguments is None else arguments)
