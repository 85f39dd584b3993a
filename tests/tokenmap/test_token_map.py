import pytest
import torch

from toolkit.tokenmap.token_map import TokenMap, TokenMapError


def test_offsets_lead_from_draft_to_target():
    """Every engine computes `target = draft + d2t[draft]`; absolute ids in d2t would draft wrong tokens."""
    token_map = TokenMap.from_ids([7, 2, 3], vocab_size=10)
    assert token_map.ids.tolist() == [2, 3, 7]
    assert token_map.d2t.tolist() == [2, 2, 5]
    assert token_map.t2d.nonzero().flatten().tolist() == [2, 3, 7]
    assert token_map.t2d.dtype == torch.bool and token_map.d2t.dtype == torch.int64


def test_both_directions_and_any_shape():
    """Training labels and served drafts use these two; -1 must mark a token that the draft vocabulary lacks."""
    token_map = TokenMap.from_ids([2, 3, 7], vocab_size=10)
    assert token_map.to_target(torch.tensor([[0, 2], [1, 1]])).tolist() == [[2, 7], [3, 3]]
    assert token_map.to_draft(torch.tensor([[2, 0], [7, 9]])).tolist() == [[0, -1], [2, -1]]


def test_a_duplicate_is_refused():
    """It lets top-k offer one token twice, and sampled verification would then count its probability twice."""
    with pytest.raises(TokenMapError, match="1 duplicate ids in a map of 3: 2"):
        TokenMap.from_ids([1, 2, 2], vocab_size=10)
