"""Reasoning that a model writes before its answer, between marks such as <think> and </think>."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.infer.server.answer_pieces import SteppedParser


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

    def closing(self, prompt: str) -> str:
        """What ends the reasoning that a prompt has opened, as Qwen's template writes it; "" if it has opened none."""
        return f"\n{self.closes}\n\n" if prompt.rstrip().endswith(self.opens) else ""


FORMATS = {
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
        return self._go(self._content)

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
        return self._go(self._content) if self._text else False

    def _content(self) -> bool:
        self._write("content", self._text)
        self._text = ""
        return False
