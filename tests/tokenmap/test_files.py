import json

import numpy as np
import pytest
import torch

from toolkit.tokenmap.build import build_token_map
from toolkit.tokenmap.counts import Counts, Part, load_counts
from toolkit.tokenmap.files import (
    load_freq_list,
    load_token_map,
    read_ids,
    save_freq_list,
    save_token_map,
    write_map_files,
    write_stage,
)
from toolkit.tokenmap.token_map import TokenMap, TokenMapError
from toolkit.weights import save_tensors

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


def counts_of(*counted: torch.Tensor, forced_ids: tuple[int, ...] = (), held_out: bool = False) -> Counts:
    """Counts of one corpus for each tensor; the last one is held out if asked for."""
    last = len(counted) - 1
    parts = [Part(f"c{at}", at + 1, held_out and at == last, "math", one) for at, one in enumerate(counted)]
    return Counts(tuple(parts), {"vocab_size": counted[0].numel(), "forced_ids": list(forced_ids), "tokenizer": "t"})


def test_stage_folder_holds_all_files(tmp_path):
    """Training, SGLang, EAGLE, speculators, the report's curve and a later change of size each read one of them."""
    counts = counts_of(torch.arange(600), forced_ids=(0,))
    token_map = build_token_map(counts.total(), size=300, forced_ids=(0,))
    report = write_stage(tmp_path / "map", token_map, counts)
    assert load_freq_list(tmp_path / "map/freq_300.pt", 600) == token_map
    assert load_token_map(tmp_path / "map/token_map.safetensors") == token_map
    assert torch.equal(load_counts(tmp_path / "map").total(), counts.total())
    assert json.loads((tmp_path / "map/coverage.json").read_text()) == report
    assert [row["size"] for row in report["rows"]] == [256, 300, 512, 600]
    own = next(row for row in report["rows"] if row["size"] == 300)
    assert report["coverage"] == own["coverage"] and report["tokens"] == int(counts.total().sum())
    assert report["forced_ids"] == [0] and report["corpus"] == {"tokenizer": "t", "corpora": ["c0"]}
    assert "held_out_coverage" not in report and "by_corpus" not in own


def test_d2t_and_t2d_as_others_read_them(tmp_path):
    """EAGLE's trainer loads cache.pt with torch.load and takes two tensors; speculators' loads two arrays of numpy."""
    write_map_files(tmp_path, TOKEN_MAP)
    eagle = torch.load(tmp_path / "cache.pt", weights_only=True)
    assert eagle.keys() == {"d2t", "t2d"}
    for name, dtype in (("d2t", np.int64), ("t2d", np.bool_)):
        assert torch.equal(eagle[name], getattr(TOKEN_MAP, name))
        array = np.load(tmp_path / f"{name}.npy")
        assert array.dtype == dtype and array.tolist() == getattr(TOKEN_MAP, name).tolist()


def test_coverage_by_corpus_by_task_and_held_out(tmp_path):
    """Weights change the whole, and no corpus' own share; held-out text is in neither."""
    first, second, unseen = torch.zeros(600), torch.zeros(600), torch.zeros(600)
    first[[1, 2]], second[[3, 4]], unseen[[1, 3, 9]] = torch.tensor([8.0, 2]), torch.tensor([3.0, 1]), torch.ones(3)
    counts = counts_of(first.long(), second.long(), unseen.long(), held_out=True)
    report = write_stage(tmp_path, build_token_map(counts.total(), size=2), counts)
    assert report["tokens"] == 10 + 2 * 4 and report["coverage"] == (8 + 2 * 3) / 18
    assert (report["held_out_tokens"], report["held_out_coverage"]) == (9, 2 / 3)
    assert [(one["spec"], one["weight"], one["held_out"], one["tokens"]) for one in report["corpora"]] == [
        ("c0", 1, False, 10), ("c1", 2, False, 4), ("c2", 3, True, 3),
    ]  # fmt: skip
    assert [one["coverage"] for one in report["corpora"]] == [0.8, 0.75, 2 / 3]
    assert report["corpora"][1]["tasks"] == [{"task": "math", "tokens": 4, "coverage": 0.75}]
    assert report["rows"][0]["by_corpus"] == {"c0": 0.8, "c1": 0.75}
    assert report["rows"][0]["held_out_coverage"] == 2 / 3


def test_all_files_of_a_map_are_read(tmp_path):
    """Maps of others are lists, ours are folders, and heads hold theirs."""
    token_map = TokenMap.from_ids([3, 5, 9], 20)
    save_freq_list(tmp_path / "freq.pt", token_map)
    save_token_map(tmp_path / "map" / "token_map.safetensors", token_map)
    save_tensors(tmp_path / "head" / "model.safetensors", {"d2t": token_map.d2t.int(), "fc.weight": torch.ones(2)})
    for name in ("freq.pt", "map", "map/token_map.safetensors", "head"):
        assert read_ids(tmp_path / name).tolist() == [3, 5, 9]
    torch.save([4, 4, 1], tmp_path / "raw.pt")
    assert read_ids(tmp_path / "raw.pt").tolist() == [4, 4, 1], "as they stand in the file"
    with pytest.raises(TokenMapError, match="does not exist"):
        read_ids(tmp_path / "none")
