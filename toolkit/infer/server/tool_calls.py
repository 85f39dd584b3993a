"""Tool calls in the text of an answer, in the written forms of the families.

    <tool_call>\\n{"name": "f", "arguments": {"a": 1}}\\n</tool_call>      hermes: Hermes, Qwen 2.5, Qwen 3
    {"name": "f", "parameters": {"a": 1}}; {..}                          llama3-json: after <|python_tag|> or bare
    [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, ..]               mistral
    [TOOL_CALLS]f[ARGS]{"a": 1}                                          mistral, since tokenizer v11
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json\\n{"a": 1}\\n```..  deepseek: V3, R1
    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>           deepseek: V3.1
    <tool_call><function=f><parameter=a>\\n1\\n</parameter></function>..   qwen3-coder
    <tool_call>f\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>..       glm45
    <|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>      gpt-oss, which marks reasoning and content too
    head ------------------------------------^ arguments    ^ gap

A call is one piece, which comes when the call is complete. JSON arguments are passed on as they are written. What does
not become a call of an offered function is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.infer.request.detokenize import possible_beginning

Kind = Literal["reasoning", "content", "call"]


@dataclass(frozen=True)
class Piece:
    """A part of an answer: text, or a whole call, whose `text` is its arguments (JSON) and `name` its function.

    index: number of the call among the answer's calls, -1 for text; id: the call's id.
    """

    kind: Kind
    text: str
    name: str = ""
    index: int = -1
    id: str = ""


class SteppedParser:
    """A parser made of steps. A step reads from the front of `_text`, writes pieces, and sets the next `_step`.

    A step returns False when it needs more text. `_ended`: no more text will come. `_cut`: nor had the model ended its
    answer. markers: the special tokens whose text the parser has to see. thinking: the text ends within reasoning.
    Without a first step all text is content.
    """

    markers: tuple[str, ...] = ()
    thinking = False

    def __init__(self, first: Callable[[], bool] | None = None) -> None:
        self._step = first or self._plain
        self._text = ""
        self._ended = self._cut = False
        self._pieces: list[Piece] = []

    def push(self, text: str) -> list[Piece]:
        """Add text. Returns the pieces that are certain now."""
        self._text += text
        self._pieces = []
        while self._step():
            pass
        return self._pieces

    def finish(self, cut: bool = False) -> list[Piece]:
        """Return the rest at the end of the answer. cut: the model would have gone on."""
        self._ended, self._cut = True, cut
        return self.push("")

    def _plain(self) -> bool:
        self._write("content", self._text)
        self._text = ""
        return False

    def _write(self, kind: Kind, text: str, name: str = "") -> None:
        if text or kind == "call":
            self._pieces.append(Piece(kind, text, name))

    def _go(self, step: Callable[[], bool]) -> bool:
        self._step = step
        return True

    def _before(self, marks: Sequence[str]) -> tuple[str, str | None]:
        """Take the text up to the first mark, and the mark itself. Mark None: take what cannot belong to one.

        Whitespace before a mark, or before what may become one, is held; it is dropped when the mark comes.
        """
        places = [(at, -len(mark), mark) for mark in marks if (at := self._text.find(mark)) >= 0]
        if places:
            at, _, mark = min(places)
            text, self._text = self._text[:at], self._text[at + len(mark) :]
            return text.rstrip(), mark
        if self._ended:
            text, self._text = self._text, ""
            return text, None
        safe = len(self._text[: len(self._text) - possible_beginning(self._text, marks)].rstrip())
        text, self._text = self._text[:safe], self._text[safe:]
        return text, None

    def _may_begin(self, marks: Sequence[str]) -> bool:
        """Whether more text could make `_text` start with one of `marks`."""
        return not self._ended and any(mark.startswith(self._text) for mark in marks)


LONGEST_HEAD = 1000  # characters; a longer beginning is no call
LONGEST_MARK = 12  # characters of the end of a call between tags: "</tool_call>"
WHITESPACE = " \t\r\n"
NAME = r"(?P<name>[\w.-]{1,64})"
OBJECT_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(frozen=True)
class CallFormat:
    """How a family writes calls.

    opens: marks before calls; ends: marks after them; inner: further special tokens. bare: characters that begin calls
    at the answer's beginning without a mark. head: what stands between mark and arguments where a call is no object of
    its own. gap: characters between calls, besides whitespace. listed: an object after a gap is another call.
    argument: an argument between tags; the tag that closes it may be missing.
    """

    opens: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    bare: str = ""
    head: re.Pattern[str] | None = None
    gap: str = ""
    listed: bool = False
    argument: re.Pattern[str] | None = None


FORMATS = {
    "hermes": CallFormat(("<tool_call>",), ("</tool_call>",), gap="}"),
    "llama3-json": CallFormat(("<|python_tag|>",), bare="{", gap="};,", listed=True),
    "mistral": CallFormat(
        ("[TOOL_CALLS]",),
        inner=("[ARGS]", "[CALL_ID]"),
        head=re.compile(NAME + r"(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)"),
        gap="},]",
        listed=True,
    ),
    "deepseek": CallFormat(
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        inner=("<｜tool▁sep｜>",),
        head=re.compile(rf"(?:function<｜tool▁sep｜>)?\s*{NAME}\s*(?:```json|<｜tool▁sep｜>)?\s*(?=\{{)"),
        gap="`",
    ),
    "qwen3-coder": CallFormat(
        ("<tool_call>", "<function="),
        ("</function>", "</tool_call>"),
        head=re.compile(r"\s*(?P<name>[^>\s]+)\s*>"),
        argument=re.compile(
            r"<parameter=\s*(?P<key>[^>]+?)\s*>\n?(?P<value>.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL
        ),
    ),
    "glm45": CallFormat(
        ("<tool_call>",),
        ("</tool_call>",),
        head=re.compile(rf"\s*{NAME}\s*(?=<arg_key>|</tool_call>)"),
        argument=re.compile(
            r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)(?:</arg_value>|(?=<arg_key>)|\Z)",
            re.DOTALL,
        ),
    ),
    # The answer of a request whose tool_choice asks for a call: a grammar makes it a list of calls.
    "forced": CallFormat(bare="[{", gap="},]", listed=True),
}
PYTHON_WORDS = {"True": True, "False": False, "None": None}  # models write them too


class JsonEnd:
    """Finds the end of one bracketed value that comes in parts. `done`: it has ended, or is no such value."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.done = False

    def read(self, text: str) -> int:
        """Number of characters of `text` that belong to the value."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "]}":
                self._depth -= 1
                if self._depth == 0:
                    self.done = True
                    return at + 1
            elif character == "<":  # the mark after a call whose brackets are not closed
                self.done = True
                return at
        return len(text)


class CallParser(SteppedParser):
    """Parses the calls of one format. schemas: JSON schemas of the offered functions' arguments, by name."""

    def __init__(self, family: str, schemas: Mapping[str, Any]) -> None:
        super().__init__(self._first)
        self._form = FORMATS[family]
        self._schemas = schemas
        self.markers = (*self._form.opens, *self._form.ends, *self._form.inner)
        self._opened = ""  # what was taken as the beginning of a call; content if it is none
        self._name = ""  # where it stands before the arguments
        self._value, self._scanned = JsonEnd(), 0

    def _first(self) -> bool:
        """The answer's beginning, where calls of some families need no mark."""
        start = self._text.lstrip()
        if not start and not self._ended:
            return False
        return self._to_head("") if start[:1] in tuple(self._form.bare) else self._go(self._content)

    def _content(self) -> bool:
        full = self._text
        text, mark = self._before(self._form.opens)
        self._write("content", text)
        return False if mark is None else self._to_head(full[len(text) : full.index(mark) + len(mark)])

    def _to_head(self, opened: str) -> bool:
        self._opened, self._name = opened, ""
        self._value, self._scanned = JsonEnd(), 0
        return self._go(self._head)

    def _head(self) -> bool:
        """Between the mark and the arguments, or the object that is a whole call."""
        form = self._form
        start = self._text.lstrip(WHITESPACE + ("[" if form.listed else ""))
        mark = next((mark for mark in form.opens if start.startswith(mark)), None)
        if mark is not None:
            self._open(start[len(mark) :])
            return True
        if not self._ended and any(mark.startswith(start) for mark in form.opens):
            return False
        if start.startswith("{") and form.argument is None:
            self._open(start)
            return self._go(self._json)
        if match := form.head.match(start) if form.head is not None else None:
            self._name = match["name"]
            if self._name not in self._schemas:
                return self._refuse()
            self._open(start[match.end() :])
            return self._go(self._json if form.argument is None else self._tags)
        hopeless = self._ended or len(start) > LONGEST_HEAD or any(mark in start for mark in form.ends)
        return self._refuse() if hopeless or (start and form.head is None) else False

    def _open(self, rest: str) -> None:
        self._opened, self._text = self._opened + self._text[: len(self._text) - len(rest)], rest

    def _refuse(self) -> bool:
        """No call after all: what was taken is content, and the rest is searched for calls as before."""
        self._write("content", self._opened)
        return self._go(self._content)

    def _json(self) -> bool:
        """A JSON object: the arguments, or the whole call."""
        self._scanned += self._value.read(self._text[self._scanned :])
        if not self._value.done and not self._ended:
            return False
        written = self._text[: self._scanned]
        name, arguments = (self._name, written) if self._name else call_of(written)
        return self._call(name, arguments, self._scanned) if name in self._schemas else self._refuse()

    def _tags(self) -> bool:
        """Arguments between tags, up to the end of the call."""
        form, searched = self._form, max(0, self._scanned - LONGEST_MARK)
        assert form.argument is not None
        end = min((at for mark in form.ends if (at := self._text.find(mark, searched)) >= 0), default=None)
        if end is None and not self._ended:
            self._scanned = len(self._text)
            return False
        found = form.argument.finditer(self._text[:end])
        arguments = json.dumps({one["key"]: self._typed(one["key"], one["value"]) for one in found})
        if end is None and self._cut:
            arguments = arguments[:-1]  # it must not look complete
        return self._call(self._name, arguments, len(self._text) if end is None else end)

    def _typed(self, key: str, text: str) -> Any:
        """A value between tags: text where the schema says so or where it is no JSON, else what it reads as."""
        schema = self._schemas[self._name]
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        described = properties.get(key) if isinstance(properties, Mapping) else None
        if isinstance(described, Mapping) and described.get("type") == "string":
            return text
        try:
            value = PYTHON_WORDS[text] if text in PYTHON_WORDS else json.loads(text)
            json.dumps(value, allow_nan=False)
        except (ValueError, RecursionError):  # NaN and 1e999 are no JSON, though Python reads them
            return text
        return value

    def _call(self, name: str, arguments: str, end: int) -> bool:
        """A call that takes the text up to `end`."""
        self._write("call", arguments, name)
        self._text = self._text[end:]
        return self._go(self._gap)

    def _gap(self) -> bool:
        """After a call: its end, another call, or content."""
        self._text = self._text.lstrip(WHITESPACE + self._form.gap)
        for mark in self._form.ends:
            if self._text.startswith(mark):
                self._text = self._text[len(mark) :]
                return True
        if not self._text or self._may_begin(self._form.ends):
            return False
        return self._to_head("") if self._form.listed and self._text[0] == "{" else self._go(self._content)


