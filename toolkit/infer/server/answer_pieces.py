"""The pieces of an answer while it is written: reasoning, content and tool calls; and what all parsers share.

    text --> reasoning parser -- content --> stop strings --> tool-call parser --> pieces, with the calls numbered

A parser holds text that may be the beginning of a marker, and whitespace before one. So the joined pieces do not depend
on where the text was divided into tokens or accepted runs, and a streamed answer equals a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from toolkit.infer.request.detokenize import StopStrings, possible_beginning

Kind = Literal["reasoning", "content", "call", "arguments"]


@dataclass(frozen=True)
class Piece:
    """A part of an answer. "call": a call begins, `text` is the function's name; "arguments": JSON text of that call.

    index: number of the call among the answer's calls, -1 for text; id: the call's id.
    """

    kind: Kind
    text: str
    index: int = -1
    id: str = ""


class Parser(Protocol):
    """Reads a stream of text. markers: the special tokens whose text it has to see."""

    markers: tuple[str, ...]

    def push(self, text: str) -> list[Piece]:
        """Add text. Returns the pieces that are certain now."""

    def finish(self, cut: bool = False) -> list[Piece]:
        """Return the rest at the end of the answer. cut: the model would have gone on."""


class SteppedParser:
    """A parser made of steps. A step reads from the front of `_text`, writes pieces, and sets the next `_step`.

    A step returns False when it needs more text. `_ended`: no more text will come.
    `_cut`: nor had the model ended its answer.
    """

    markers: tuple[str, ...] = ()

    def __init__(self, first: Callable[[], bool]) -> None:
        self._step = first
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
        """Return the rest at the end of the answer."""
        self._ended, self._cut = True, cut
        return self.push("")

    def _write(self, kind: Kind, text: str) -> None:
        if text or kind == "call":
            self._pieces.append(Piece(kind, text))

    def _go(self, step: Callable[[], bool]) -> bool:
        self._step = step
        return True

    def _before(self, marks: Sequence[str]) -> tuple[str, str | None]:
        """Take the text up to the first mark, and the mark itself. Mark None: take what cannot belong to one.

        Whitespace before a mark, or before what may become one, is held; it is dropped when the mark comes.
        """
        found = [(at, -len(mark), mark) for mark in marks if (at := self._text.find(mark)) >= 0]
        if found:
            at, _, mark = min(found)
            text, self._text = self._text[:at], self._text[at + len(mark) :]
            return text.rstrip(), mark
        if self._ended:
            text, self._text = self._text, ""
            return text, None
        safe = len(self._text[: len(self._text) - possible_beginning(self._text, marks)].rstrip())
        text, self._text = self._text[:safe], self._text[safe:]
        return text, None

    def _content_before(self, marks: Sequence[str]) -> str | None:
        """Write the text up to the first mark as content. Return the mark with the blanks before it, or None
        without a mark."""
        full = self._text
        text, mark = self._before(marks)
        self._write("content", text)
        return None if mark is None else full[len(text) : full.index(mark) + len(mark)]

    def _may_begin(self, marks: Sequence[str]) -> bool:
        """Whether more text could make `_text` start with one of `marks`."""
        return not self._ended and any(mark.startswith(self._text) for mark in marks)


class PlainParser:
    """All text is content."""

    markers: tuple[str, ...] = ()

    def push(self, text: str) -> list[Piece]:
        """Add text. Returns it."""
        return [Piece("content", text)] if text else []

    def finish(self, cut: bool = False) -> list[Piece]:
        """Return the rest: nothing."""
        return []


class AnswerParser:
    """Parses one answer: its reasoning first, then the tool calls in what is left, which it numbers.

    new_id: makes a call's id. one_call: the answer ends with its first call (`done`). stops: strings that end the
    answer after its reasoning; for an answer without any the engine finds them.
    """

    def __init__(
        self,
        reasoning: Parser,
        calls: Parser,
        new_id: Callable[[], str],
        one_call: bool = False,
        stops: Sequence[str] = (),
    ) -> None:
        self._reasoning, self._calls = reasoning, calls
        self._new_id = new_id
        self._one_call = one_call
        self._stops = StopStrings(stops)
        self._id = ""
        self.n_calls = 0
        self.done = False
        self.markers = (*reasoning.markers, *calls.markers)

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return not self.reasons and isinstance(self._calls, PlainParser)

    @property
    def reasons(self) -> bool:
        """Whether the answer may have reasoning, which stop strings do not end."""
        return not isinstance(self._reasoning, PlainParser)

    @property
    def thinking(self) -> bool:
        """Whether the text up to here ends within the reasoning."""
        return getattr(self._reasoning, "thinking", False)

    def push(self, text: str, searched: bool = True) -> list[Piece]:
        """Add text. Returns the pieces that are certain now. searched: for stop strings."""
        pieces = self._numbered(self._divide(self._reasoning.push(text), searched))
        if self._stops.hit is not None and not self.done:
            pieces += self._numbered(self._calls.finish())
            self.done = True
        return pieces

    def finish(self, cut: bool = False) -> list[Piece]:
        """Return the rest at the end of the answer."""
        pieces = self._divide(self._reasoning.finish(cut))
        pieces += self._calls.push(self._stops.finish())
        return self._numbered([*pieces, *self._calls.finish(cut)])

    def _divide(self, pieces: Sequence[Piece], searched: bool = True) -> list[Piece]:
        divided: list[Piece] = []
        for piece in pieces:
            if piece.kind == "content":
                divided += self._calls.push(self._stops.push(piece.text) if searched else piece.text)
            else:
                divided.append(piece)
        return divided

    def _numbered(self, pieces: Sequence[Piece]) -> list[Piece]:
        numbered = []
        for piece in pieces:
            after_call = self.n_calls > 0 and piece.kind != "arguments"
            self.done = self.done or (self._one_call and after_call)
            if self.done:
                break
            if piece.kind == "call":
                self.n_calls += 1
                self._id = self._new_id()
            is_call = piece.kind in ("call", "arguments")
            numbered.append(replace(piece, index=self.n_calls - 1, id=self._id) if is_call else piece)
        return numbered
