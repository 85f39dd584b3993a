"""Token ids to text as they come: whole characters only, stop strings cut exactly, nothing ever taken back.

Two things make the text of a token depend on its neighbours. A byte-level token may hold half of a UTF-8
character, and a SentencePiece decoder drops the space before the first word of what it is given. So a token
is decoded in a small window together with the tokens of the piece before it, and the piece is the difference:

    ids      ... a b | c d            | = where the text has been handed out
    window       a b   c d            decode(a b c d) minus decode(a b) is the new piece
    piece              ^^^            held while it ends in U+FFFD: the character is not whole yet
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not (yet) a character
CONTEXT_TOKENS = 6  # prompt tokens before a raw completion, enough to know whether a space belongs before it


class IncrementalText:
    """One sequence's text, token by token. Special tokens give no text."""

    def __init__(self, tokenizer: Any, special_ids: frozenset[int], context_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._ids = [i for i in context_ids if i not in special_ids]
        self._handed_out = len(self._ids)
        self._known = self._decode(self._ids)

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is still missing bytes."""
        if token_id in self._special_ids:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) <= len(self._known) or text.endswith(REPLACEMENT):
            return ""
        return self._hand_out(text)

    def finish(self) -> str:
        """What is left when the sequence ends: bytes that never became a character, as U+FFFD."""
        return self._hand_out(self._decode(self._ids))

    def _hand_out(self, text: str) -> str:
        piece = text[len(self._known) :]
        self._ids = self._ids[self._handed_out :]
        self._handed_out = len(self._ids)
        self._known = self._decode(self._ids)
        return piece

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class StopStrings:
    """Cuts a stream of text before the stop string that is complete first.

    The rule is stated on characters, so the cut does not depend on how the text was split into tokens or
    into accepted runs. Text that may still turn out to be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty; leave it out")
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """The part of `text` (after what was held) that may be shown; sets `hit` when a stop string is complete."""
        if self.hit is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.hit = min(found)
            self._held = ""
            return text[:start]
        keep = self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The held text, when the sequence ended before a stop string was complete."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max((len(stop) for stop in self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextStream:
    """`IncrementalText` with stop strings: push token ids, get the text that is safe to show.

    unsearched: tokens at the start whose text is let through; a stop string can only begin behind it.
    """

    def __init__(self, text: IncrementalText, stops: StopStrings, unsearched: int = 0) -> None:
        self._text = text
        self._stops = stops
        self._unsearched = unsearched

    @property
    def hit(self) -> str | None:
        """The stop string that is complete: the tokens after this one do not belong to the answer."""
        return self._stops.hit

    @property
    def stopped(self) -> bool:
        """True when a stop string is complete."""
        return self.hit is not None

    def push(self, token_id: int) -> str:
        """Text to show after this token; never half a character, never part of a stop string."""
        text = self._text.push(token_id)
        if self._unsearched > 0:
            self._unsearched -= 1
            return text
        return self._stops.push(text)

    def finish(self) -> str:
        """Everything still held; call once, when the sequence has ended."""
        if self.stopped:
            return ""
        shown = self._stops.push(self._text.finish())
        return shown if self.stopped else shown + self._stops.finish()


class Detokenizer:
    """Makes text streams for one tokenizer; looks up its special tokens once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._special_ids |= frozenset(tokenizer.all_special_ids)

    def stream(self, stops: Sequence[str] = (), prompt_ids: Sequence[int] = (), unsearched: int = 0) -> TextStream:
        """A new stream. `prompt_ids` only for raw completions, whose text goes on where the prompt ended."""
        context = tuple(prompt_ids)[-CONTEXT_TOKENS:]
        text = IncrementalText(self._tokenizer, self._special_ids, context)
        return TextStream(text, StopStrings(stops), unsearched)
