"""Which parsers read a target's answers: named by the operator, or recognised in its chat template."""

from __future__ import annotations

import random
import re
import string
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.infer.server.answer_pieces import AnswerParser, Parser, PlainParser
from toolkit.infer.server.harmony import ASSISTANT, FINAL, Harmony
from toolkit.infer.server.reasoning import FORMATS as REASONING_FORMATS
from toolkit.infer.server.reasoning import MarkedReasoning
from toolkit.infer.server.tool_calls import FORMATS as CALL_FORMATS
from toolkit.infer.server.tool_calls import JsonCalls
from toolkit.infer.server.tool_calls_pythonic import PythonicCalls
from toolkit.infer.server.tool_calls_tags import FORMATS as TAG_FORMATS
from toolkit.infer.server.tool_calls_tags import TagCalls
from toolkit.targets.chat_templates import has_chat_template

HARMONY = "gpt-oss"
PYTHONIC = "pythonic"
TOOL_CALL_PARSERS = (*(name for name in CALL_FORMATS if name != "forced"), *TAG_FORMATS, PYTHONIC, HARMONY)
REASONING_PARSERS = (*REASONING_FORMATS, HARMONY)
# (parser, what its family's template contains); the first that is found.
TOOL_SIGNS = (
    (HARMONY, r"<\|channel\|>"),
    ("glm45", r"<arg_key>"),
    ("qwen3-coder", r"<function="),
    ("hermes", r"<tool_call>"),
    ("mistral", r"\[TOOL_CALLS\]"),
    ("deepseek", r"<｜tool▁call"),
    (PYTHONIC, r"\[func_name1\("),
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

        A template without tools gets them as text in the form of `hermes` (`tool_prompt`)."""
        template = template_text(tokenizer)
        if calls == "auto":
            found = next((name for name, sign in TOOL_SIGNS if re.search(sign, template)), None)
            calls = found or "none" if reads(template, "tools") else "hermes"
        if reasoning == "auto":
            reasoning = next((name for name, sign in REASONING_SIGNS if re.search(sign, template)), "none")
        return cls(*(None if name == "none" else name for name in (calls, reasoning)))

    def start(
        self, schemas: Mapping[str, Any], prompt_end: str, *, forced: bool, one_call: bool, stops: Sequence[str] = ()
    ) -> AnswerParser:
        """A parser for one answer. schemas: of the arguments of the offered functions, by name.

        forced: a grammar makes the answer a JSON list of calls. stops: strings that end the answer, if it may have
        reasoning."""
        calls: Parser = PlainParser()
        if schemas and forced:
            return AnswerParser(PlainParser(), JsonCalls("forced", schemas), self.new_id, one_call)
        if HARMONY in (self.reasoning, self.calls):
            return AnswerParser(Harmony(schemas), PlainParser(), self.new_id, one_call, stops)
        if self.calls is not None and schemas:
            calls = _call_parser(self.calls, schemas)
        reasoning: Parser = PlainParser()
        if self.reasoning is not None:
            reasoning = MarkedReasoning(REASONING_FORMATS[self.reasoning], prompt_end)
        return AnswerParser(reasoning, calls, self.new_id, one_call, () if self.reasoning is None else stops)

    def before_content(self, prompt: str) -> str:
        """What has to follow a prompt so that the answer is content from its first token."""
        if HARMONY in (self.reasoning, self.calls):
            return FINAL if prompt.endswith(ASSISTANT) else ""
        return "" if self.reasoning is None else REASONING_FORMATS[self.reasoning].closing(prompt)

    def new_id(self) -> str:
        """An id for a call. Mistral's templates take only ids of nine letters and digits."""
        if self.calls == "mistral":
            return "".join(random.choices(string.ascii_letters + string.digits, k=9))
        return f"call_{uuid.uuid4().hex}"


def _call_parser(family: str, schemas: Mapping[str, Any]) -> Parser:
    if family == PYTHONIC:
        return PythonicCalls(schemas)
    return TagCalls(family, schemas) if family in TAG_FORMATS else JsonCalls(family, schemas)


def template_text(tokenizer: Any, tools: bool = True) -> str:
    """The chat template for requests with tools; "" if there is none."""
    if not has_chat_template(tokenizer):
        return ""
    return str(tokenizer.get_chat_template(tools=[{}] if tools else None))


def reads(template: str, name: str) -> bool:
    """Whether a chat template reads the variable `name`."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def prompt_end(tokenizer: Any, ids: Sequence[int]) -> str:
    """The last words of a prompt, with its special tokens."""
    return str(tokenizer.decode(list(ids[-PROMPT_END_TOKENS:]), skip_special_tokens=False))
