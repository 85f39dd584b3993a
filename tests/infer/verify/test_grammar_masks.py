"""Draft trees under grammars: what is cut, which logits are masked, and the distribution of what is written."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from tests.infer.verify.conftest import random_tree
from tests.infer.verify.test_verifiers_distribution import (
    RUNS,
    SETTINGS,
    VOCAB,
    Tables,
    all_rows_at_once,  # noqa: F401 (a fixture)
    cells,
    misfit,
    simulate,
)
from toolkit.infer.request.draft_tree import DraftTree, chain_tree, root_only
from toolkit.infer.verify.logits_processors import GrammarMasks
from toolkit.infer.verify.verifiers import BLOCK, REJECTION, TARGET

CPU = torch.device("cpu")


class ByToken:
    """A grammar in which the tokens that may follow depend on the token before; allowed [V + 1, V] bool."""

    failure = None

    def __init__(self, allowed: torch.Tensor) -> None:
        self.allowed = allowed.tolist()
        weights = 2 ** torch.arange(allowed.shape[1])
        self.mask_bytes = -(-allowed.shape[1] // 8)
        self.bytes = [int(number).to_bytes(self.mask_bytes, "little") for number in allowed.long() @ weights]

    def masks(self, output_ids, tokens, parents, nodes):
        found = [None] * len(tokens)
        found[0] = self.bytes[tokens[0]]
        for node in nodes[1:]:
            parent = parents[node]
            if found[parent] is not None and self.allowed[tokens[parent]][tokens[node]]:
                found[node] = self.bytes[tokens[node]]
        return found

    def after(self, output_ids, paths):
        whole = [[output_ids[-1], *path] for path in paths]
        inside = [all(self.allowed[a][b] for a, b in zip(one, one[1:], strict=False)) for one in whole]
        return [self.bytes[one[-1]] if fits else None for one, fits in zip(whole, inside, strict=True)]


def some_grammar(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    """Three quarters of the tokens may follow each token, never none."""
    allowed = torch.rand(vocab + 1, vocab, generator=torch.Generator().manual_seed(seed)) < 0.75
    allowed[:, 3] = True
    return allowed


def requests_of(grammars) -> list:
    return [SimpleNamespace(output_ids=[], grammar=grammar) for grammar in grammars]


def paths_of(tree: DraftTree, row: int) -> dict[tuple[int, ...], int]:
    """The tokens from the root to each valid node -> its number, by the tree's mask; depths and parents agree."""
    found = {}
    for node in range(tree.nodes):
        if not tree.valid[row, node]:
            assert tree.mask[row, node].nonzero().flatten().tolist() == [node], "padding attends to itself only"
            continue
        above = tree.mask[row, node].nonzero().flatten()
        assert above[-1] == node and tree.depths[row, above].tolist() == list(range(len(above)))
        assert tree.parents[row, above].tolist() == [-1, *above[:-1].tolist()]
        found[tuple(tree.tokens[row, above].tolist())] = node
    return found


@pytest.mark.parametrize("plain_row", [False, True])
def test_a_tree_keeps_the_paths_of_the_grammar_and_nothing_else(plain_row):
    """Every path in the grammar stays, in the order of its siblings; the branch below a cut node goes too.

    The trees get as narrow as their largest row. A row without a grammar keeps all it had.
    """
    rng = random.Random(0)
    cut = narrower = 0
    for seed in range(40):
        allowed = [some_grammar(seed * 3 + row, 20) for row in range(3)]
        grammars = [None if plain_row and row == 1 else ByToken(one) for row, one in enumerate(allowed)]
        tree = random_tree(rng, 3, 9, 20)
        small = GrammarMasks(requests_of(grammars), [0, 1, 2], 20, CPU).cut(tree)
        for row in range(3):
            every = paths_of(tree, row)
            inside = [
                path
                for path in every
                if grammars[row] is None or all(allowed[row][a, b] for a, b in zip(path, path[1:], strict=False))
            ]
            got = paths_of(small, row)
            assert sorted(inside, key=every.get) == sorted(got, key=got.get)
            cut += len(every) - len(inside)
        assert small.nodes == max(int(count) for count in small.valid.sum(dim=1)) or small is tree
        narrower += small.nodes < tree.nodes
    assert cut > 100 and (narrower > 5 or plain_row)


