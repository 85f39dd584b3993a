"""Trees of the best candidates: masks are ancestor relations, no child is kept without its parent, and those of a block
are the ones that a heap grows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.infer.conftest import finished
from tests.infer.drafters.conftest import best_first, paths, ragged_prompts, settings
from toolkit.infer.drafters import draft_rollout
from toolkit.infer.drafters.draft_rollout import draft_beams, rerank
from toolkit.infer.engine.engine import Engine
from toolkit.infer.kernels.tree_reference import Candidates
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import DraftShapeError


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
    tokens, parents, scores = [], [], []
    beams, beam_scores, total = None, torch.zeros(rows, 1), 0
    for _ in range(steps):
        width = beam_scores.shape[1]
        step = -torch.rand(rows, width, k, generator=generator)
        if ties:
            step = (step * 2).round()
        score = (beam_scores[:, :, None] + step).flatten(1)
        count = width * k
        tokens.append(torch.arange(total, total + count).expand(rows, count))
        parents.append(torch.full((rows, k), -1) if beams is None else beams.repeat_interleave(k, dim=1))
        scores.append(score)
        beam_scores, chosen = score.topk(min(k, count), dim=1)
        beams = total + chosen
        total += count
    return Candidates(*(torch.cat(part, dim=1) for part in (tokens, parents, scores)))


@pytest.mark.parametrize(("k", "steps", "nodes", "ties"), [(4, 5, 60, True), (3, 1, 3, False), (1, 4, 5, False)])
def test_rerank_keeps_the_best_and_their_parents(k, steps, nodes, ties):
    """A child without its parent would be verified behind the wrong prefix; ties (p == 1) are where that happens."""
    for seed in range(10):
        found = random_candidates(2, k, steps, seed, ties)
        tree = rerank(torch.tensor([900, 901]), found, [nodes, nodes], steps)
        for row in range(2):
            kept = tree.tokens[row].tolist()  # a candidate's token is its number
            above = tree.parents[row].tolist()
            assert kept[0] == 900 + row and above[0] == -1
            for node in range(1, len(kept)):
                assert above[node] < node
                wanted = found.parents[row, kept[node]].item()
                assert (kept[above[node]] if above[node] else -1) == wanted
                assert tree.depths[row, node] == tree.depths[row, above[node]] + 1
                assert set(tree.mask[row, node].nonzero().flatten().tolist()) == climb(above, node)
            best = found.scores[row].sort(descending=True).values[: nodes - 1].sum()
            assert torch.isclose(found.scores[row, kept[1:]].sum(), best)
            assert tree.valid[row].all() and tree.depths[row].max() <= tree.deepest and tree.nodes == nodes


class TableRollout(SimpleNamespace):
    """A block whose scores are a table [B, levels, k, k] by the token before, or without it [B, levels, 1, k]."""

    best_first, within, nodes, level = True, None, 0, 0

    def at_roots(self):
        self.before = torch.zeros(len(self.table), 1, dtype=torch.long)

    def grow(self, states, tokens, parents, sees):
        self.level, self.before = self.level + 1, tokens

    def best(self, states, k):
        here = self.table[:, self.level]
        scores = here if here.shape[1] == 1 else here[torch.arange(len(here))[:, None], self.before]
        return scores, torch.arange(k).expand_as(scores)


@pytest.mark.parametrize(("k", "steps", "nodes"), [(4, 6, 40), (3, 9, 70), (8, 5, 256), (5, 3, 2), (6, 2, 7)])
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "fixed size"])
def test_a_block_has_the_tree_of_a_heap(monkeypatch, k, steps, nodes, cut):
    """Many ties, also between a node and its child, with and without the parent's token, and of a row with a shape of
    its own beside the batch's. Not cut: with as many beams as a recorded draft has."""
    ids = torch.arange(k)
    if not cut:
        monkeypatch.setattr(draft_rollout, "_in_reach", lambda beams, *_: beams)
    most, generator = DraftShape(steps, k, nodes), torch.Generator().manual_seed(steps)
    own = [most, DraftShape(2, k - 1, min(nodes, k + 2))]
    for parents in (k, 1):
        table = -(torch.rand(2, steps, parents, k, generator=generator) * 5).floor() / 4
        table = table.sort(dim=-1, descending=True).values
        if nodes == 7:  # the fifth and last node of a level has the only child
            table.fill_(-1.0)
            table[:, 0, :, :5], table[:, 1, 4:5, 0] = 0.0, 0.0
        found = draft_beams(TableRollout(table=table, tokens=table), most, own, ids)
        tree = rerank(torch.tensor([90, 91]), found, [one.num_draft_tokens for one in own], steps)
        for row, shape in enumerate(own):

            def children(path, of_row=table[row], width=shape.top_k, parents=parents):
                scores = of_row[len(path), path[-1] if path and parents > 1 else 0]
                return [(score, token) for token, score in enumerate(scores[:width].tolist())]

            wanted = best_first(children, shape.num_steps, shape.num_draft_tokens)
            assert paths(tree, row) == [[90 + row, *path] for path in wanted]


def test_trees_of_more_nodes_than_beams_offer_are_for_blocks(small_target, build):
    wide = DraftShape.parse("3,4,60")
    Engine(small_target, build("dspark"), wide).close()
    with pytest.raises(
        DraftShapeError, match="3,4,60: num_draft_tokens counts the root and must be at most 37 for this"
    ):
        Engine(small_target, build("eagle3"), wide)


@pytest.mark.parametrize("budget", [16, 64, 256])
@pytest.mark.parametrize("name", ["eagle3", "dspark", "dflash", "dspark-causal", "dspark-dfly"])
def test_trees_by_budget_change_nothing(small_target, build, plain, name, budget):
    """fp32, greedy and sampled rows; more nodes than any native path or part of logits takes, and a request with fewer
    of them than the engine."""
    engine = Engine(small_target, build(name), DraftShape.parse(str(budget)), max_running_requests=3)
    assert engine.shape == DraftShape((budget - 1).bit_length() if name == "eagle3" else 5, 8, budget)
    shapes = [DraftShape.parse("9"), *(None for _ in ragged_prompts()[1:6])]
    asked = zip(ragged_prompts()[:6], settings()[:6], shapes, strict=True)
    requests = [engine.add_request(p, s, shape=own) for p, s, own in asked]
    assert finished(engine, requests) == plain[:6]
    assert {event.offered for event in requests[0].events} == {8}
    assert {event.offered for event in requests[1].events} == {budget - 1}
    assert sum(event.accepted for request in requests for event in request.events) > 0
