"""`lookup` and `lookup_corpus` of an engine: defaults, files, refusals."""

from __future__ import annotations

import json

import pytest

from toolkit.infer.drafters.lookup import ComposedDrafter, NgramLookup
from toolkit.infer.load.config import ConfigError, EngineConfig
from toolkit.infer.load.load_engine import build_engine


def drafter_of(target, draft, **options):
    loaded = build_engine(EngineConfig(draft="x", **options), target, draft)
    loaded.engine.close()
    return loaded.engine.drafter


def test_adaptive_drafting_has_lookup_unless_refused(small_target, small_draft):
    assert isinstance(drafter_of(small_target, small_draft).inner, ComposedDrafter)
    assert not isinstance(drafter_of(small_target, small_draft, lookup=False).inner, ComposedDrafter)
    assert not isinstance(drafter_of(small_target, small_draft, shape="3,1,4"), ComposedDrafter)
    assert isinstance(drafter_of(small_target, small_draft, shape="3,1,4", lookup=True), ComposedDrafter)


def test_the_corpus_has_the_answers_of_a_file(small_target, small_draft, tmp_path):
    path = tmp_path / "answers.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e"}]},
        {"text": "f g"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    drafter = drafter_of(small_target, small_draft, lookup_corpus=path).inner
    ids = [small_target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("c d e", "f g")]
    assert drafter._texts._corpus.tokens == [*ids[0], -1, *ids[1], -1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookup": False, "lookup_corpus": "x.txt"}, "`lookup` is off"),
        ({"lookup_corpus": "missing.txt"}, "missing.txt, which cannot be read"),
    ],
)
def test_what_cannot_be_is_refused(small_target, small_draft, options, message):
    with pytest.raises(ConfigError, match=message):
        drafter_of(small_target, small_draft, **options)
    with pytest.raises(ConfigError, match="no head beside it"):
        drafter_of(small_target, NgramLookup(), lookup=True)


def test_a_row_without_text_is_named(small_target, small_draft, tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match=r"answers.jsonl:1 has neither `messages` nor `text`"):
        drafter_of(small_target, small_draft, lookup_corpus=path)
