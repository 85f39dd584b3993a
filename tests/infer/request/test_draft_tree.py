"""Shapes that users type, and chains of which rows keep a part."""

from __future__ import annotations

import pytest
import torch

from toolkit.infer.drafters.choose_drafter import shape_for
from toolkit.infer.drafters.lookup import NgramLookup
from toolkit.infer.request.draft_tree import DraftShape, chain_tree, root_only
from toolkit.infer.request.params import DraftShapeError


def test_plain_rows_of_a_batch_keep_their_root_only():
    """Padding nodes are offered to nobody, see themselves only and are not valid."""
    tree = chain_tree(torch.tensor([5, 6]), torch.tensor([[1, 2], [3, 4]]), [2, 0])
    assert tree.tokens.tolist() == [[5, 1, 2], [6, 3, 4]] and tree.valid.sum(dim=1).tolist() == [3, 1]
    assert tree.valid.tolist() == [[True] * 3, [True, False, False]]
    assert tree.mask[0].tolist() == torch.ones(3, 3).tril().bool().tolist() and torch.equal(
        tree.mask[1], torch.eye(3).bool()
    )
    plain = root_only(torch.tensor([5, 6]))
    assert plain.nodes == 1 and plain.valid.all() and plain.parents.tolist() == [[-1], [-1]]


def test_shape_reads_what_it_writes():
    """`toolkit serve --shape` and the bench table use these."""
    assert DraftShape.parse("4,1,5") == DraftShape.chain(4) and DraftShape.chain(4).name == "chain 4"
    shape = DraftShape.parse(" 5, 4,16")
    assert (shape.name, shape.as_text(), shape.is_chain) == ("tree 5x4/16", "5,4,16", False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("4,x,5", "three numbers"),
        ("4²,1,5", "three numbers"),
        ("9" * 5000 + ",1,5", "three numbers"),
        ("2,2,8", "between 2 and 7"),
    ],
)
def test_impossible_shapes_are_refused(text, words):
    """Each error says what is possible."""
    with pytest.raises(DraftShapeError, match=words):
        DraftShape.parse(text)


def test_a_budget_is_a_tree_by_the_head_and_by_the_engine():
    """One number: of a head with a pass a level, of blocks, and of a request."""
    budget = DraftShape.parse("64")
    assert budget.as_text() == "64" and DraftShape.parse("4,4,16").for_head(5) == DraftShape(4, 4, 16)
    assert [budget.for_head(levels).as_text() for levels in (0, 15, 1)] == ["6,8,64", "15,8,64", "1,8,9"]
    # Best first, a level may have more nodes that have children than top_k.
    assert [DraftShape.parse("256").for_head(levels).as_text() for levels in (0, 4)] == ["8,8,256", "4,8,256"]
    assert budget.asked_of(DraftShape(15, 4, 100), True) == DraftShape(15, 4, 64)
    assert DraftShape.parse("5").asked_of(DraftShape.chain(6), True) == DraftShape.chain(4)
    with pytest.raises(DraftShapeError, match=r"a request has draft shape 64; the engine drafts chain 6 \(6,1,7\)"):
        budget.asked_of(DraftShape.chain(6), True)


def test_shapes_clipped_in_depth():
    """What a block of so many places can draft; a tree keeps no more nodes than its levels offer."""
    assert DraftShape.parse("4,2,9").up_to(1).as_text() == "1,2,3"


def test_what_a_budget_means_to_each_draft():
    """Lookup drafts chains; a tree has no more levels than nodes below its root."""
    small, wide = DraftShape.parse("3"), DraftShape.parse("64")
    assert shape_for(NgramLookup(), wide) == DraftShape.chain(63)
    assert small.for_head(15) == DraftShape(2, 8, 3) and wide.for_head(5) == DraftShape(5, 8, 64)