def call_of(written: str) -> tuple[str, str]:
    """(name, arguments as JSON text) of a call written as one JSON object; ("", "") if it is no call.

    In the usual order of keys the arguments are passed on as they are written, also if they are no valid JSON."""
    if match := OBJECT_HEAD.match(written):
        rest = written[match.end() :]
        return match["name"], rest[: JsonEnd().read(rest)]
    try:
        call: Any = json.loads(written, strict=False)
    except (ValueError, RecursionError):
        return "", ""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return "", ""
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        return call["name"], arguments.encode("utf-8", "replace").decode()
    return call["name"], json.dumps({} if arguments is None else arguments)


HARMONY = "gpt-oss"
BODY, START, CHANNEL = "<|message|>", "<|start|>", "<|channel|>"
ASSISTANT, FINAL = f"{START}assistant", f"{CHANNEL}final{BODY}"  # the end of a prompt; a header of content
HEADERS = (START, CHANNEL, "to=")  # the prompt ends in a header's first words: an answer may go on with the recipient
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", START, CHANNEL)


class HarmonyParser(SteppedParser):
    """GPT-OSS: messages on channels, each with a header; reasoning, content and calls. names: the offered functions.

    A preamble (commentary without a recipient) is content; a message to another recipient is reasoning.
    """

    markers = (BODY, "<|constrain|>", *MESSAGE_ENDS)

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._kind: Kind = "content"
        self._name, self._arguments = "", ""
        super().__init__(self._between)

    def _between(self) -> bool:
        """The beginning of a message. Text without a header is content."""
        start = self._text.lstrip()
        if start.startswith(HEADERS):
            return self._go(self._in_header)
        if not start or (not self._ended and any(mark.startswith(start) for mark in HEADERS)):
            return False
        self._kind = "content"
        return self._go(self._body)

    def _in_header(self) -> bool:
        header, mark, body = self._text.partition(BODY)
        if not mark:
            return False  # an answer that ends here has no further message
        self._text = body
        recipient = re.search(r"to=([\w.-]+)", header)
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        self._name, self._arguments = recipient[1].removeprefix("functions.") if recipient else "", ""
        thinks = recipient is not None or (channel is not None and channel[1] == "analysis")
        self._kind = "call" if self._name in self._names else "reasoning" if thinks else "content"
        self.thinking = self._kind == "reasoning"
        return self._go(self._body)

    def _body(self) -> bool:
        text, mark = self._before(MESSAGE_ENDS)
        if self._kind != "call":
            self._write(self._kind, text)
        else:
            self._arguments += text
            if mark is not None or self._ended:
                self._write("call", self._arguments, self._name)
                self._kind = "content"
        if mark is None:
            return False
        self.thinking = False
        if mark in (START, CHANNEL):
            self._text = mark + self._text
        return self._go(self._between)
