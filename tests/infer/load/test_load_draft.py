"""Token maps at load: heads that share the target's output matrix draft only its ids, and the answers stay."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import pytest
import torch

from toolkit.checkpoint.draft_dir import save_draft
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.infer.cpu.int8_linear import quantize_head
from toolkit.infer.drafters.drafting_head import SharedOutput
from toolkit.infer.drafters.lookup import NgramLookup
from toolkit.infer.engine.config import ConfigError, EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.load_draft import fit_draft, load_draft
from toolkit.infer.load.load_engine import load_engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import DraftShapeError, SamplingParams
from toolkit.targets.chat_templates import is_plain
from toolkit.targets.load import read_target
from toolkit.targets.target import describe_target
from toolkit.tokenmap.build import forced_ids_for
from toolkit.tokenmap.token_map import TokenMapError


def write_ids(tmp_path, ids):
    path = tmp_path / "freq.pt"
    torch.save(ids, path)
    return path


@pytest.fixture(scope="module")
def mtp_directory(tiny_target, tiny_target_directory, tmp_path_factory):
    """An untrained MTP head of the tiny target, on disk."""
    torch.manual_seed(2)
    config = MtpConfig.from_target_config(tiny_target.config, vocab_size=tiny_target.vocab_size)
    meta = {"target": {"name": str(tiny_target_directory), "revision": None}}
    return save_draft(tmp_path_factory.mktemp("mtp"), MtpHead(config).state_dict(), config, None, meta)


def test_only_the_maps_rows_are_scored(small_target, shared_draft, tmp_path):
    """Gathered rows must be the map's, in its order: logits equal the full ones at those ids."""
    draft = fit_draft(shared_draft("mtp"), small_target, write_ids(tmp_path, [17, 3, 0, 9]))
    assert draft.token_map.ids.tolist() == [0, 3, 9, 17]
    hidden = torch.randn(2, 3, small_target.hidden_size)
    scores = SharedOutput(small_target, draft)(hidden)
    assert scores.shape == (2, 3, 4)
    wanted = small_target.logits(hidden)[..., draft.token_map.ids]
    assert torch.allclose(scores, wanted, atol=1e-5)
    draft = replace(draft, head=copy.deepcopy(draft.head))
    quantize_head(draft.head)  # its rows of the target's matrix are quantised too
    error = (SharedOutput(small_target, draft)(hidden) - wanted).norm()
    assert 0 < error < 0.02 * wanted.norm()


@pytest.mark.parametrize(("name", "shape"), [("eagle2", "4,1,5"), ("mtp-three-layers", "3,2,6")])
def test_exactness_does_not_depend_on_the_map(small_target, shared_draft, tmp_path, name, shape):
    """Ids outside a map of 7 are never drafted, and still written by the target where plain decoding writes them."""
    kept = [2, 7, 11, 13, 19, 23]
    draft = fit_draft(shared_draft(name), small_target, write_ids(tmp_path, kept))
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12]]
    engine = Engine(small_target, draft, DraftShape.parse(shape))
    plain = engine.generate(prompts, params, speculative=False)
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    allowed = {*kept, *small_target.stop_ids}
    drafted = set()
    while engine.has_work():
        with torch.inference_mode():
            if engine._running:
                engine._rounds.set_rows(engine._running)
                tree = engine.drafter.propose(engine._running, engine._rounds.state.rows(len(engine._running)))
                drafted |= set(tree.tokens[:, 1:][tree.valid[:, 1:]].tolist())
        engine.step()
    engine.close()
    assert [request.output_ids for request in requests] == [request.output_ids for request in plain]
    assert drafted and drafted <= allowed
    assert set(sum((request.output_ids for request in requests), [])) - allowed, "the map held all tokens written"


def test_missing_special_ids_are_added_and_said(tiny_target, mtp_directory, tmp_path, caplog, monkeypatch):
    """FR-Spec's maps lack them; a head that cannot draft the end of a turn loses a step an answer."""
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    forced = forced_ids_for(tiny_target.tokenizer, tiny_target.stop_ids, tiny_target.vocab_size)
    with caplog.at_level(logging.INFO, logger="toolkit"):
        draft = fit_draft(load_draft(mtp_directory), tiny_target, write_ids(tmp_path, [50, 60, forced[0]]))
    assert draft.token_map.ids.tolist() == sorted({50, 60, *forced})
    assert f"lacks {len(forced) - 1} ids of special tokens" in caplog.text


@pytest.mark.parametrize(
    ("ids", "says"),
    [([3, 4, 4], "1 duplicate"), ([3, 10**6], "outside the target vocabulary")],
)
def test_bad_maps_are_refused(tiny_target, mtp_directory, tmp_path, ids, says):
    """A duplicate would offer one token twice as siblings, which makes sampled verification inexact."""
    with pytest.raises(TokenMapError, match=says):
        fit_draft(load_draft(mtp_directory), tiny_target, write_ids(tmp_path, ids))


def test_top_k_beyond_the_map_is_refused(small_target, shared_draft, tmp_path):
    """topk would fail in the middle of a run."""
    draft = fit_draft(shared_draft("eagle2"), small_target, write_ids(tmp_path, [0, 5]))
    with pytest.raises(DraftShapeError, match="draft vocabulary of 2 "):
        Engine(small_target, draft, DraftShape(2, 3, 5))


def test_maps_for_what_has_no_use_for_one(tiny_draft_directory, tmp_path):
    """Ignoring the option (as SGLang does) would let a user believe in it. Said before the target is loaded."""
    path = write_ids(tmp_path, [1, 2])
    with pytest.raises(ConfigError, match="eagle3 head has an output matrix of its own, over the 160 ids"):
        load_engine(EngineConfig(draft=tiny_draft_directory, token_map=path))
    with pytest.raises(ConfigError, match="n-gram lookup scores no tokens"):
        load_engine(EngineConfig(draft="ngram", target="x", token_map=path))


def test_a_directory_says_what_it_holds(mtp_directory, tmp_path):
    """`toolkit serve --draft DIR --token-map FILE` needs nothing else."""
    opened = load_engine(
        EngineConfig(draft=mtp_directory, shape="3,2,6", token_map=write_ids(tmp_path, list(range(100))))
    )
    assert opened.draft.kind == "mtp" and opened.draft.token_map.size >= 100
    request = opened.engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))[0]
    opened.engine.close()
    assert {event.offered for event in request.events} == {5}


def test_ngram_needs_a_target(tiny_target_directory):
    """There is no directory to name it."""
    assert load_draft("ngram") == NgramLookup()
    opened = load_engine(EngineConfig(draft="ngram", target=str(tiny_target_directory)))
    assert opened.draft.kind == "ngram" and opened.shape == DraftShape.chain(4)
    assert opened.engine.generate([[5, 6, 5, 6, 5]], SamplingParams(max_tokens=8))[0].speculative
    opened.engine.close()


def test_the_template_of_the_training_is_served(tiny_draft, tiny_target_directory, tmp_path):
    """A head trained on plain texts would be served, measured and checked with chats of the target's own template."""
    meta = {"target": describe_target(read_target(tiny_target_directory, chat_template="none"))}
    head = save_draft(
        tmp_path / "head", tiny_draft.head.state_dict(), tiny_draft.head.config, tiny_draft.token_map, meta
    )
    for chosen, plain in ((None, True), ("chatml", False)):
        loaded = load_engine(EngineConfig(draft=str(head), chat_template=chosen))
        assert is_plain(loaded.target.tokenizer) == plain
        loaded.engine.close()
