"""Ids outside of the token map that a running request uses are drafted too; answers do not change."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.infer.conftest import build_small_dspark
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.infer.cache.cache_manager import MemorySettings
from toolkit.infer.drafters.dynamic_rows import DynamicRows
from toolkit.infer.drafters.ngram_drafter import NgramLookup
from toolkit.infer.engine.cpu_door import load_target, pack
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.config import ConfigError
from toolkit.infer.load.load_draft import fit_draft
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.targets.fixed_linear import linear_rows
from toolkit.targets.new_weights import copy_weights
from toolkit.tokenmap.token_map import TokenMap

KEPT = [0, 1, 2, 3, 4, 5, 6, 7]
PROMPTS = [[9, 12, 5, 20, 14], [3, 17, 2, 11], [22, 9, 9, 13, 1, 8]]


def head_of(name, target, shared_draft, kept=KEPT) -> DraftCheckpoint:
    """A shared head, or EAGLE-3 with the target's own rows as its output matrix."""
    if name == "dflash":
        return replace(build_small_dspark(target, name), token_map=TokenMap.from_ids(kept, 24))
    if name != "eagle3":
        return shared_draft(name, kept)
    torch.manual_seed(4)
    config = Eagle3Config.from_target_config(
        target.config, vocab_size=24, draft_vocab_size=len(kept), aux_layer_ids=(1, 2, 3)
    )
    head = Eagle3Head(config)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight[kept])
    return DraftCheckpoint(head=head.eval().requires_grad_(False), token_map=TokenMap.from_ids(kept, 24))


def rows_over(target, size, of_map=None) -> DynamicRows:
    """Dynamic rows beside the map KEPT, whose layer cannot be joined unless it is given."""
    return DynamicRows(target, TokenMap.from_ids(KEPT, 24), size, None, of_map or nn.Identity())


def test_the_latest_ids_have_rows(small_target):
    """Least recent ids lose theirs; all rows have different ids, and are those of the target's matrix."""
    rows = rows_over(small_target, 4)
    assert rows.to_target.tolist() == [*KEPT, 8, 9, 10, 11]
    rows.use([20, 3, 21, 20])  # 3 is in the map; 8 and 9 were the least recent
    assert rows.to_target.tolist() == [*KEPT, 21, 20, 10, 11]
    rows.use([11, 15, 16, 17])  # 10, then 21 and 20, which were used before 11
    assert sorted(rows.to_target[len(KEPT) :].tolist()) == [11, 15, 16, 17]
    rows.use(range(24))  # more than there are rows: the last ones
    assert sorted(rows.to_target[len(KEPT) :].tolist()) == [20, 21, 22, 23]
    states = torch.randn(3, 64)
    wanted = small_target.lm_head(states)[:, rows.to_target]
    torch.testing.assert_close(rows.logits(states, lambda states: small_target.lm_head(states)[:, KEPT]), wanted)
    rows = rows_over(small_target, 100)
    assert rows.to_target.tolist() == list(range(24)), "no more rows than the target has"


def test_a_repeated_id_takes_one_row(small_target):
    """Four ids have rows after a text that ends with one of them many times."""
    rows = rows_over(small_target, 4)
    rows.use([20, 21, 22, *[23] * 10])
    assert sorted(rows.to_target[len(KEPT) :].tolist()) == [20, 21, 22, 23]


def test_one_product_scores_map_and_block(small_target):
    """Beside a plain layer neither the layer nor a second product runs; new weights of the layer are seen."""
    with torch.inference_mode():  # as engines are built
        weight = small_target.lm_head.weight
        of_map = linear_rows(weight, None, torch.tensor(KEPT))
        rows = rows_over(small_target, 4, of_map)
        rows.use([20, 21])
    states = torch.randn(3, 64)
    wanted = states @ weight[rows.to_target].T
    torch.testing.assert_close(rows.logits(states, of_map=None), wanted)
    torch.testing.assert_close(of_map(states), wanted[:, : len(KEPT)])
    copy_weights(of_map, {"weight": weight[KEPT] + 1})
    changed = rows.logits(states, of_map=None)
    torch.testing.assert_close(changed[:, : len(KEPT)], states @ (weight[KEPT] + 1).T)
    torch.testing.assert_close(changed[:, len(KEPT) :], wanted[:, len(KEPT) :])


@pytest.mark.parametrize("name", ["eagle2", "mtp", "mtp-three-layers", "eagle3", "dflash"])
@pytest.mark.parametrize("shape", ["3,1,4", "3,3,8"])
def test_they_are_drafted_and_the_answers_stay(name, shape, small_target, shared_draft):
    """Drafts outside of the map are ids of the requests' own texts, and are accepted too."""
    draft = replace(head_of(name, small_target, shared_draft), dynamic_rows=6)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = Engine(small_target)
    expected = [one.output_ids for one in plain.generate(PROMPTS, params)]
    plain.close()
    engine = Engine(small_target, draft, DraftShape.parse(shape), max_running_requests=2)
    outside, propose = set(), engine.drafter.propose

    def watched(requests, rows):
        tree = propose(requests, rows)
        texts = {token for one in requests for token in one.prompt_ids + one.output_ids}
        drafted = set(tree.tokens[tree.valid].tolist()) - set(KEPT)
        outside.update(drafted)
        held = engine.drafter.to_target.tolist()
        assert drafted <= set(held) | texts and len(set(held)) == len(held) == len(KEPT) + 6
        return tree

    engine.drafter.propose = watched
    requests = engine.generate(PROMPTS, params)
    engine.close()
    assert [one.output_ids for one in requests] == expected
    assert outside, "ids outside of the map are drafted"


