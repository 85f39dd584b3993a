"""The draft directory round-trips bitwise and every kind of damage is named."""

from __future__ import annotations

import pytest
import torch

from toolkit.checkpoint.draft_dir import DraftDirError, check_draft_matches, load_draft, save_draft
from toolkit.checkpoint.inspect_path import inspect_path
from toolkit.heads.dspark import DSparkHead
from toolkit.heads.eagle2 import Eagle2Head
from toolkit.heads.mtp import MtpHead
from toolkit.tokenmap.token_map import TokenMap, TokenMapError
from toolkit.weights import WeightsError, load_tensors, read_json, save_tensors, write_json


@pytest.fixture
def saved(tiny_draft, tiny_target, tmp_path):
    meta = {"target": {"name": "tiny", "fingerprint": tiny_target.fingerprint}}
    return save_draft(
        tmp_path / "ckpt", tiny_draft.head.state_dict(), tiny_draft.head.config, tiny_draft.token_map, meta
    )


def _rewrite(directory, change):
    path = directory / "model.safetensors"
    tensors = load_tensors(path)
    change(tensors)
    save_tensors(path, tensors)


def test_duplicate_in_the_map_is_refused(saved):
    """A duplicate id would offer one token twice as siblings, which makes sampled verification inexact."""

    def change(tensors):
        tensors["d2t"][5] = tensors["d2t"][4] - 1

    _rewrite(saved, change)
    with pytest.raises(TokenMapError, match="duplicate"):
        load_draft(saved)


def test_saving_over_an_old_head_leaves_nothing_of_it(saved, tiny_draft, monkeypatch):
    """Killed after the new weights, the old config would call them complete, and old measurements would be theirs."""
    (saved / "measured.json").write_text('{"best_shape": "9,9,9"}')

    def killed(path, value):
        raise KeyboardInterrupt

    state = {name: value + 1 for name, value in tiny_draft.head.state_dict().items()}
    again = (saved, state, tiny_draft.head.config, tiny_draft.token_map, {})
    with monkeypatch.context() as patch:
        patch.setattr("toolkit.checkpoint.draft_dir.write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            save_draft(*again)
    with pytest.raises(DraftDirError, match="no config.json"):
        load_draft(saved)
    assert "measured" not in load_draft(save_draft(*again)).meta


def test_saving_the_same_head_again_keeps_what_it_measured(saved, tiny_draft):
    """A training that is started again when it is done writes its head again; the pipeline would not measure anew."""
    (saved / "measured.json").write_text('{"best_shape": "4,1,5"}')
    save_draft(saved, tiny_draft.head.state_dict(), tiny_draft.head.config, tiny_draft.token_map, {})
    assert load_draft(saved).meta["measured"] == {"best_shape": "4,1,5"}


def test_a_bad_head_is_not_saved(tiny_draft, tmp_path):
    """Saving something that cannot be read back must fail before a file is written."""
    state = dict(tiny_draft.head.state_dict())
    del state["norm.weight"]
    with pytest.raises(WeightsError, match="missing: norm.weight"):
        save_draft(tmp_path / "ckpt", state, tiny_draft.head.config, tiny_draft.token_map, {})
    assert not (tmp_path / "ckpt").exists()


DSPARK = {"aux_layer_ids": (1, 2, 3), "num_hidden_layers": 2, "block_size": 6, "mask_token_id": 7, "markov_rank": 8}
ROUND_TRIPS = [
    (Eagle2Head, {"num_hidden_layers": 2, "fc_bias": False, "attention_bias": True}, 0),
    (Eagle2Head, {}, 5),
    (MtpHead, {"num_mtp_layers": 3, "embedding_first": False, "target_hidden": "pre_norm"}, 0),
    (DSparkHead, {**DSPARK, "confidence_with_markov": False}, 5),
    (DSparkHead, {**DSPARK, "own_output": False}, 0),
    (DSparkHead, {**DSPARK, "correction": "dfly"}, 5),
    (DSparkHead, {**DSPARK, "sample_from_anchor": False, "markov_rank": 0, "confidence_with_markov": False}, 5),
]


@pytest.mark.parametrize(("head_class", "own", "first"), ROUND_TRIPS)
def test_heads_round_trip(tiny_target, tmp_path, head_class, own, first):
    """The directory alone must say which head it holds, every choice of its arithmetic and the ids that it drafts,
    bitwise. A mask's embedding, which is the target's, is not written. first: the first id of its map."""
    size = tiny_target.vocab_size
    kept = TokenMap.from_ids(range(first, size), size)
    own = {**own, "draft_vocab_size": kept.size} if head_class is DSparkHead else own
    config = head_class.config_class.from_target_config(tiny_target.config, vocab_size=size, **own)
    head = head_class(config)
    loaded = load_draft(save_draft(tmp_path / "ckpt", head.state_dict(), config, kept, {}))
    assert type(loaded.head) is head_class and loaded.head.config == config and loaded.token_map == kept
    assert loaded.kind == loaded.meta["head"] and loaded.head.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(loaded.head.state_dict()[name], value) for name, value in head.state_dict().items())
    check_draft_matches(loaded, tiny_target)
    object.__setattr__(loaded.head.config, next(iter(config.target_sizes)), 7)
    with pytest.raises(DraftDirError, match="hidden_size 7"):
        check_draft_matches(loaded, tiny_target)


def test_a_map_that_is_not_one_is_named(saved):
    _rewrite(saved, lambda tensors: tensors.update(t2d=~tensors["t2d"]))
    with pytest.raises(WeightsError, match="do not describe the same token map"):
        load_draft(saved)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "64"),
        ("intermediate_size", -128),
        ("rms_norm_eps", "1e-5"),
        ("sliding_window", []),
        ("num_hidden_layers", True),
        ("rope_parameters", {"rope_type": "llama3"}),
        ("vocab_size", "400"),
        ("toolkit", []),
        ("toolkit", {"format": 1, "head": "eagle3", "aux_layer_ids": [2, 3, 4], "target": "org/x"}),
    ],
)
def test_a_setting_that_no_head_can_have_names_the_file(saved, key, value):
    """Whatever torch and transformers raise over it: a traceback names no file, and is no exit status of 2."""
    write_json(saved / "config.json", {**read_json(saved / "config.json"), key: value})
    with pytest.raises(DraftDirError, match="config.json"):
        load_draft(saved)
    assert "config.json" in inspect_path(str(saved)).text()
