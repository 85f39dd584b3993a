"""The parts of an answer while it is written: reasoning, content and tool calls; and which parsers read them.

    text --> reasoning parser -- content --> stop strings --> call parser --> pieces, with the calls numbered

A parser holds text that may be the beginning of a marker, and whitespace before one. So the joined pieces do not depend
on where the text was divided into tokens or accepted runs, and a streamed answer equals a whole one.
"""

from __future__ import annotations

import random
import re
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.infer.request.detokenize import StopStrings
from toolkit.infer.server.tool_calls import (
    ASSISTANT,
    FINAL,
    FORMATS,
    HARMONY,
    CallParser,
    HarmonyParser,
    Piece,
    SteppedParser,
)
from toolkit.targets.chat_templates import has_chat_template


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks of a family. always: an answer begins with reasoning, also where neither prompt nor answer opens it."""

    opens: str
    closes: str
    always: bool = False

    def starts_open(self, prompt_end: str) -> bool:
        """Whether the answer continues reasoning, by the end of the prompt's text (special tokens included)."""
        end = prompt_end.rstrip()
        return end.endswith(self.opens) or (self.always and not end.endswith(self.closes))


REASONING_FORMATS = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek-r1": ReasoningFormat("<think>", "</think>", always=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


class MarkedReasoning(SteppedParser):
    """Reasoning between marks at the beginning of an answer. Whitespace around the marks is dropped."""

    def __init__(self, form: ReasoningFormat, prompt_end: str = "") -> None:
        self.thinking = form.starts_open(prompt_end)
        super().__init__(self._open if self.thinking else self._first)
        self.markers = (form.opens, form.closes)
        self._form = form

    def _first(self) -> bool:
        """The answer's beginning: only here a mark opens reasoning."""
        start = self._text.lstrip()
        if start.startswith(self._form.opens):
            self.thinking = True
            return self._go(self._open)
        if not self._ended and self._form.opens.startswith(start):
            return False
        return self._go(self._plain)

    def _open(self) -> bool:
        """Reasoning has begun; the model may write the mark again that the prompt has."""
        start = self._text.lstrip()
        if not self._ended and self._form.opens.startswith(start):
            return False
        self._text = start.removeprefix(self._form.opens).lstrip()
        return self._go(self._reasoning) if self._text or self._ended else False

    def _reasoning(self) -> bool:
        text, mark = self._before((self._form.closes,))
        self._write("reasoning", text)
        if mark is None:
            return False
        self.thinking = False
        return self._go(self._closed)

    def _closed(self) -> bool:
        self._text = self._text.lstrip()
        return self._go(self._plain) if self._text else False


class AnswerParser:
    """Parses one answer: its reasoning first, then the calls in what is left, which it numbers.

    reasoning, calls: None: it has none. new_id: makes a call's id. one_call: the answer ends with its first call
    (`done`). stops: strings that end the answer after its reasoning; for an answer without any the engine finds them.
    """

    def __init__(
        self,
        reasoning: SteppedParser | None = None,
        calls: SteppedParser | None = None,
        new_id: Callable[[], str] = str,
        one_call: bool = False,
        stops: Sequence[str] = (),
    ) -> None:
        self.reasons = reasoning is not None
        self.is_plain = reasoning is None and calls is None
        self._reasoning, self._calls = reasoning or SteppedParser(), calls or SteppedParser()
        self._new_id, self._one_call = new_id, one_call
        self._stops = StopStrings(stops)
        self.n_calls = 0
        self.done = False
        self.markers = (*self._reasoning.markers, *self._calls.markers)

    @property
    def thinking(self) -> bool:
        """Whether the text up to here ends within the reasoning."""
        return self._reasoning.thinking

    def push(self, text: str, searched: bool = True) -> list[Piece]:
        """Add text. Returns the pieces that are certain now. searched: for stop strings."""
        pieces: list[Piece] = []
        for piece in self._reasoning.push(text):
            pieces += [piece] if piece.kind != "content" else self._called(piece.text, searched)
        stopped = self._stops.hit is not None
        pieces = self._numbered(pieces + self._calls.finish() if stopped else pieces)
        self.done = self.done or stopped
        return pieces

    def finish(self, cut: bool = False) -> list[Piece]:
        """Return the rest at the end of the answer."""
        pieces: list[Piece] = []
        for piece in self._reasoning.finish(cut):
            pieces += [piece] if piece.kind != "content" else self._called(piece.text)
        return self._numbered([*pieces, *self._calls.push(self._stops.finish()), *self._calls.finish(cut)])

    def _called(self, text: str, searched: bool = True) -> list[Piece]:
        return self._calls.push(self._stops.push(text) if searched else text)

    def _numbered(self, pieces: Sequence[Piece]) -> list[Piece]:
        numbered: list[Piece] = []
        for piece in pieces:
            if self.done:
                break
            if piece.kind == "call":
                piece = replace(piece, index=self.n_calls, id=self._new_id())
                self.n_calls += 1
                self.done = self._one_call
            numbered.append(piece)
        return numbered


