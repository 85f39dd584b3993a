import pytest
import torch

from toolkit.tokenmap.files import save_freq_list, save_token_map
from toolkit.tokenmap.repair import problems_of, read_ids, repaired
from toolkit.tokenmap.token_map import TokenMap, TokenMapError
from toolkit.weights import save_tensors

VOCAB = 20
# As the published FR-Spec builder writes it: ranked by frequency, then BOS (again) and EOS.
PUBLISHED = torch.tensor([9, 1, 4, 7, 1, 2])
COUNTS = torch.zeros(VOCAB, dtype=torch.int64)
COUNTS[[9, 1, 4, 7, 12]] = torch.tensor([50, 40, 30, 20, 25])


def test_each_problem_is_named():
    """Duplicates break sampling, an id out of range crashes an engine, and a missing end of turn costs every answer."""
    found = problems_of(torch.tensor([9, 1, 4, 1, 30, -2]), VOCAB, forced_ids=(4, 5))
    assert [one.split(":")[0].split(",")[0] for one in found] == [
        "1 duplicates",
        "ids are not ascending",
        "2 ids are outside the vocabulary [0",
        "1 special ids are missing",
    ]
    assert problems_of(torch.tensor([1, 4, 9]), VOCAB, forced_ids=(4,)) == []
    assert len(problems_of(torch.tensor([3, -1]))) == 2, "without a known vocabulary"


@pytest.mark.parametrize(
    "ids, counts, kept",
    [
        # 12 is the most frequent of the other ids and takes the duplicate's place.
        (PUBLISHED, COUNTS, [1, 2, 4, 7, 9, 12]),
        (PUBLISHED, None, [1, 2, 4, 7, 9]),
        # The special ids 0 and 2 replace the least frequent by their counts; without counts no id is given up.
        (torch.tensor([9, 1, 7, 4]), COUNTS, [0, 1, 2, 9]),
        (torch.tensor([9, 1, 7, 4]), None, [0, 1, 2, 4, 7, 9]),
    ],
)
def test_repaired_maps(ids, counts, kept):
    """The size stays where it can, and no id is given up for a rarer one."""
    forced = (2,) if ids is PUBLISHED else (0, 2)
    token_map = repaired(ids, VOCAB, forced, counts)
    assert token_map.ids.tolist() == kept
    assert problems_of(token_map.ids, VOCAB, forced) == []


def test_all_files_of_a_map_are_read(tmp_path):
    """Maps of others are lists, ours are folders, and heads hold theirs."""
    token_map = TokenMap.from_ids([3, 5, 9], VOCAB)
    save_freq_list(tmp_path / "freq.pt", token_map)
    save_token_map(tmp_path / "map" / "token_map.safetensors", token_map)
    save_tensors(tmp_path / "head" / "model.safetensors", {"d2t": token_map.d2t.int(), "fc.weight": torch.ones(2)})
    for name in ("freq.pt", "map", "map/token_map.safetensors", "head"):
        assert read_ids(tmp_path / name).tolist() == [3, 5, 9]
    torch.save([4, 4, 1], tmp_path / "raw.pt")
    assert read_ids(tmp_path / "raw.pt").tolist() == [4, 4, 1], "as they stand in the file"
    with pytest.raises(TokenMapError, match="does not exist"):
        read_ids(tmp_path / "none")
