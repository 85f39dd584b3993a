"""Forced acceptance: its mean, its path, and an engine that decodes with it."""

from __future__ import annotations

import pytest
import torch

from toolkit.infer.engine.engine import Engine
from toolkit.infer.graphs.recordings import Capture
from toolkit.infer.kernels.tree_reference import ancestor_mask
from toolkit.infer.request.draft_tree import DraftShape, DraftTree, chain_tree, root_only
from toolkit.infer.request.params import DraftShapeError, SamplingParams
from toolkit.infer.request.request import summarise
from toolkit.infer.verify.verifiers import ForcedAcceptance, follow, read_result


@pytest.mark.parametrize(
    ("text", "rates", "length"),
    [
        ("1", (), 1.0),
        ("2.5", (1.0, 0.5), 2.5),
        ("0.8,0.5,0", (0.8, 0.5, 0.0), 2.2),
    ],
)
def test_an_accept_length_is_rates_of_least_variance(text: str, rates: tuple[float, ...], length: float) -> None:
    forced = ForcedAcceptance.parse(text)
    assert (forced.rates, forced.accept_length) == (rates, length)


def test_a_shape_must_be_as_deep_as_the_rates() -> None:
    """A tree of 2 nodes has one level, whatever its num_steps."""
    ForcedAcceptance.parse("3.5").check_shapes([DraftShape.chain(3), DraftShape(3, 2, 4)])
    for shape in (DraftShape.chain(2), DraftShape(3, 2, 3)):
        with pytest.raises(DraftShapeError, match=r"3.5 needs drafts of depth 3.*at most accept_length 3"):
            ForcedAcceptance.parse("3.5").check_shapes([shape])


def test_the_mean_over_many_steps() -> None:
    """Coins of successive positions must be independent of each other: 3000 steps with rates .8 .5 accept 1.2 drafts,
    with a standard error below 0.015."""
    count = 3000
    roots = torch.arange(count) % 7
    tree = chain_tree(roots, torch.ones(count, 3, dtype=torch.long), [3] * count)
    rows = (roots, torch.arange(5, 5 + count))
    choices = torch.full((count, 4), 9)
    for text, share in (("0.8,0.5", [0.2, 0.4, 0.4]), ("2.25", [0.0, 0.75, 0.25])):
        decided = ForcedAcceptance.parse(text)(tree, choices, *rows)
        accepted = torch.tensor(read_result(follow(*decided)).accepted)
        for depth, wanted in enumerate(share):
            assert (accepted == depth).double().mean().item() == pytest.approx(wanted, abs=0.04)
        assert torch.equal(follow(*ForcedAcceptance.parse(text)(tree, choices, *rows)).accepted, accepted), "repeatable"


def test_the_deepest_path_is_accepted_and_the_target_writes_the_token_after_it() -> None:
    """The target's own choices would follow another path (row 0), go on after the forced end (row 1), or accept
    nothing. Row 2 has padding nodes, and its deepest path is one node long.

    root 0 -- 1 -- 3 -- 4
          '-- 2
    """
    tokens = torch.tensor([[5, 6, 7, 8, 9]] * 3)
    parents = torch.tensor([[-1, 0, 0, 1, 3]] * 3)
    depths = torch.tensor([[0, 1, 1, 2, 3]] * 3)
    valid = torch.tensor([[True] * 5, [True] * 5, [True, True, True, False, False]])
    tree = DraftTree(tokens, parents, depths, ancestor_mask(parents[:, 1:], 3), valid, 3, False)
    rows = (tokens[:, 0], torch.tensor([4, 4, 4]))
    choices = torch.tensor([[7, 30, 31, 32, 33], [6, 8, 31, 9, 33], [1, 2, 3, 4, 5]])
    decided = ForcedAcceptance.parse("3")(tree, choices, *rows)
    result = read_result(follow(*decided))
    assert result.path_nodes == [[0, 1, 3], [0, 1, 3], [0, 1]]
    assert result.path_tokens == [[6, 8, 32], [6, 8, 9], [6, 2]]
    assert (result.offered, result.depth_offered) == ([4, 4, 2], [3, 3, 1])
    assert tree.tokens.tolist() == [[5, 6, 7, 8, 9]] * 3, "the drafter reads the tree after it"
    none = ForcedAcceptance.parse("1")(tree, choices, *rows)
    assert read_result(follow(*none)).path_tokens == [[7], [6], [1]], "no draft, though the target chose drafts"
    root = torch.tensor([5])
    plain = ForcedAcceptance.parse("3")(root_only(root), torch.tensor([[11]]), root, root)
    assert read_result(follow(*plain)).path_tokens == [[11]]


@pytest.mark.parametrize(("recorded", "shape"), [(False, "4,3,12"), (True, "3,1,4")])
def test_an_engine_that_is_forced(tiny_target, tiny_draft, recorded: bool, shape: str) -> None:
    """A random head would accept nothing. Eager rounds and recorded ones accept the same, and plain rounds are left
    alone. Integrity of the caches is that of any other round."""

    def answers(forced: ForcedAcceptance | None, capture: Capture | None) -> list:
        engine = Engine(
            tiny_target, tiny_draft, DraftShape.parse(shape), max_running_requests=2, capture=capture, forced=forced,
            prefix_cache=False,
        )  # fmt: skip
        requests = [engine.add_request(ids, SamplingParams(max_tokens=40, ignore_eos=True)) for ids in ([5, 6], [7, 8])]
        while engine.has_work():
            engine.step()
            engine.check_integrity()
        engine.close()
        return requests

    graphs = (lambda run: run) if recorded else None
    assert summarise(event for one in answers(None, graphs) for event in one.events).accept_length < 2
    always = answers(ForcedAcceptance.parse("3"), graphs)
    assert {event.accepted for one in always for event in one.events} == {2}
    some = answers(ForcedAcceptance.parse("2.5"), graphs)
    assert {event.accepted for one in some for event in one.events} == {1, 2}
    if recorded:
        eager = answers(ForcedAcceptance.parse("2.5"), None)
        assert [one.output_ids for one in some] == [one.output_ids for one in eager]
    plain = Engine(tiny_target, forced=ForcedAcceptance.parse("3"))
    honest = Engine(tiny_target)
    params = SamplingParams(max_tokens=12)
    assert plain.generate([[5, 6]], params)[0].output_ids == honest.generate([[5, 6]], params)[0].output_ids
