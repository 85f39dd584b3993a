"""Grammars: which tokens may follow, against the definition by strings, and what is refused."""

from __future__ import annotations

import itertools

import pytest

from toolkit.infer.request import grammar
from toolkit.infer.request.grammar import MOST_BLANKS, MOST_KEPT, Grammars
from toolkit.infer.request.params import SamplingError, SamplingParams

# Nowhere is one text alone left that has several tokenizations: there llguidance allows one of them.
REGEX = r"[a-cth]{1,2}( [a-c]d| [0-9]){1,2}!?"
WORDS = [*(f" {letter}d" for letter in "abc"), *(f" {digit}" for digit in range(10))]
LANGUAGE = {
    "".join(letters) + "".join(rest) + end
    for size in (1, 2)
    for letters in itertools.product("abcth", repeat=size)
    for count in (1, 2)
    for rest in itertools.product(WORDS, repeat=count)
    for end in ("", "!")
}
PREFIXES = {text[:size] for text in LANGUAGE for size in range(len(text) + 1)}


@pytest.fixture(scope="module")
def grammars(tiny_target) -> Grammars:
    return Grammars(tiny_target.tokenizer, tiny_target.vocab_size, tiny_target.stop_ids)


def bits(mask: bytes) -> set[int]:
    return {8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


def ids(target, text: str) -> list[int]:
    return target.tokenizer(text, add_special_tokens=False)["input_ids"]


def refusal(grammars: Grammars, **settings) -> str:
    with pytest.raises(SamplingError) as caught:
        grammars.start(SamplingParams(**settings))
    assert caught.value.field in settings
    return str(caught.value)


def test_masks_at_every_node_are_those_of_the_definition(tiny_target, grammars):
    """A token may follow iff the text with it begins some text of the language, a stop id iff the text is one of it.

    Looked at in trees at every node, in a row: a step back that forgets a node, or a draft that stays read, changes the
    masks of its siblings or of the next tree.
    """
    texts = {token: tiny_target.tokenizer.decode([token]) for token in range(tiny_target.vocab_size)}
    specials = set(tiny_target.tokenizer.all_special_ids)
    state = grammars.start(SamplingParams(regex=REGEX))

    def allowed(text: str) -> set[int]:
        found = {token for token, more in texts.items() if token not in specials and text + more in PREFIXES}
        return found | (tiny_target.stop_ids if text in LANGUAGE else set())

    answer: list[int] = []
    for token in [0, *ids(tiny_target, "th 4 bd")]:
        answer = answer if token == 0 else [*answer, token]
        text = tiny_target.tokenizer.decode(answer)
        tokens, parents, paths = [token], [-1], [text]
        for parent in range(12):  # every fourth allowed token, one that is not, and the stop ids where they are allowed
            here = sorted(allowed(paths[parent])) if parent < len(paths) and paths[parent] is not None else []
            for child in {*here[::4], *(set(here) & tiny_target.stop_ids), ids(tiny_target, "q")[0]} if here else ():
                tokens.append(child)
                parents.append(parent)
                goes_on = child in here and child not in tiny_target.stop_ids
                paths.append(paths[parent] + texts[child] if goes_on else None)
        found = state.masks(answer, tokens, parents, range(len(tokens)))
        assert len(tokens) > 2
        for node, path in enumerate(paths):
            if path is not None:
                assert bits(found[node]) == allowed(path), f"after {path!r}"
            else:
                assert (found[node] is not None) == (tokens[node] in tiny_target.stop_ids)


@pytest.mark.parametrize(
    "text, fits",
    [
        ('{"a":1}', True),
        ('{"a":' + " " * MOST_BLANKS + "1}", True),
        ('{"a":' + " " * (MOST_BLANKS + 1) + "1}", False),
        ('{"a":"1"}', False),
    ],
)
def test_blanks_in_json_are_bounded(tiny_target, grammars, text, fits):
    """Blanks between elements are allowed, since models write them, but not without end."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    state = grammars.start(SamplingParams(json_schema={**schema, "required": ["a"]}))
    tokens = ids(tiny_target, text)
    found = state.masks([], [0, *tokens], range(-1, len(tokens)), range(len(tokens) + 1))
    assert (found[-1] is not None) == fits and (not fits or tiny_target.stop_ids <= bits(found[-1]))


UNSUPPORTED = {
    "oneOf": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]},
    "http://example.com": {"$ref": "http://example.com/x"},
}


@pytest.mark.parametrize("named", UNSUPPORTED)
def test_unsupported_keywords_are_named(grammars, named):
    """A keyword that is not enforced would give answers that break the schema. A schema cannot turn the check off."""
    assert named in refusal(grammars, json_schema={"x-guidance": {"lenient": True}, **UNSUPPORTED[named]})


def test_what_cannot_be_read_is_refused(grammars):
    """Whatever a client sends is an error of the request, never of the engine."""
    assert "a JSON object is needed" in refusal(grammars, json_schema="[1]")
    assert "nested" in refusal(grammars, json_schema='{"items":' * 100_000)
    assert "recursion" in refusal(grammars, json_schema='{"items":' * 400 + "{}" + "}" * 400)
    assert "surrogates" in refusal(grammars, regex="\ud800")
    assert len(refusal(grammars, regex="(" * 5000 + "a" + ")" * 5000)) < 400


def test_targets_without_a_stop_id_or_a_fast_tokenizer_are_refused(tiny_target):
    """A complete answer could not end, or the bytes of the tokens are not known."""
    without = Grammars(tiny_target.tokenizer, tiny_target.vocab_size, frozenset())
    assert "stop id" in refusal(without, regex="a")
    slow = Grammars(object(), tiny_target.vocab_size, tiny_target.stop_ids)
    assert "fast tokenizer" in refusal(slow, regex="a")


def test_equal_grammars_are_compiled_once_and_not_kept_without_end(tiny_target):
    """An answer's state must not be another's; a client that sends ever new schemas must not fill the memory."""
    grammars = Grammars(tiny_target.tokenizer, tiny_target.vocab_size, tiny_target.stop_ids)
    a, b = ids(tiny_target, "a")[0], ids(tiny_target, "b")[0]
    first, second = (grammars.start(SamplingParams(regex="ab")) for _ in range(2))
    assert bits(first.masks([], [0], [-1], [0])[0]) >= {a} and grammars._compiled.cache_info().misses == 1
    assert b in bits(first.masks([a], [a], [-1], [0])[0])
    assert b not in bits(second.masks([], [0], [-1], [0])[0])
    for number in range(MOST_KEPT + 3):
        grammars.start(SamplingParams(regex=f"a{number}"))
    assert grammars._compiled.cache_info().currsize == MOST_KEPT


def test_a_grammar_that_can_never_begin_is_refused(tiny_target, monkeypatch):
    """Where even the first mask is too much work, the client hears so at once, as of any other wrong grammar."""
    monkeypatch.setitem(grammar.LIMITS, "max_lexer_states", 5)
    grammars = Grammars(tiny_target.tokenizer, tiny_target.vocab_size, tiny_target.stop_ids)
    assert "too many states" in refusal(grammars, regex="(a|b)*c[x-z]{3}")
