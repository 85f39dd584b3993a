"""Filters for synthesized user turns. Each rejection has a named reason, so that reasons can be counted."""

from __future__ import annotations

import re
from collections import Counter

# CJK text has no spaces between words: each character counts as a word.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+(?:['’\-][^\W_{_CJK}]+)*")
_ROLE = re.compile(r"\s*[<\[(#*]*\s*(system|user|assistant|human|model|bot|ai)\b\s*[>\])#*]*\s*(:|\n)", re.IGNORECASE)
NGRAM = 3
MAX_REPEATED_NGRAMS = 0.3
MAX_RUN = 6
MIN_PRINTABLE = 0.95
MIN_LETTERS = 0.5


def words_of(text: str) -> tuple[str, ...]:
    """Return lower-case words without punctuation; two prompts with equal words are duplicates."""
    return tuple(word.lower() for word in _WORD.findall(text))


def rejection(text: str, min_words: int, max_words: int) -> str | None:
    """Return why `text` is unusable: empty, not_text, role_name, too_short, too_long or repetition; None if usable."""
    if not text.strip():
        return "empty"
    if not _mostly_text(text):
        return "not_text"
    if _ROLE.match(text):
        return "role_name"
    words = words_of(text)
    if len(words) < min_words:
        return "too_short"
    if len(words) > max_words:
        return "too_long"
    return "repetition" if _repeats(text, words) else None


def _mostly_text(text: str) -> bool:
    """Whether nearly all characters are printable, and at least half of the non-spaces are letters or digits."""
    printable = sum(char.isprintable() or char in "\n\t" for char in text) - text.count("\ufffd")
    solid = [char for char in text if not char.isspace()]
    letters = sum(char.isalnum() for char in solid)
    return printable >= MIN_PRINTABLE * len(text) and letters >= MIN_LETTERS * len(solid)


def _repeats(text: str, words: tuple[str, ...]) -> bool:
    """Whether one word or character repeats many times in a row, or too many word n-grams occur more than once."""
    longest = run = 1
    for before, word in zip(words, words[1:], strict=False):
        run = run + 1 if word == before else 1
        longest = max(longest, run)
    if longest >= MAX_RUN or re.search(r"(\S)\1{11,}", text):
        return True
    ngrams = Counter(zip(*(words[start:] for start in range(NGRAM)), strict=False))
    total = ngrams.total()
    return total >= 2 * NGRAM and (total - len(ngrams)) / total > MAX_REPEATED_NGRAMS
