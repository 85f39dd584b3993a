"""Trees of random form."""

from __future__ import annotations

import random

import torch

from toolkit.infer.kernels.tree_reference import ancestor_mask
from toolkit.infer.request.draft_tree import DraftTree, without_padding


def random_tree(rng: random.Random, rows: int, nodes: int, vocab: int) -> DraftTree:
    """Trees of random form; siblings differ. Some nodes, with those below them, are padding, in the middle too."""
    table: list[list] = [[], [], [], []]
    for _ in range(rows):
        parents, depths, tokens, valid = [-1], [0], [rng.randrange(vocab)], [True]
        for _ in range(nodes - 1):
            parent = rng.randrange(len(tokens))
            taken = {token for token, above in zip(tokens, parents, strict=True) if above == parent}
            parents.append(parent)
            depths.append(depths[parent] + 1)
            tokens.append(rng.choice([token for token in range(vocab) if token not in taken]))
            valid.append(valid[parent] and rng.random() < 0.9)
        order = sorted(range(nodes), key=lambda node: (depths[node], node))
        place = {node: at for at, node in enumerate(order)} | {-1: -1}
        table[0].append([tokens[node] for node in order])
        table[1].append([place[parents[node]] for node in order])
        table[2].append([depths[node] for node in order])
        table[3].append([valid[node] for node in order])
    tokens, parents, depths, valid = (torch.tensor(part) for part in table)
    deepest = int(depths.max())
    mask = without_padding(ancestor_mask(parents[:, 1:], deepest), valid)
    return DraftTree(tokens, parents, depths, mask, valid, deepest, is_chain=False)