TOOL_CALL_PARSERS = (*(name for name in FORMATS if name != "forced"), HARMONY)
REASONING_PARSERS = (*REASONING_FORMATS, HARMONY)
# (parser, what its family's template contains); the first that is found.
TOOL_SIGNS = (
    (HARMONY, r"<\|channel\|>"),
    ("glm45", r"<arg_key>"),
    ("qwen3-coder", r"<function="),
    ("hermes", r"<tool_call>"),
    ("mistral", r"\[TOOL_CALLS\]"),
    ("deepseek", r"<｜tool▁call"),
    ("llama3-json", r"<\|python_tag\|>|\"parameters\": dictionary"),
)
REASONING_SIGNS = ((HARMONY, r"<\|channel\|>"), ("qwen3", r"</think>"), ("mistral", r"\[/THINK\]"))
PROMPT_END_TOKENS = 16  # decoded to see whether the prompt has opened the reasoning


@dataclass(frozen=True)
class Parsers:
    """The parsers of one server; None: that part of an answer is not parsed."""

    calls: str | None = None
    reasoning: str | None = None

    @classmethod
    def of(cls, tokenizer: Any, calls: str = "auto", reasoning: str = "auto") -> Parsers:
        """The parsers by name ("auto": by the chat template, "none": no parser).

        A template without tools gets them as text in the form of `hermes`."""
        template = template_text(tokenizer)
        if calls == "auto":
            recognised = next((name for name, sign in TOOL_SIGNS if re.search(sign, template)), "none")
            calls = recognised if reads(template, "tools") else "hermes"
        if reasoning == "auto":
            reasoning = next((name for name, sign in REASONING_SIGNS if re.search(sign, template)), "none")
        return cls(*(None if name == "none" else name for name in (calls, reasoning)))

    def start(
        self, schemas: Mapping[str, Any], prompt_end: str, *, forced: bool, one_call: bool, stops: Sequence[str] = ()
    ) -> AnswerParser:
        """A parser for one answer. schemas: of the arguments of the offered functions, by name.

        forced: a grammar makes the answer a JSON list of calls. stops: strings that end the answer, if it may have
        reasoning."""
        if schemas and forced:
            return AnswerParser(None, CallParser("forced", schemas), self.new_id, one_call)
        if HARMONY in (self.reasoning, self.calls):
            return AnswerParser(HarmonyParser(schemas), None, self.new_id, one_call, stops)
        calls = CallParser(self.calls, schemas) if self.calls is not None and schemas else None
        if self.reasoning is None:
            return AnswerParser(None, calls, self.new_id, one_call)
        reasoning = MarkedReasoning(REASONING_FORMATS[self.reasoning], prompt_end)
        return AnswerParser(reasoning, calls, self.new_id, one_call, stops)

    def before_content(self, prompt: str) -> str:
        """What has to follow a prompt so that the answer is content from its first token."""
        if HARMONY in (self.reasoning, self.calls):
            return FINAL if prompt.endswith(ASSISTANT) else ""
        form = None if self.reasoning is None else REASONING_FORMATS[self.reasoning]
        is_open = form is not None and prompt.rstrip().endswith(form.opens)
        return f"\n{form.closes}\n\n" if form is not None and is_open else ""  # as Qwen's template writes it

    def new_id(self) -> str:
        """An id for a call. Mistral's templates take only ids of nine letters and digits."""
        if self.calls == "mistral":
            return "".join(random.choices(string.ascii_letters + string.digits, k=9))
        return f"call_{uuid.uuid4().hex}"


def template_text(tokenizer: Any) -> str:
    """The chat template for requests with tools; "" if there is none."""
    if not has_chat_template(tokenizer):
        return ""
    return str(tokenizer.get_chat_template(tools=[{}]))


def reads(template: str, name: str) -> bool:
    """Whether a chat template reads the variable `name`."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def prompt_end(tokenizer: Any, ids: Sequence[int]) -> str:
    """The last words of a prompt, with its special tokens."""
    return str(tokenizer.decode(list(ids[-PROMPT_END_TOKENS:]), skip_special_tokens=False))