def test_masks_stand_at_their_nodes():
    """Each node's logits are masked by its own state, also where the logits come in parts, beside rows without any."""
    rng = random.Random(1)
    for seed in range(20):
        allowed = some_grammar(seed, 20)
        tree = random_tree(rng, 3, 8, 20)
        masks = GrammarMasks(requests_of([ByToken(allowed), None, ByToken(allowed)]), [0, 1, 2], 20, CPU)
        small = masks.cut(tree)
        logits = torch.randn(3, small.nodes, 20)
        got = logits.clone()
        for first, last in ((0, 1), (1, small.nodes)):
            part = got[:, first:last].clone()
            masks.apply(part, small, first)
            got[:, first:last] = part
        for row in (0, 2):
            for node in range(small.nodes):
                if small.valid[row, node]:
                    wanted = logits[row, node].masked_fill(~allowed[small.tokens[row, node]], -torch.inf)
                    assert torch.equal(got[row, node], wanted)
        assert torch.equal(got[1], logits[1])
        with pytest.raises(AssertionError, match="another tree"):
            masks.apply(logits.clone(), tree if small is not tree else root_only(tree.tokens[:, 0]), 0)


def test_chains_get_shorter_and_stay_chains():
    """A chain is cut at the first forbidden draft; the whole batch gets as short as the longest that is left."""
    allowed = torch.ones(VOCAB + 1, VOCAB, dtype=torch.bool)
    allowed[:, 7] = False
    roots, drafts = torch.tensor([1, 2, 3]), torch.tensor([[0, 7, 2, 2], [1, 2, 3, 4], [7, 1, 1, 1]])
    masks = GrammarMasks(requests_of([ByToken(allowed)] * 3), [0, 1, 2], VOCAB, CPU)
    small = masks.cut(chain_tree(roots, drafts, [4, 2, 4]))
    assert small.is_chain and small.nodes == 3 and small.deepest == 2
    assert small.valid.sum(dim=1).tolist() == [2, 3, 1] and small.tokens[1].tolist() == [2, 1, 2]
    none_left = masks.cut(chain_tree(roots, torch.full((3, 2), 7), [2, 2, 2]))
    assert none_left.nodes == 1 and none_left.deepest == 0


def misfit_under(verifier, params, runs: int, keep_q: bool = False) -> tuple[float, float]:
    """G of what is written against the exact distribution under the grammar, and its quantile at 1 - 1e-6."""
    tables, allowed = Tables(), some_grammar(0)
    masks = GrammarMasks(requests_of([ByToken(allowed)] * runs), range(runs), VOCAB, CPU)
    written, _ = simulate(verifier, params, tables, runs, masks=masks, keep_q=keep_q)
    masked = Tables()
    masked.target = tables.target.masked_fill(~allowed, -torch.inf)
    return misfit(cells(written), masked.joint(params) * runs)


@pytest.mark.parametrize("verifier", [TARGET, REJECTION, BLOCK], ids=lambda v: v.name)
@pytest.mark.parametrize(
    "params", [SETTINGS[0], pytest.param(SETTINGS[1], marks=pytest.mark.slow)], ids=["whole", "filtered"]
)
def test_distribution_is_the_masked_one(verifier, params):
    """All 512 continuations by G-test. The seeds are fixed; with fresh ones chance fails it once in 1e6 runs.

    A chain that ends where a draft was forbidden must not favour what the head did not draft.
    """
    g, limit = misfit_under(verifier, params, RUNS // 2)
    assert g < limit, f"G = {g:.1f}, limit {limit:.1f}"


@pytest.mark.parametrize(
    "verifier", [pytest.param(REJECTION, marks=pytest.mark.slow), BLOCK], ids=["rejection", "block"]
)
def test_the_head_s_own_distribution_would_be_wrong(verifier):
    """The test above is able to fail: a cut without its change of q is seen."""
    g, limit = misfit_under(verifier, SETTINGS[0], RUNS // 2, keep_q=True)
    assert g > limit
