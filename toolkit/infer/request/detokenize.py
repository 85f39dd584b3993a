"""Incremental detokenization: whole characters only, exact stop strings; emitted text never changes.

The text of a token depends on its neighbours for two reasons. A byte-level token may hold half of a UTF-8
character. A SentencePiece decoder drops the space before the first word of its input. So a token is decoded
in a small window together with the tokens of the previous piece, and the new piece is the difference:

    ids      ... a b | c d            | = end of the emitted text
    window       a b   c d            decode(a b c d) minus decode(a b) is the new piece
    piece              ^^^            held while it ends in U+FFFD: the character is incomplete

The prompt may end inside a character, which the answer then completes: the character belongs to the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from os.path import commonprefix
from typing import Any

REPLACEMENT = "\ufffd"  # decoders write it for bytes that do not form a character (yet)
CONTEXT_TOKENS = 6  # prompt tokens decoded before a raw completion; they decide whether it starts with a space


def possible_beginning(text: str, marks: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of one of `marks`."""
    longest = min(len(text), max((len(mark) for mark in marks), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


class StopStrings:
    """Cuts a stream of text before the stop string that is complete first.

    The rule works on characters, so the cut does not depend on the split into tokens or accepted runs. Text that
    may be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Return the held text and `text` up to the part that must be held; set `hit` if a stop string is complete."""
        if self.hit is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.hit = min(found)
            self._held = ""
            return text[:start]
        keep = possible_beginning(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the held text after the sequence ended without a complete stop string."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """The text of one sequence: push token ids, get the text that is safe to emit.

    Special tokens give no text, except those of `shown` (id -> text). unsearched: number of first tokens whose text is
    emitted without a search; a stop string can begin only after it.
    """

    def __init__(
        self,
        tokenizer: Any,
        special_ids: frozenset[int],
        context_ids: Sequence[int],
        stops: Sequence[str],
        unsearched: int,
        shown: Mapping[int, str],
    ) -> None:
        self._tokenizer, self._special_ids, self._shown = tokenizer, special_ids, shown
        self._stops, self._unsearched = StopStrings(stops), unsearched
        self._ids = [i for i in context_ids if i not in special_ids]
        self._known = self._decode(self._ids)
        whole = range(len(self._ids), -1, -1)  # of the prompt's tokens, as many as end with a character
        self._handed_out = next(n for n in whole if not self._decode(self._ids[:n]).endswith(REPLACEMENT))
        self._completed = self._decode(self._ids[: self._handed_out])

    @property
    def hit(self) -> str | None:
        """The complete stop string, or None. Later tokens do not belong to the answer."""
        return self._stops.hit

    def push(self, token_id: int) -> str:
        """Return the text to emit after this token: whole characters, no part of a stop string."""
        text = self._piece(token_id)
        if self._unsearched > 0:
            self._unsearched -= 1
            return text
        return self._stops.push(text)

    def finish(self) -> str:
        """Return the held text, incomplete bytes as U+FFFD; call once, after the sequence has ended."""
        if self.hit is not None:
            return ""
        shown = self._stops.push(self._hand_out(self._decode(self._ids)))
        return shown + self._stops.finish()

    def _piece(self, token_id: int) -> str:
        """The text that this token completes; "" while a character lacks bytes."""
        if token_id in self._special_ids:
            mark = self._shown.get(token_id)
            return "" if mark is None else self._hand_out(self._decode(self._ids)) + mark
        self._ids.append(token_id)
        text = self._decode(self._ids)
        return "" if text == self._known or text.endswith(REPLACEMENT) else self._hand_out(text)

    def _hand_out(self, text: str) -> str:
        if text.startswith(self._known):
            piece = text[len(self._known) :]
        elif self._known.endswith(REPLACEMENT):  # the prompt's last character is complete now
            piece = text[len(self._completed) :]
        else:  # SentencePiece decoders turn whole runs of bytes into U+FFFD where one character is incomplete
            piece = REPLACEMENT + text[len(commonprefix([self._known, text])) :].lstrip(REPLACEMENT)
        self._ids = self._ids[self._handed_out :]
        self._handed_out = len(self._ids)
        self._known = self._completed = self._decode(self._ids)
        return piece

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Detokenizer:
    """Makes text streams for one tokenizer; looks up its special tokens once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._special_ids |= frozenset(tokenizer.all_special_ids)
        self._marks = {i: str(token.content) for i, token in added.items() if i in self._special_ids}

    def stream(
        self,
        stops: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        unsearched: int = 0,
        shown: Collection[str] = (),
    ) -> TextStream:
        """Return a new stream. Pass `prompt_ids` for raw completions only: their text continues the prompt.

        shown: special tokens that are written as text, the markers of tool calls and reasoning.
        """
        context = tuple(prompt_ids)[-CONTEXT_TOKENS:]
        visible = {i: mark for i, mark in self._marks.items() if mark in shown} if shown else {}
        return TextStream(self._tokenizer, self._special_ids, context, stops, unsearched, visible)
