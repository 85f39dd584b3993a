"""Every drafter, as a chain and as a tree, alone and in ragged batches, writes exactly what plain decoding writes."""

from __future__ import annotations

import pytest

from tests.infer.conftest import finished
from tests.infer.drafters.conftest import LENGTHS, paths, proposed, ragged_prompts, settings
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import DraftShapeError, SamplingParams


@pytest.mark.parametrize(("shape", "batch"), [("1,1,2", 16), ("4,1,5", 1), ("4,3,12", 16)])
@pytest.mark.parametrize("name", ["eagle3", "eagle2-two-layers", "mtp-three-layers", "mtp-hidden-first", "ngram"])
def test_drafts_change_nothing(small_target, build, plain, name, shape, batch):
    """fp32, exact. On 24 tokens drafts are often right, so accepted paths, compaction and late rows run for real."""
    engine = Engine(small_target, build(name), DraftShape.parse(shape), max_running_requests=batch)
    some = slice(None) if batch > 1 else slice(0, 6)
    requests = [engine.add_request(p, s) for p, s in zip(ragged_prompts()[some], settings()[some], strict=True)]
    assert finished(engine, requests) == plain[some]
    assert sum(event.accepted for request in requests for event in request.events) > 0


@pytest.mark.parametrize("name", ["eagle3", "mtp-three-layers", "ngram"])
def test_requests_of_one_batch_have_shapes_of_their_own(small_target, build, plain, name):
    """Chain, tree and plain rows side by side: each is offered what it asked for, and all answers stay."""
    shapes = [None, DraftShape.chain(2), DraftShape(2, 2, 4), DraftShape.chain(5), DraftShape(5, 3, 12)]
    engine = Engine(small_target, build(name), DraftShape(5, 3, 12), max_running_requests=6)
    requests = []
    for i, (prompt, params) in enumerate(zip(ragged_prompts(), settings(), strict=True)):
        shape, drafted = shapes[i % 5], i % 7 != 6
        requests.append(engine.add_request(prompt, params, shape=shape if drafted else None, speculative=drafted))
    assert finished(engine, requests) == plain
    for i, request in enumerate(requests):
        shape = shapes[i % 5] or engine.shape
        drafted = request.speculative and (name != "mtp-three-layers" or LENGTHS[i] >= 3)
        most = (shape.num_draft_tokens - 1, shape.num_steps) if drafted else (0, 0)
        offered = {(event.offered, event.depth_offered) for event in request.events}
        if name == "ngram":
            assert all(one[0] <= most[0] and one[1] <= most[1] for one in offered)
        else:
            assert {one[0] for one in offered} == {most[0]} and all(one[1] <= most[1] for one in offered)
            assert not shape.is_chain or offered == {most}


def test_a_row_of_a_mixed_batch_gets_the_tree_it_would_get_alone(small_target, small_draft):
    """The batch is expanded once for its widest row; a narrow row must not profit or suffer from that."""
    shapes = [DraftShape(3, 2, 6), DraftShape.chain(4), DraftShape(4, 4, 20), DraftShape(2, 3, 5)]
    prompts = ragged_prompts()[:4]
    params = SamplingParams(max_tokens=50, ignore_eos=True)

    def drafted(engine: Engine, requests):
        for _ in range(3):
            engine.step()
        tree = proposed(engine)
        engine.close()
        return [request.output_ids for request in requests], [paths(tree, row) for row in range(len(requests))]

    mixed = Engine(small_target, small_draft, DraftShape(4, 4, 20))
    together = drafted(mixed, [mixed.add_request(p, params, shape=s) for p, s in zip(prompts, shapes, strict=True)])
    for row, (prompt, shape) in enumerate(zip(prompts, shapes, strict=True)):
        alone = Engine(small_target, small_draft, shape)
        tokens, of_row = drafted(alone, [alone.add_request(prompt, params)])
        assert tokens[0] == together[0][row], "another tree was accepted; the comparison below would be of other texts"
        assert of_row[0] == together[1][row]
        assert len(of_row[0]) == shape.num_draft_tokens


def test_a_shape_beyond_the_engines_is_refused(small_target, small_draft):
    """A request must not make the whole batch's expansion larger than was planned for."""
    engine = Engine(small_target, small_draft, DraftShape(3, 2, 6))
    with pytest.raises(DraftShapeError, match=r"engine drafts tree 3x2/6 \(3,2,6\)"):
        engine.add_request([3], SamplingParams(), shape=DraftShape.chain(4))
    engine.close()
