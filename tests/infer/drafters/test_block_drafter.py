"""A block drafter in the engine: its blocks are those of the whole sequence, and no token changes by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.infer.conftest import DSPARK_HEADS, build_small_dspark, finished, propose
from tests.infer.drafters.conftest import (
    PROBE,
    ScriptedChoice,
    best_first,
    engine_after_steps,
    paths,
    proposed,
    ragged_prompts,
    settings,
)
from toolkit.heads.correction import plain_scores
from toolkit.infer.drafters import block_drafter, head_drafter
from toolkit.infer.drafters.adaptive import AdaptiveShape, Plan
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import DraftShapeError, SamplingParams
from toolkit.targets.features import AuxCapture


@pytest.fixture(params=list(DSPARK_HEADS))
def draft(small_target, request):
    return build_small_dspark(small_target, request.param)


def scores_of(target, draft, state: torch.Tensor, before: int) -> torch.Tensor:
    """The definition: logits [D] of a draft by its state [H], after the token `before`."""
    head = draft.head
    read = head.after(state[None], torch.tensor([before]), target.embed_tokens)
    if head.config.own_vocabulary:
        return head.logits(read)[0]
    return head.extended(plain_scores)(read, target.lm_head.weight)[0]


@pytest.mark.parametrize(
    ("shape", "options", "batch"),
    [("5,4,16", {}, 16), ("3,1,4", {"lookup": True}, 16), ("5,1,6", {"adaptive": True}, 1)],
)
def test_drafts_change_nothing(small_target, draft, plain, shape, options, batch):
    """fp32, exact, greedy and sampled rows; chains and trees shallower than a block and as deep, alone and beside
    lookup."""
    engine = Engine(small_target, draft, DraftShape.parse(shape), max_running_requests=batch, **options)
    some = slice(None) if batch > 1 else slice(0, 6)
    requests = [engine.add_request(p, s) for p, s in zip(ragged_prompts()[some], settings()[some], strict=True)]
    assert finished(engine, requests) == plain[some]
    # Untrained drafts of a few prompts may all be wrong.
    accepted = sum(event.accepted for request in requests for event in request.events)
    assert "adaptive" in options or batch == 1 or accepted > 0


def states_of_the_text(target, draft, tokens: list[int]) -> torch.Tensor:
    """The definition, without caches: the drafts of the block after `tokens`, [.., H], by dense attention over the
    text."""
    head, size = draft.head, draft.head.config.block_size
    head.read_target(target.embed_tokens)
    capture = AuxCapture(target, head.config.aux_layer_ids)
    with torch.no_grad():
        target.body(input_ids=torch.tensor([tokens]), use_cache=False)
        hidden = head.first_hidden(capture.take()[0, :-1])
        capture.remove()
        before, context = len(hidden), []
        head.write_context(hidden, torch.arange(before), before + size, lambda k, v: context.append((k, v)))
        layers = iter(context)

        def attend(q, k, v):
            keys, values = (torch.cat(pair).transpose(0, 1) for pair in zip(next(layers), (k, v), strict=True))
            dense = torch.nn.functional.scaled_dot_product_attention
            sees = torch.ones(size, before + size, dtype=torch.bool)
            sees = sees.tril(before) if head.config.causal else sees
            return dense(q.transpose(0, 1), keys, values, attn_mask=sees, enable_gqa=True).transpose(0, 1)

        root = target.embed_tokens(torch.tensor(tokens[-1:])).expand(size, -1)
        at = before + torch.arange(size)
        states = head(root, hidden[-1:].expand(size, -1), at, attend, before + size)
        return states[size - head.config.drafts_at_once :]


def tree_of_the_text(target, draft, tokens: list[int], steps: int, k: int, nodes: int) -> list[list[int]]:
    """The best-first tree after `tokens`, in any order: the tokens from the root to each node."""
    states = states_of_the_text(target, draft, tokens)

    def children(path: list[int]) -> list[tuple[float, int]]:
        best = scores_of(target, draft, states[len(path)], (tokens[-1:] + path)[-1]).log_softmax(-1).topk(k)
        return list(zip(best.values.tolist(), draft.token_map.ids[best.indices].tolist(), strict=True))

    return [tokens[-1:] + path for path in best_first(children, steps, nodes)]


def block_of_the_text(target, draft, tokens: list[int], steps: int) -> list[int]:
    """Greedy drafts after `tokens`, the last of them included."""
    return tree_of_the_text(target, draft, tokens, steps, 1, steps + 1)[-1]


def test_blocks_are_those_of_the_whole_sequence(small_target, draft):
    """A stale key (of an earlier block, say), a feature or a position of another token would change a draft."""
    engine = engine_after_steps(small_target, draft, "5,1,6", 5)
    tree = proposed(engine)
    for row, request in enumerate(engine._running):
        wanted = block_of_the_text(small_target, draft, request.prompt_ids + request.output_ids, 5)
        assert tree.tokens[row].tolist() == wanted
    engine.close()


@pytest.mark.parametrize("catch_up, drafted, probes", [(64, (0, 2, 3, 9), ()), (3, (2, 9), (1, 3, 12, 13))])
def test_after_a_pause_the_cache_is_whole(small_target, draft, monkeypatch, catch_up, drafted, probes):
    """Plain steps and probes leave positions unread, or read them late; a probe's block stands on a known position."""
    for module in (head_drafter, block_drafter):
        monkeypatch.setattr(module, "CATCH_UP", catch_up)
    most = DraftShape.chain(5)
    engine = Engine(small_target, draft, most, max_running_requests=4, adaptive=True)
    engine.drafter.chooser = chooser = ScriptedChoice(
        most if step in drafted else PROBE if step in probes else None for step in range(14)
    )
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    requests = []
    for step in range(14):
        if step in (0, 4, 5):
            requests.append(engine.add_request(ragged_prompts()[step], params))
        engine.step()
    together = propose(engine, engine.drafter.inner, requests)
    engine.close()
    for row, request in enumerate(requests):
        text = request.prompt_ids + request.output_ids
        assert paths(together, row)[-1] == block_of_the_text(small_target, draft, text, 5)
        for length, ranks in chooser.seen.get(request, []):
            right = block_of_the_text(small_target, draft, text[: length - 1], 1)[1] == text[length - 1]
            assert (ranks == [0]) == (right and ranks != []) and len(ranks) <= 1
    assert not probes or any(ranks for seen in chooser.seen.values() for _, ranks in seen)


