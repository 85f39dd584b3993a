import json

import pytest
import torch

from toolkit.tokenmap.build import build_token_map
from toolkit.tokenmap.files import (
    load_freq_list,
    load_token_map,
    save_freq_list,
    save_token_map,
    write_stage,
)
from toolkit.tokenmap.token_map import TokenMap, TokenMapError
from toolkit.weights import load_tensors, save_tensors

TOKEN_MAP = TokenMap.from_ids([1, 4, 5, 8], vocab_size=10)


def test_freq_list_is_a_plain_list_that_sglang_reads(tmp_path):
    """SGLang calls torch.load(weights_only=True) and converts the result to a tensor; it documents a plain list."""
    path = tmp_path / "made" / "here" / "freq_4.pt"
    save_freq_list(path, TOKEN_MAP)
    loaded = torch.load(path, weights_only=True)
    assert loaded == [1, 4, 5, 8] and all(type(token) is int for token in loaded)
    assert load_freq_list(path, 10) == TOKEN_MAP


def test_ranked_lists_and_tensors_of_others_are_read(tmp_path):
    """Published FR-Spec maps are ordered by frequency, some tools save a tensor; both name the same ids."""
    torch.save([5, 1, 8, 4], tmp_path / "ranked.pt")
    torch.save(torch.tensor([1, 4, 5, 8]), tmp_path / "tensor.pt")
    assert load_freq_list(tmp_path / "ranked.pt", 10) == load_freq_list(tmp_path / "tensor.pt", 10) == TOKEN_MAP


@pytest.mark.parametrize(
    "content, words",
    [
        ([1, 4, 4], "freq.pt: 1 duplicate"),
        ([1, 10], "freq.pt: 1 ids are outside"),
        ([1, "2"], "not all integers"),
        ([True, False], "not all integers"),
        ({"ids": [1]}, "holds a dict"),
    ],
)
def test_invalid_lists_are_refused(tmp_path, content, words):
    """The published FR-Spec builder writes a second BOS id; such a file must not be served."""
    torch.save(content, tmp_path / "freq.pt")
    with pytest.raises(TokenMapError, match=words):
        load_freq_list(tmp_path / "freq.pt", 10)


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"PK\x03\x04 cut"])
def test_a_damaged_list_is_a_clear_error(tmp_path, content):
    """The error for a truncated download must name the file instead of showing a pickle traceback."""
    (tmp_path / "freq.pt").write_bytes(content)
    with pytest.raises(TokenMapError, match="freq.pt cannot be read as a token map"):
        load_freq_list(tmp_path / "freq.pt", 10)


def test_token_map_file_round_trip(tmp_path):
    """Every EAGLE-3 checkpoint stores d2t and t2d; reading them must restore the map bit for bit."""
    save_token_map(tmp_path / "token_map.safetensors", TOKEN_MAP)
    assert load_token_map(tmp_path / "token_map.safetensors") == TOKEN_MAP


@pytest.mark.parametrize(
    "tensors, words",
    [
        ({"d2t": TOKEN_MAP.d2t}, "expected d2t and t2d"),
        ({"d2t": TOKEN_MAP.d2t, "t2d": TOKEN_MAP.t2d.roll(1)}, "keep different ids"),
        ({"d2t": TOKEN_MAP.d2t, "t2d": TOKEN_MAP.t2d.long()}, "bool"),
        ({"d2t": TOKEN_MAP.ids + 5, "t2d": TOKEN_MAP.t2d}, "outside"),
        ({"d2t": TOKEN_MAP.d2t.float(), "t2d": TOKEN_MAP.t2d}, "expected integers"),
    ],
)
def test_token_maps_that_contradict_themselves_are_refused(tmp_path, tensors, words):
    """Absolute ids in place of offsets, or tensors of two maps, would silently draft wrong tokens."""
    save_tensors(tmp_path / "map.safetensors", tensors)
    with pytest.raises(TokenMapError, match=words):
        load_token_map(tmp_path / "map.safetensors")


def test_an_absent_token_map_is_a_clear_error(tmp_path):
    """The path comes from the user."""
    with pytest.raises(TokenMapError, match="does not exist"):
        load_token_map(tmp_path / "no.safetensors")


def test_stage_folder_holds_all_four_files(tmp_path):
    """Training, SGLang, the report's curve and a later change of size each read one of them."""
    counts = torch.arange(600)
    token_map = build_token_map(counts, size=300, forced_ids=(0,))
    report = write_stage(tmp_path / "map", token_map, counts, forced_ids=(0,), corpus={"kind": "rollouts"})
    assert load_freq_list(tmp_path / "map/freq_300.pt", 600) == token_map
    assert load_token_map(tmp_path / "map/token_map.safetensors") == token_map
    assert torch.equal(load_tensors(tmp_path / "map/counts.safetensors")["counts"], counts)
    assert json.loads((tmp_path / "map/coverage.json").read_text()) == report
    assert [row["size"] for row in report["rows"]] == [256, 300, 512, 600]
    own = next(row for row in report["rows"] if row["size"] == 300)
    assert report["coverage"] == own["coverage"] and report["tokens"] == int(counts.sum())
    assert report["forced_ids"] == [0] and report["corpus"] == {"kind": "rollouts"}


def test_stage_works_when_nothing_was_counted_and_for_tiny_vocabularies(tmp_path):
    """A dry run without tokens must write a table of zeros instead of dividing by zero."""
    counts = torch.zeros(40, dtype=torch.int64)
    report = write_stage(tmp_path, build_token_map(counts, size=8), counts)
    assert report["coverage"] == 0.0 and [row["size"] for row in report["rows"]] == [8, 40]
