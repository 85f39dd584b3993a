"""The accepted path of a tree, against following it by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from tests.infer.verify.conftest import random_tree
from toolkit.infer.drafters.draft_rollout import rerank
from toolkit.infer.kernels.tree_reference import Candidates, ancestor_mask
from toolkit.infer.request.draft_tree import DraftTree, chain_tree, without_padding
from toolkit.infer.verify.verifiers import follow, read_result


def by_hand(tokens: list[int], parents: list[int], choices: list[int], valid: list[bool]) -> list[int]:
    """The definition: step to the child that carries the target's choice until there is none."""
    path, drafted = [0], [node for node, real in enumerate(valid) if real and node]
    while True:
        child = [n for n in drafted if parents[n] == path[-1] and tokens[n] == choices[path[-1]]]
        if not child:
            return path
        path += child


def test_accepted_path_equals_following_children():
    """Random trees over a tiny vocabulary, where long paths are common. Padding that carries the choice is no draft."""
    chance = random.Random(0)
    deepest = 0
    for _ in range(300):
        tree = random_tree(chance, 3, 9, 12)
        choices = torch.tensor([[chance.choice(row) for _ in row] for row in tree.tokens.tolist()])
        result = read_result(follow(tree, choices))
        for row in range(3):
            path = by_hand(*(part[row].tolist() for part in (tree.tokens, tree.parents, choices, tree.valid)))
            assert result.accepted[row] == len(path) - 1
            assert result.path[row, : len(path)].tolist() == path
            assert result.tokens[row, : len(path)].tolist() == [choices[row, node] for node in path]
            assert result.path_nodes[row] == path
            assert result.path_tokens[row] == [choices[row, node] for node in path]
            deepest = max(deepest, len(path) - 1)
    assert deepest >= 3


def test_a_chain_is_followed_as_the_tree_that_it_is():
    """By its own way and by that of all trees: every field, of rows that keep fewer drafts too."""
    torch.manual_seed(0)
    accepted = set()
    for _ in range(100):
        roots, drafts, choices = (torch.randint(3, size) for size in ((4,), (4, 5), (4, 6)))
        tree = chain_tree(roots, drafts, [5, 0, 3, 5])
        chain, general = read_result(follow(tree, choices)), read_result(follow(replace(tree, is_chain=False), choices))
        for name, mine in vars(chain).items():
            wanted = getattr(general, name)
            assert torch.equal(mine, wanted) if isinstance(mine, torch.Tensor) else mine == wanted, name
        accepted |= {*chain.accepted}
    assert accepted >= {0, 1, 2, 3, 4}


def test_ranks_of_accepted_nodes():
    """Children are numbered in the drafter's order, whatever stands between them; padding is nobody's sibling.

    root 0 ── 1, 2, 3;  1 ── 4;  3 ── 5, 6
    """
    parents = torch.tensor([[0, 0, 0, 1, 3, 3]] * 2)
    tokens = torch.tensor([[9, 1, 2, 3, 4, 5, 6]] * 2)
    depths = torch.tensor([[0, 1, 1, 1, 2, 2, 2]] * 2)
    valid = torch.ones(2, 7, dtype=torch.bool)
    valid[1, 1] = valid[1, 4] = False
    tree = DraftTree(
        tokens=tokens,
        parents=torch.nn.functional.pad(parents, (1, 0), value=-1),
        depths=depths,
        mask=without_padding(ancestor_mask(parents, 2), valid),
        valid=valid,
        deepest=2,
        is_chain=False,
    )
    choices = torch.tensor([[3, 0, 0, 6, 0, 0, 8], [3, 0, 0, 7, 0, 0, 0]])
    result = read_result(follow(tree, choices))
    assert result.accepted == [2, 1]
    assert result.ranks == [[2, 1], [1]] and result.offered == [6, 4] and result.depth_offered == [2, 2]


def test_a_path_in_a_tree_of_fewer_nodes_than_levels():
    """The path then has a place for every node, not for every level."""
    tokens, parents = torch.tensor([[6, 7, 8, 9, 10, 11]]), torch.tensor([[-1, -1, 0, 0, 1, 1]])
    scores = torch.tensor([[-0.1, -0.2, -0.9, -3.0, -4.0, -5.0]])
    tree = rerank(torch.tensor([5]), Candidates(tokens, parents, scores), [3], 4)
    result = read_result(follow(tree, torch.tensor([[7, 1, 2]])))
    assert (result.path_nodes, result.path_tokens, result.ranks) == ([[0, 2]], [[7, 2]], [[1]])
