"""Filters keep real requests in any script, and reject repetition, noise and text of another role."""

from __future__ import annotations

import pytest

from toolkit.data.prompt_filters import rejection, words_of


@pytest.mark.parametrize(
    "text",
    [
        "How do I bake sourdough bread at home?",
        "Write a Python function that adds two numbers:\n\ndef add(a, b):\n    # your code here\n",
        "What is 12 * (3 + 4) - 5?",
        "東京の天気はどうですか",
        "User interfaces: which toolkit would you pick?",
        "Explain the difference between a list and a tuple. Explain the difference between a set and a list.",
        "Répondez-moi, s'il vous plaît: qu'est-ce que l'été?",
    ],
)
def test_real_requests_pass(text: str) -> None:
    """Rejecting real requests would narrow what the head learns."""
    assert rejection(text, 3, 400) is None


@pytest.mark.parametrize(
    "text, reason",
    [
        ("  \n", "empty"),
        ("Thanks a", "too_short"),
        ("word " * 3 + "many different words follow here and on", "too_long"),
        ("assistant\nSure, here is a story", "role_name"),
        ("**User:** write a poem for me", "role_name"),
        ("go go go go go go go now", "repetition"),
        ("the cat sat on the mat the cat sat on the mat the cat sat on the mat", "repetition"),
        ("please write this line: ====================", "not_text"),
        ("what is aaaaaaaaaaaaaaaaaaaaaaaaaaa called", "repetition"),
        ("a \ufffd\ufffd\ufffd broken answer", "not_text"),
        ("a \x00\x01\x02 broken answer", "not_text"),
    ],
)
def test_noise_is_rejected_by_name(text: str, reason: str) -> None:
    """Reasons are counted, so each must be distinguished."""
    assert rejection(text, 3, 8 if reason == "too_long" else 400) == reason


def test_same_words_are_the_same_prompt() -> None:
    """Case, spaces and punctuation do not make a new prompt; another number does."""
    assert words_of("What is 2+2?") == words_of("what  is 2 + 2 ") != words_of("What is 2+3?")
