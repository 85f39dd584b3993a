"""The draft directory round-trips bitwise and every kind of damage is named."""

from __future__ import annotations

import pytest
import torch

from toolkit.checkpoint.draft_dir import DraftDirError, check_draft_matches, load_draft, save_draft
from toolkit.heads.dspark import DSparkConfig, DSparkHead
from toolkit.heads.eagle2 import Eagle2Config, Eagle2Head
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.tokenmap.token_map import TokenMap, TokenMapError
from toolkit.weights import WeightsError, load_tensors, save_tensors


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


SHARED = [
    (Eagle2Config, Eagle2Head, {"num_hidden_layers": 2, "fc_bias": False, "attention_bias": True}),
    (MtpConfig, MtpHead, {"num_mtp_layers": 3, "embedding_first": False, "target_hidden": "pre_norm"}),
]


def _saved_shared(tiny_target, directory, config_class, head_class, own):
    config = config_class.from_target_config(tiny_target.config, vocab_size=tiny_target.vocab_size, **own)
    head = head_class(config)
    return head, save_draft(directory, head.state_dict(), config, None, {"target": {"name": "tiny"}})


@pytest.mark.parametrize(("config_class", "head_class", "own"), SHARED)
def test_heads_that_share_the_output_matrix_round_trip(tiny_target, tmp_path, config_class, head_class, own):
    """The directory alone must say which head it holds and every choice of its arithmetic, bitwise."""
    head, directory = _saved_shared(tiny_target, tmp_path / "ckpt", config_class, head_class, own)
    loaded = load_draft(directory)
    assert type(loaded.head) is head_class and loaded.head.config == head.config
    assert loaded.kind == loaded.meta["head"] and loaded.meta["features"].startswith("the target's last hidden state")
    assert loaded.token_map == TokenMap.identity(tiny_target.vocab_size)
    assert loaded.head.state_dict().keys() == head.state_dict().keys()
    for name, value in head.state_dict().items():
        assert torch.equal(loaded.head.state_dict()[name], value), name
    check_draft_matches(loaded, tiny_target)
    object.__setattr__(loaded.head.config, "hidden_size", 7)
    with pytest.raises(DraftDirError, match="hidden_size 7"):
        check_draft_matches(loaded, tiny_target)


@pytest.mark.parametrize("own", [{}, {"own_output": False}, {"sample_from_anchor": False, "markov_rank": 0}], ids=str)
def test_dspark_heads_round_trip(tiny_target, tmp_path, own):
    """The mask's embedding, which is the target's, is not written."""
    own = {"markov_rank": 8, "confidence_with_markov": False, **own}
    kept = TokenMap.from_ids(range(0 if "own_output" in own else 5, tiny_target.vocab_size), tiny_target.vocab_size)
    config = DSparkConfig.from_target_config(
        tiny_target.config, vocab_size=tiny_target.vocab_size, target_hidden_size=tiny_target.hidden_size,
        draft_vocab_size=kept.size, aux_layer_ids=(1, 2, 3), num_hidden_layers=2, block_size=6, mask_token_id=7, **own,
    )  # fmt: skip
    head = DSparkHead(config)
    loaded = load_draft(save_draft(tmp_path / "ckpt", head.state_dict(), config, kept, {}))
    assert loaded.kind == "dspark" and loaded.head.config == config and loaded.token_map == kept
    assert "mask" not in head.state_dict() and ("lm_head.weight" in head.state_dict()) == config.own_output
    assert all(torch.equal(loaded.head.state_dict()[name], value) for name, value in head.state_dict().items())
    check_draft_matches(loaded, tiny_target)


def test_a_head_that_shares_the_output_matrix_keeps_its_token_map(tiny_target, tmp_path):
    """It drafts the ids that it was trained on; a map that is not whole is named."""
    config_class, head_class, own = SHARED[0]
    config = config_class.from_target_config(tiny_target.config, vocab_size=tiny_target.vocab_size, **own)
    kept = TokenMap.from_ids(range(5, 90), tiny_target.vocab_size)
    directory = save_draft(tmp_path / "ckpt", head_class(config).state_dict(), config, kept, {})
    assert load_draft(directory).token_map == kept
    _rewrite(directory, lambda tensors: tensors.update(t2d=~tensors["t2d"]))
    with pytest.raises(WeightsError, match="do not describe the same token map"):
        load_draft(directory)