@pytest.mark.parametrize("at_once", [512, 9])
def test_trees_have_the_correction_of_each_path(small_target, draft, monkeypatch, at_once):
    """With that of another node's token, siblings' children would be alike. Also of levels that are scored in parts."""
    monkeypatch.setattr(block_drafter, "LOGIT_ROWS", at_once)
    engine = engine_after_steps(small_target, draft, "64", 5)
    tree = proposed(engine)
    for row, request in enumerate(engine._running):
        assert paths(tree, row) == tree_of_the_text(
            small_target, draft, request.prompt_ids + request.output_ids, 5, 8, 64
        )
    engine.close()


def test_nothing_deeper_than_a_block(small_target, draft):
    """What was never trained would be drafted."""
    with pytest.raises(DraftShapeError, match=r"6 levels.*blocks of 5 tokens; give at most 5, such as 5,1,6"):
        Engine(small_target, draft, DraftShape.parse("6,1,7"))


def test_drawn_drafts(small_target):
    """Drafts drawn from the block's distributions, which have the bias of the token that was drawn before."""
    params = [SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.9, seed=i) for i in range(4)]
    draft = build_small_dspark(small_target)
    engine = Engine(small_target, draft, DraftShape.chain(5), max_running_requests=3, verify="block")
    together = engine.generate(ragged_prompts()[:4], params)
    alone = [engine.generate([p], s)[0].output_ids for p, s in zip(ragged_prompts()[:4], params, strict=True)]
    engine.close()
    assert [one.output_ids for one in together] == alone
    assert sum(event.accepted for one in together for event in one.events) > 0


@pytest.mark.parametrize("options", [{}, {"lookup": True}, {"verify": "rejection"}], ids=str)
def test_chains_end_by_confidence(small_target, plain, options):
    """Shorter chains, and none at all in some rounds; the tokens stay (those of seeds too, but under rejection)."""
    cut = replace(build_small_dspark(small_target), draft_confidence=0.45)  # between the chances of these weights
    engine = Engine(small_target, cut, DraftShape.chain(5), max_running_requests=16, **options)
    requests = [engine.add_request(p, s) for p, s in zip(ragged_prompts(), settings(), strict=True)]
    found = finished(engine, requests)
    offered = {event.offered for request in requests for event in request.events}
    assert len(offered) > 1 and min(offered) == 0
    kept = [i for i, one in enumerate(settings()) if "verify" not in options or one.temperature == 0]
    assert [found[i] for i in kept] == [plain[i] for i in kept]


def test_rounds_whose_chains_are_all_cut_are_the_heads(small_target, monkeypatch):
    """As plain rounds their time, the head's included, would make plain decoding seem slow."""
    recorded, shape = [], DraftShape.chain(4)
    monkeypatch.setattr(AdaptiveShape, "choose", lambda *_: Plan(shape, 5))
    monkeypatch.setattr(AdaptiveShape, "record", lambda _self, _requests, plan, *_: recorded.append(plan.shape))
    draft = replace(build_small_dspark(small_target), draft_confidence=1.0)
    engine = Engine(small_target, draft, shape, max_running_requests=1, adaptive=True)
    request = engine.add_request(ragged_prompts()[0], SamplingParams(max_tokens=6))
    finished(engine, [request])
    assert recorded and set(recorded) == {shape} and {event.offered for event in request.events} == {0}
