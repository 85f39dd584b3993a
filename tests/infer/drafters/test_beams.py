"""Trees of the best candidates: masks are ancestor relations, and no child is kept without its parent."""

from __future__ import annotations

import pytest
import torch

from toolkit.infer.drafters.draft_rollout import rerank


def climb(parents: list[int], node: int) -> set[int]:
    """The node and its ancestors, by following parents."""
    path = {node}
    while parents[node] >= 0:
        node = parents[node]
        path.add(node)
    return path


def random_candidates(rows: int, k: int, steps: int, seed: int, ties: bool):
    """Candidates as EAGLE-2's expansion leaves them: parents are beams of the level above, scores never rise."""
    generator = torch.Generator().manual_seed(seed)
    tokens, parents, scores, levels = [], [], [], []
    beams, beam_scores, total = None, torch.zeros(rows, 1), 0
    for level in range(steps):
        width = beam_scores.shape[1]
        step = -torch.rand(rows, width, k, generator=generator)
        if ties:
            step = (step * 2).round()
        score = (beam_scores[:, :, None] + step).flatten(1)
        count = width * k
        tokens.append(torch.arange(total, total + count).expand(rows, count))
        parents.append(torch.full((rows, k), -1) if beams is None else beams.repeat_interleave(k, dim=1))
        scores.append(score)
        levels += [level + 1] * count
        beam_scores, chosen = score.topk(min(k, count), dim=1)
        beams = total + chosen
        total += count
    return (torch.cat(part, dim=1) for part in (tokens, parents, scores)), torch.tensor(levels)


@pytest.mark.parametrize(("k", "steps", "nodes", "ties"), [(4, 5, 60, True), (3, 1, 3, False), (1, 4, 5, False)])
def test_rerank_keeps_the_best_and_their_parents(k, steps, nodes, ties):
    """A child without its parent would be verified behind the wrong prefix; ties (p == 1) are where that happens."""
    for seed in range(10):
        (tokens, parents, scores), levels = random_candidates(2, k, steps, seed, ties)
        tree = rerank(torch.tensor([900, 901]), tokens, parents, levels, scores, [nodes, nodes], int(levels[-1]))
        for row in range(2):
            kept = tree.tokens[row].tolist()  # a candidate's token is its number
            above = tree.parents[row].tolist()
            assert kept[0] == 900 + row and above[0] == -1
            for node in range(1, len(kept)):
                assert above[node] < node
                wanted = parents[row, kept[node]].item()
                assert (kept[above[node]] if above[node] else -1) == wanted
                assert tree.depths[row, node] == tree.depths[row, above[node]] + 1
                assert set(tree.mask[row, node].nonzero().flatten().tolist()) == climb(above, node)
            best = scores[row].sort(descending=True).values[: nodes - 1].sum()
            assert torch.isclose(scores[row, kept[1:]].sum(), best)
            assert tree.valid[row].all() and tree.depths[row].max() <= tree.deepest and tree.nodes == nodes
