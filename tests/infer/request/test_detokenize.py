"""Text as it streams: whole characters, exact stop strings, and nothing that is taken back."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from toolkit.infer.request.detokenize import Detokenizer, StopStrings

TEXTS = [
    "漢字かな交じり文",
    "👩‍👩‍👧 family 🏳️‍🌈",
    "  spaces \n\n\ttabs e\u0301",
    "a\ufffdb",
]


def pieces(stream, ids):
    return [*(stream.push(i) for i in ids), stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_hold_whole_characters(tiny_target, text):
    """A piece with half a character would put U+FFFD on the screen; the tiny tokenizer splits these into bytes."""
    ids = tiny_target.tokenizer(text, add_special_tokens=False)["input_ids"]
    shown = pieces(Detokenizer(tiny_target.tokenizer).stream(), ids)
    assert "".join(shown) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)


def test_special_tokens_give_no_text(tiny_target):
    """With ignore_eos the answer goes on after <|im_end|>, which must not be printed."""
    tokenizer = tiny_target.tokenizer
    ids = tokenizer("one<|im_end|>two", add_special_tokens=False)["input_ids"]
    assert "".join(pieces(Detokenizer(tokenizer).stream(), ids)) == "onetwo"


def test_random_bytes_never_come_back(tiny_target):
    """Any id sequence, also invalid UTF-8: pieces join to the tokenizer's own decoding of the whole."""
    tokenizer, draw = tiny_target.tokenizer, random.Random(0)
    for _ in range(20):
        ids = [draw.randrange(3, len(tokenizer)) for _ in range(40)]
        shown = "".join(pieces(Detokenizer(tokenizer).stream(), ids))
        assert shown == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def metaspace():
    """A Llama-2 style decoder: words begin with ▁, unknown characters are byte tokens."""
    words = ["<unk>", "<s>", "</s>", "▁Hello", "▁world", "▁", *(f"<0x{b:02X}>" for b in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_sentencepiece_spaces_and_bytes(metaspace):
    """Decoding token by token would lose every space between words and break byte characters."""
    words = ["▁Hello", "▁world", "▁", *(f"<0x{byte:02X}>" for byte in "漢字".encode())]
    ids = metaspace.convert_tokens_to_ids(words)
    shown = pieces(Detokenizer(metaspace).stream(), ids)
    assert "".join(shown) == "Hello world 漢字" and not any("\ufffd" in piece for piece in shown)


def through(stops, chunks):
    checker = StopStrings(stops)
    shown = [checker.push(chunk) for chunk in chunks]
    return "".join(shown) + checker.finish(), checker.hit


@pytest.mark.parametrize(
    ("stops", "text", "shown", "hit"),
    [
        (["END"], "abcENDxyz", "abc", "END"),
        (["aab"], "aaab", "a", "aab"),
        (["abcd", "bc"], "abcd", "a", "bc"),  # the one that is complete first
        (["b", "ab"], "xab", "x", "ab"),  # complete together: the longer one
        ([], "abc", "abc", None),
    ],
)
def test_stop_cut_does_not_depend_on_the_chunks(stops, text, shown, hit):
    """Plain decoding and a run of five accepted tokens must cut at the same character."""
    draw = random.Random(1)
    assert through(stops, [text]) == (shown, hit)
    assert through(stops, list(text)) == (shown, hit)
    for _ in range(20):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(3))
        assert through(stops, [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == (shown, hit)


def test_held_text_is_only_a_possible_beginning():
    """Holding back more than needed would make streaming stutter; less would retract text."""
    checker = StopStrings(["STOP"])
    assert [checker.push("abST"), checker.push("x"), checker.push("ST"), checker.push("OP")] == ["ab", "STx", "", ""]
    assert checker.hit == "STOP"


@pytest.mark.parametrize("name", ["bytes", "metaspace"])
def test_a_character_at_any_border_is_whole_or_marked(tiny_target, metaspace, name):
    """A token may end inside a character where the prompt ends, where the answer is cut, and where a stop begins."""
    text, tokenizer = "漢 👩é", tiny_target.tokenizer if name == "bytes" else metaspace
    sizes = [len(char.encode()) for char in text]
    if name == "bytes":
        ids = [tokenizer(char, add_special_tokens=False)["input_ids"] for char in text]
    else:
        names = [["▁"] if char == " " else [f"<0x{b:02X}>" for b in char.encode()] for char in text]
        ids = [tokenizer.convert_tokens_to_ids(one) for one in names]
    assert [len(one) for one in ids] == sizes  # a token a byte
    ids, ends = [token for one in ids for token in one], [sum(sizes[: n + 1]) for n in range(len(sizes))]
    detokenizer = Detokenizer(tokenizer)
    for begin in range(len(ids)):
        whole = sum(end <= begin for end in ends)
        for end in range(begin, len(ids) + 1):
            shown = "".join(pieces(detokenizer.stream((), ids[:begin]), ids[begin:end]))
            complete = sum(one <= end for one in ends)
            assert shown.startswith(text[whole:complete]) and not shown[complete - whole :].strip("\ufffd")
            incomplete = end - max(one for one in (0, begin, *ends) if one <= end)  # bytes of the last character
            assert len(shown) - (complete - whole) <= incomplete, (begin, end)
        stream = detokenizer.stream(["é"], ids[:begin])
        shown = "".join(pieces(stream, ids[begin:]))
        assert shown == text[whole:].partition("é")[0] and (stream.hit == "é") == ("é" in text[whole:])
