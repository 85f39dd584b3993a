"""search.json: where it holds, the shapes and times that an engine starts from, and where it is left alone."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch

from toolkit import LLM
from toolkit.checkpoint.draft_dir import load_draft, save_draft
from toolkit.infer.drafters.adaptive import AdaptiveDrafter, AdaptiveShape, Plan
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.load.load_engine import by_rows, choose_drafting, load_engine, load_models
from toolkit.infer.load.search_file import Found, conditions, merged
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.weights import load_tensors, read_json, save_tensors, write_json

BEST = {
    "1": {"setting": "2,4,6", "shape": "2,4,6", "adaptive_shape": "2,8,8"},
    "4": {"setting": "plain", "shape": "3,1,4", "adaptive_shape": "3,1,4"},
}
CHEAP = {"batch": 1, "plain_s": 1.0, "drafts": {"2,4": 0.01, "3,1": 0.01, "2,8": 0.01}, "verifies": {}}
CHEAP["verifies"] = {"tree,6": 1.02, "chain,4": 1.01, "tree,8": 1.03}
DEAR = CHEAP | {
    "drafts": {"2,4": 9.0, "3,1": 9.0, "2,8": 9.0},
    "verifies": {"tree,6": 6.0, "chain,4": 4.0, "tree,8": 8.0},
}


@pytest.fixture
def draft(tiny_draft_directory, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(tiny_draft_directory, tmp_path / "ckpt")


@pytest.fixture
def searched(draft, tiny_target_directory):
    """Writes a search.json of this machine and returns its directory."""

    def write(times=CHEAP, **options):
        (draft / "search.json").unlink(missing_ok=True)
        config = EngineConfig(draft=draft, shape="2,1,3", **options)
        opened = load_engine(config)
        opened.engine.close()
        held = conditions(opened.draft, config, opened.target)
        found = {size: one | {"times": times | {"batch": int(size)}} for size, one in BEST.items()}
        write_json(draft / "search.json", {"holds_for": held, "found": {"greedy": found}})
        return draft

    return write


def found_of(best, times=()) -> Found:
    return Found({"greedy": {int(size): one for size, one in best.items()}}, times)


def log_of(caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    caplog.set_level(logging.INFO, logger="toolkit")


@pytest.mark.parametrize(("batch", "shape"), [(1, "2,4,6"), (3, "2,4,6"), (64, "3,1,4")])
def test_a_batch_between_two_takes_the_smaller_ones_shape(batch, shape):
    """A larger batch verifies fewer nodes for free; the shape of one that was searched is never too large for it."""
    assert found_of(BEST).shape(batch).as_text() == shape
    assert found_of({"4": BEST["4"], "16": BEST["1"]}).shape(2).as_text() == "3,1,4", "the smallest searched"
    assert found_of(BEST).largest == DraftShape(3, 8, 8)


def test_an_engine_starts_from_what_was_found(searched):
    """In every step the shape of its batch size; adaptively any shape up to the largest one found, and for sampled
    requests, which were not searched, up to the chain of 4 that they have without a search."""
    draft = searched()
    for options, shape in (
        ({"adaptive": False, "max_running_requests": 2}, "2,4,6"),
        ({"adaptive": False, "max_running_requests": 8}, "3,1,4"),
        ({}, "4,8,8"),
        ({"shape": "2,2,4"}, "2,2,4"),
    ):
        opened = load_engine(EngineConfig(draft=draft, **options))
        opened.engine.close()
        assert opened.shape.as_text() == shape and opened.adaptive == (options == {})
    with LLM(draft=draft, adaptive=False, max_running_requests=1) as llm:
        done = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))[0]
        assert {event.offered for event in done.events} == {5}


@pytest.mark.parametrize(
    ("settings", "options", "winners"),
    [
        (("2,4,6", "plain"), {"max_running_requests": 3}, {1: "2,4,6", 4: "plain"}),
        (("2,4,6", "adaptive"), {"max_running_requests": 9}, {1: "2,4,6", 4: "adaptive", 9: "adaptive"}),
        (("plain", "plain"), {"lookup": True}, None),
        (("2,4,6", "3,1,4"), {"adaptive": True}, None),
    ],
)
def test_winners_are_drafted_by_running_rows(searched, caplog, monkeypatch, settings, options, winners):
    """`toolkit search` without --batch finds the winner of one row; a server of 16 rows uses it while one runs."""
    draft = searched()
    found = read_json(draft / "search.json")
    for size, setting in zip(("1", "4"), settings, strict=True):
        found["found"]["greedy"][size]["setting"] = setting
    write_json(draft / "search.json", found)
    log_of(caplog, monkeypatch)
    opened = load_engine(EngineConfig(**{"draft": draft, "max_running_requests": 4, **options}))
    request = opened.engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))[0]
    opened.engine.close()
    assert opened.adaptive and opened.shape == DraftShape(4, 8, 8), (
        "the largest found, and a chain of 4 without a search"
    )
    winners = winners and {"greedy": winners}
    assert opened.winners == (winners or {})
    if winners is not None:
        assert opened.shape_name == f"by running requests ({by_rows(winners)})" and by_rows(winners) in caplog.text
        assert {event.offered for event in request.events} == {5}, "one row runs"


@pytest.mark.parametrize(
    ("settings", "shapes", "most"),
    [
        (("2,4,6", "3,1,4"), {1: DraftShape(2, 4, 6), 4: DraftShape(3, 1, 4)}, DraftShape(3, 4, 6)),
        (("2,4,6", "plain"), {}, DraftShape(3, 1, 4)),
    ],
)
def test_recorded_rounds_have_the_shape_of_their_rows(searched, monkeypatch, settings, shapes, most):
    """Where plain decoding won for some rows, one shape is recorded: that of the largest batch."""
    directory = searched()
    monkeypatch.setattr(EngineConfig, "why_eager", lambda *_: None)
    found = read_json(directory / "search.json")
    for size, setting in zip(("1", "4"), settings, strict=True):
        found["found"]["greedy"][size] |= {"setting": setting, "shape": BEST[size]["shape"]}
    write_json(directory / "search.json", found)
    config = EngineConfig(draft=directory, max_running_requests=16)
    chosen = choose_drafting(config, *load_models(config, torch.device("cpu")))
    assert (chosen.shapes, chosen.shape, chosen.adaptive) == (shapes, most, False)


@pytest.mark.parametrize(
    ("verify", "found", "offered"),
    [
        ("auto", ["greedy", "sampled, verify target"], ({5}, {2})),
        ("block", ["greedy", "sampled, verify target"], (None, None)),
        ("auto", ["sampled, verify target"], (None, {2})),
    ],
)
def test_each_request_has_the_setting_of_its_kind(searched, caplog, monkeypatch, verify, found, offered):
    """Sampled requests lose drafts: what is best for one kind may lose for the other. One engine has both, by the
    request's own temperature. None: adaptive drafting, which is made to draft nothing. A rule that needs chains takes
    no trees of a greedy search."""
    monkeypatch.setattr(AdaptiveShape, "_pick", lambda *_: Plan())
    draft = searched()
    held = read_json(draft / "search.json")
    greedy = held["found"]["greedy"]["1"]
    kinds = {"greedy": greedy, "sampled, verify target": greedy | {"setting": "2,1,3"}}
    write_json(draft / "search.json", held | {"found": {kind: {"1": kinds[kind]} for kind in found}})
    log_of(caplog, monkeypatch)
    opened = load_engine(EngineConfig(draft=draft, max_running_requests=1, verify=verify, lookup=False))
    for temperature, wanted in zip((0.0, 0.7), offered, strict=True):
        params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=temperature, seed=1)
        request = opened.engine.generate([[5, 6, 7]], params)[0]
        assert {event.offered for event in request.events} == (wanted or {0})
    opened.engine.close()


def test_searches_of_other_kinds_and_batch_sizes_are_kept(searched, caplog, monkeypatch):
    """A search of sampled requests after one of greedy requests would else forget the first."""
    earlier = read_json(searched() / "search.json")
    log_of(caplog, monkeypatch)
    caplog.clear()
    greedy = earlier["found"]["greedy"]
    other = merged(earlier, earlier | {"found": {"sampled, verify target": {"16": greedy["1"]}}, "hardware": "new"})
    assert other["found"] == {"greedy": greedy, "sampled, verify target": {"16": greedy["1"]}}
    again = merged(other, earlier | {"found": {"greedy": {"4": greedy["1"]}}})
    assert again["found"]["greedy"] == {"1": greedy["1"], "4": greedy["1"]} and other["hardware"] == "new"
    assert merged(None, earlier) == earlier and not caplog.text
    elsewhere = earlier | {"holds_for": earlier["holds_for"] | {"torch_threads": 9}}
    assert merged(elsewhere, earlier) == earlier
    assert "earlier searches in search.json are replaced: they were made with torch_threads 9, here 1" in caplog.text


@pytest.mark.parametrize(("times", "offered"), [(None, [0, 0]), (CHEAP, None), (DEAR, [0, 0])])
def test_adaptive_drafting_knows_the_costs_in_its_first_round(searched, times, offered):
    """Without times an engine begins with two plain rounds; with times that say so, it drafts at once."""
    draft = searched(times or CHEAP)
    if times is None:
        (draft / "search.json").unlink()
    opened = load_engine(EngineConfig(draft=draft, adaptive=True))
    assert isinstance(opened.engine.drafter, AdaptiveDrafter)
    request = opened.engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))[0]
    opened.engine.close()
    first = [event.offered for event in request.events[:2]]
    assert first[0] > 0 if offered is None else first == offered


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"dtype": "bfloat16", "torch_compile": True}, "dtype bfloat16, here float32; torch_compile True, here False"),
        ({"weights": "0" * 64}, "weights 000000000000"),
    ],
)
def test_a_search_elsewhere_is_not_used_and_the_log_says_why(searched, caplog, monkeypatch, changed, says):
    """Shapes and times of another machine, head or engine would be wrong without a trace."""
    draft = searched()
    found = read_json(draft / "search.json")
    found["holds_for"] |= changed
    write_json(draft / "search.json", found)
    log_of(caplog, monkeypatch)
    opened = load_engine(EngineConfig(draft=draft))
    opened.engine.close()
    assert opened.shape == DraftShape.chain(4)
    assert f"{draft}/search.json is not used, since it was made with" in caplog.text and says in caplog.text


def test_other_weights_lose_their_search(searched, tiny_draft, tmp_path):
    """Writing the same head again keeps search.json; another one removes it, and one that was copied over it does not
    make it hold."""
    draft = searched()
    opened = load_draft(draft)
    meta = {"target": opened.meta["target"]}
    save_draft(draft, opened.head.state_dict(), opened.head.config, opened.token_map, meta)
    assert "search" in load_draft(draft).meta
    assert load_engine(EngineConfig(draft=draft)).shape == DraftShape(4, 8, 8)
    tensors = load_tensors(draft / "model.safetensors")
    save_tensors(draft / "model.safetensors", tensors | {"norm.weight": tensors["norm.weight"] + 1})
    assert load_engine(EngineConfig(draft=draft)).shape == DraftShape.chain(4)
    save_draft(draft, opened.head.state_dict(), opened.head.config, opened.token_map, meta)
    assert not (draft / "search.json").exists()