def test_what_the_head_cannot_score_stays_out(small_target, small_draft, shared_draft, caplog):
    """An output matrix of its own that is not the target's, and a map that keeps all ids; n-gram lookup has no rows."""
    for draft in (small_draft, shared_draft("mtp")):
        engine = Engine(small_target, replace(draft, dynamic_rows=4), DraftShape.chain(2))
        assert engine.drafter.to_target.tolist() == draft.token_map.ids.tolist()
        engine.close()
    with pytest.raises(ConfigError, match="n-gram lookup scores no tokens"):
        fit_draft(NgramLookup(), small_target, dynamic_rows=4)


def run_watched(target, draft, prompts, params, memory, **settings):
    """Engine and requests after a run, and the ids outside of the map that were drafted. In every round the rows of
    the block are the target's rows of its ids; the ids of a request that was just admitted are among them."""
    engine = Engine(target, draft, DraftShape(3, 3, 8), memory=memory, **settings)
    rows, outside = engine.drafter._head.dynamic, set()
    propose, admit = engine.drafter.propose, engine.drafter.admit

    def admitted(first_row, requests, tokens):
        whole = requests[0].unread <= tokens
        admit(first_row, requests, tokens)
        own = [token for token in requests[-1].context_ids if token not in KEPT]
        assert not whole or set(own[-3:]) <= set(rows.to_target.tolist())

    def watched(requests, state):
        ids = rows.to_target[len(KEPT) :]
        assert len(set(ids.tolist())) == len(ids) and torch.equal(rows.weight, target.lm_head.weight[ids])
        tree = propose(requests, state)
        outside.update(set(tree.tokens[tree.valid].tolist()) - set(KEPT))
        return tree

    engine.drafter.propose, engine.drafter.admit = watched, admitted
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    while engine.has_work():
        engine.step()
        engine.check_integrity()
    return engine, requests, outside


@pytest.mark.parametrize("name", ["eagle2", "mtp-three-layers", "eagle3"])
def test_preempted_requests_and_shared_prefixes(name, small_target, shared_draft):
    """A request that comes back, or whose prompt is not read again, has its latest ids in the block as any other."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randint(1, 24, (40,), generator=generator).tolist()
    prompts = [start + torch.randint(1, 24, (n,), generator=generator).tolist() for n in (3, 9, 5, 12)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    plain = Engine(small_target)
    expected = [one.output_ids for one in plain.generate(prompts, params)]
    plain.close()
    draft = replace(head_of(name, small_target, shared_draft), dynamic_rows=10)
    memory = MemorySettings(200, chunked_prefill_size=16, scattered_pages=True)
    sizes = {"max_running_requests": 4, "context_length": 128}
    engine, requests, outside = run_watched(small_target, draft, prompts, params, memory, **sizes)
    assert [one.output_ids for one in requests] == expected and outside
    assert any(one.preemptions for one in requests)
    again = engine.generate(prompts[:1], params)[0]
    assert again.output_ids == expected[0] and again.cached_tokens >= len(start) - 16
    engine.close()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["eagle2", "eagle3"])
def test_a_quantised_target(name, quantization, small_target, shared_draft, tmp_path, caplog, monkeypatch):
    """The block has the rows of the matrix that the target chooses by, which are not those before quantisation. That
    they are kept beside it costs memory, which is said."""
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    caplog.set_level(logging.INFO, logger="toolkit")
    small_target.model.save_pretrained(tmp_path)
    small_target.tokenizer.save_pretrained(tmp_path)
    target = load_target(tmp_path, quantization=quantization, dtype="float32")
    draft = replace(head_of(name, target, shared_draft), dynamic_rows=10)
    pack(target, draft, "int8")
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    expected = [one.output_ids for one in Engine(target).generate(PROMPTS, params)]
    engine, requests, outside = run_watched(target, draft, PROMPTS, params, MemorySettings())
    assert [one.output_ids for one in requests] == expected and outside
    assert "dynamic rows keep a copy of the output matrix, 0 MB" in caplog.text
    rows = engine.drafter._head.dynamic
    states = torch.randn(3, 64)
    wanted = target.lm_head(states)[:, rows.to_target[len(KEPT) :]]
    scores = rows.logits(states, lambda states: states)[:, states.shape[1] :]
    torch.testing.assert_close(scores, wanted, atol=1e-4, rtol=1e-4)
    engine.close()


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_the_distribution_of_sampled_tokens_stays(verify, small_target, shared_draft):
    """Drafts are drawn from q over map and block; the first two tokens follow the target's own distribution.

    Each of 24 shares lies within 5.5 standard errors: a false alarm has a probability of 1e-6, if they are normal."""
    draft = replace(head_of("mtp", small_target, shared_draft), dynamic_rows=5)
    engine = Engine(small_target, draft, DraftShape.chain(2), max_running_requests=16, verify=verify)
    prompt, count = PROMPTS[0], 3000
    requests = engine.generate(
        [prompt] * count,
        [SamplingParams(temperature=1.0, seed=seed, max_tokens=2, ignore_eos=True) for seed in range(count)],
    )
    engine.close()
    with torch.no_grad():
        first = small_target.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        top = int(first.argmax())
        second = small_target.model(torch.tensor([[*prompt, top]])).logits[0, -1].softmax(-1)
    started = [one.output_ids[1] for one in requests if one.output_ids[0] == top]
    assert len(started) > 300
    counts = torch.bincount(torch.tensor(started), minlength=24) / len(started)
    error = (second * (1 - second) / len(started)).sqrt()
    assert bool(((counts - second).abs() < 5.5 * error + 1e-9).all()), (counts, second)
