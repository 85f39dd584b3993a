"""From an EngineConfig to an engine."""

from __future__ import annotations

import json
import logging
import shutil

import pytest

from toolkit.checkpoint.draft_dir import DraftDirError
from toolkit.infer.drafters.adaptive import AdaptiveDrafter
from toolkit.infer.drafters.lookup import ComposedDrafter, NgramLookup
from toolkit.infer.engine.config import ConfigError, EngineConfig
from toolkit.infer.load.load_draft import read_corpus
from toolkit.infer.load.load_engine import build_engine, load_engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import EngineError, SamplingParams
from toolkit.weights import read_json, write_json


@pytest.fixture
def draft(tiny_draft_directory, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(tiny_draft_directory, tmp_path / "ckpt")


def test_a_draft_directory_is_enough(draft):
    """`toolkit serve --draft ./ckpt` needs nothing else: target, shape and dtype come from it."""
    opened = load_engine(EngineConfig(draft=draft))
    assert opened.shape == DraftShape.chain(4) and opened.draft is not None
    assert next(opened.draft.head.parameters()).dtype == opened.target.dtype
    request = opened.engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8))[0]
    assert len(request.output_ids) == 8 and request.events
    opened.engine.close()


def test_best_measured_shape_is_the_default(draft):
    """A measurement must be used, and a given --shape must win over it."""
    write_json(draft / "measured.json", {"best_shape": "3,2,6"})
    assert load_engine(EngineConfig(draft=draft)).shape == DraftShape(3, 2, 6)
    assert load_engine(EngineConfig(draft=draft, shape="2,1,3")).shape == DraftShape.chain(2)
    write_json(draft / "measured.json", {"best_shape": "3,2,6", "adaptive_shape": "3,3,8"})
    assert load_engine(EngineConfig(draft=draft)).shape == DraftShape(3, 3, 8)
    assert load_engine(EngineConfig(draft=draft, adaptive=False)).shape == DraftShape(3, 2, 6)


def test_a_given_shape_is_drafted_as_it_is(draft):
    """Without --shape the engine adapts; who names a shape gets it in every step, unless --adaptive asks for more."""
    cases = [({}, True), ({"shape": "2,1,3"}, False), ({"adaptive": False}, False)]
    for arguments, adapts in [*cases, ({"shape": "2,1,3", "adaptive": True}, True)]:
        opened = load_engine(EngineConfig(draft=draft, **arguments))
        assert isinstance(opened.engine.drafter, AdaptiveDrafter) == opened.adaptive == adapts
        assert opened.shape_name.startswith("adaptive up to chain") == adapts
        opened.engine.close()


def test_no_draft_keeps_the_target(draft):
    """no_draft on the same directory is the plain baseline."""
    opened = load_engine(EngineConfig(draft=draft, no_draft=True))
    assert opened.draft is None and opened.shape is None
    assert not opened.engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4))[0].speculative


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"device": "cuda:99"}, "`device` is cuda:99, but PyTorch sees"),
        ({"device": "cpu", "cuda_graph_max_bs": 4}, "`cuda_graph_max_bs` is 4.*the device is cpu"),
        ({"draft": "ngram", "verify": "rejection"}, "n-gram lookup have none"),
    ],
)
def test_what_cannot_be_loaded(arguments, says):
    """Refused before anything is loaded: no target named x exists."""
    with pytest.raises((ConfigError, EngineError), match=says):
        load_engine(EngineConfig(**{"target": "x", **arguments}))


def test_draft_that_names_no_target(draft):
    """A head from elsewhere can still be served, when the user says for which target."""
    config = read_json(draft / "config.json")
    del config["toolkit"]["target"]
    write_json(draft / "config.json", config)
    with pytest.raises(DraftDirError, match="`target`"):
        load_engine(EngineConfig(draft=draft))


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


def test_a_corpus_longer_than_the_context_is_no_alarm(tiny_target, tmp_path, caplog, monkeypatch):
    """transformers warns of a text that is too long for the model; nothing of a corpus goes through the model."""
    monkeypatch.setattr(tiny_target.tokenizer, "model_max_length", 2)
    monkeypatch.setattr(tiny_target.tokenizer, "deprecation_warnings", {})  # it warns once
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox")
    assert read_corpus(EngineConfig(lookup_corpus=path), tiny_target) is not None
    assert "sequence length" not in caplog.text


def test_lookup_that_cannot_be_is_refused(small_target, small_draft, tmp_path):
    with pytest.raises(ConfigError, match="missing.txt, which cannot be read"):
        drafter_of(small_target, small_draft, lookup_corpus="missing.txt")
    with pytest.raises(ConfigError, match="no head beside it"):
        drafter_of(small_target, NgramLookup(), lookup=True)
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match=r"answers.jsonl:1 has neither `messages` nor `text`"):
        drafter_of(small_target, small_draft, lookup_corpus=path)
    path.write_text('{"text": "\\ud83d"}\n')
    with pytest.raises(ConfigError, match="answers.jsonl:1: text is not valid unicode"):
        drafter_of(small_target, small_draft, lookup_corpus=path)
