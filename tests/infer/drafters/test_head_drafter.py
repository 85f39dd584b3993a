"""What the drafter computes with caches equals the head run over whole sequences without any, path by path."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.infer.conftest import places_of
from tests.infer.drafters.conftest import engine_after_steps, proposed
from toolkit.infer.drafters import head_drafter
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.targets.features import AuxCapture

HEADS = ["eagle3", "eagle2-two-layers", "mtp", "mtp-three-layers", "mtp-hidden-first"]
KEPT = [0, *range(5, 24)]


@pytest.fixture
def draft_of(small_draft, shared_draft):
    """draft_of(name): a head with a draft vocabulary of 20 of the 24 tokens."""
    return lambda name: small_draft if name == "eagle3" else shared_draft(name, KEPT)


def sdpa(q, k, v):
    """Causal attention over one sequence, [T, heads, hd]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


class Dense:
    """The definition, as a trainer unrolls it: no caches, every layer over the whole sequence; true features where
    committed, the head's own hidden states where drafted."""

    def __init__(self, target, draft, tokens: list[int]) -> None:
        self.target, self.head, self.tokens, self.ids = target, draft.head, tokens, draft.token_map.ids
        config, kept = draft.head.config, {}
        hook = target.final_norm.register_forward_pre_hook(lambda _module, args: kept.update(before=args[0]))
        capture = AuxCapture(target, config.aux_layer_ids) if config.own_vocabulary else None
        with torch.no_grad():
            after = target.body(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state
        hook.remove()
        before_norm = getattr(config, "target_hidden", "post_norm") == "pre_norm"
        self.features = (kept["before"] if before_norm else after)[0]  # feature i at position i
        if capture is not None:
            self.features = draft.head.first_hidden(capture.take()[0])
            capture.remove()

    def log_probs(self, path: list[int]) -> torch.Tensor:
        """Log-probabilities over the draft vocabulary after the committed tokens and the drafted `path`."""
        sequence, length = self.tokens + path, len(self.tokens) - 1
        hidden = state = self.features[:length]
        layer = 0
        for step in range(len(path) + 1):
            layer = min(step, self.head.config.mtp_layers - 1)
            if step and layer < step:  # recursion: the last output joins the inputs
                hidden = torch.cat((hidden, state[-1:]))
            elif step:  # the next layer reads what the one below left at the same positions
                hidden = state
            follow = torch.tensor(sequence[1 + layer :][: len(hidden)])
            positions = torch.arange(len(hidden))
            state = self.head(self.target.embed_tokens(follow), hidden, positions, sdpa, len(hidden), layer)
        last = state[-1]
        scores = self.head.logits(last) if self.head.config.own_vocabulary else self.target.logits(last)[self.ids]
        return scores.float().log_softmax(-1)

    def best(self, steps: int) -> list[int]:
        """The chain of the most probable tokens."""
        path: list[int] = []
        with torch.no_grad():
            for _ in range(steps):
                path.append(self.ids[int(self.log_probs(path).argmax())].item())
        return path


@pytest.mark.parametrize("name", HEADS)
def test_chain_equals_the_whole_sequence(small_target, draft_of, name):
    """A wrong feature (before or after the norm), shift between MTP layers, or a stale key would change a draft."""
    engine = engine_after_steps(small_target, draft_of(name), "5,1,6", 5)
    tree = proposed(engine)
    for row, request in enumerate(engine._running):
        dense = Dense(small_target, draft_of(name), request.prompt_ids + request.output_ids)
        assert tree.tokens[row].tolist() == [request.output_ids[-1], *dense.best(5)]
    engine.close()


@pytest.mark.parametrize(("name", "k", "levels"), [("eagle3", 4, 2), *((name, 3, 4) for name in HEADS)])
def test_tree_equals_the_whole_sequence(small_target, draft_of, monkeypatch, name, k, levels):
    """Beams are re-selected at every level; each candidate's score must be that of its true path, in every MTP layer's
    cache. A drafter whose keys don't follow the re-parented beams (SGLang's) gives other scores from level 3 on.
    """
    draft, seen, inner = draft_of(name), {}, head_drafter.draft_beams
    shape = f"{levels},{k},{1 + k + (levels - 1) * k * k}"  # every candidate is kept
    engine = engine_after_steps(small_target, draft, shape, 4)
    monkeypatch.setattr(head_drafter, "draft_beams", lambda *args: seen.setdefault("candidates", inner(*args)))
    proposed(engine)
    tokens, parents, scores = seen["candidates"]
    reparented = False
    for row, request in enumerate(engine._running):
        dense = Dense(small_target, draft, request.prompt_ids + request.output_ids)
        known: dict[tuple[int, ...], torch.Tensor] = {}
        for candidate in range(tokens.shape[1]):
            path, node = [], candidate
            while node >= 0:
                path.insert(0, tokens[row, node].item())
                node = parents[row, node].item()
            total = 0.0
            for depth, token in enumerate(path):
                prefix = tuple(path[:depth])
                if prefix not in known:
                    with torch.no_grad():
                        known[prefix] = dense.log_probs(list(prefix))
                total += known[prefix][dense.ids.tolist().index(token)].item()
            assert scores[row, candidate].item() == pytest.approx(total, abs=3e-4)
        beams = parents[row, k + k * k :: k][:k]  # level 2's beams, in order; beam j need not descend from beam j
        reparented |= ((beams - k) // k).tolist() != list(range(k))
    engine.close()
    assert levels < 3 or reparented, "beams kept their places, so this test shows nothing; choose another seed"


@pytest.mark.parametrize("shape", ["4,3,12", "4,2,3"])  # trees of fewer nodes than a path could have, too
def test_caches_after_many_rounds_equal_one_pass(small_target, small_draft, monkeypatch, shape):
    """The committed part of the draft cache must be what one pass over the whole sequence writes, whichever children
    the path went through."""
    paths, observe = [], head_drafter.HeadDrafter.observe

    def noting(drafter, requests, found):
        paths.extend(found.path_nodes)
        observe(drafter, requests, found)

    monkeypatch.setattr(head_drafter.HeadDrafter, "observe", noting)
    engine = engine_after_steps(small_target, small_draft, shape, 40)
    drafter = engine.drafter
    assert any(path != list(range(len(path))) for path in paths), "no second child was ever right"
    proposed(engine)
    for row, request in enumerate(engine._running):
        tokens = request.prompt_ids + request.output_ids
        kept = {}

        def keep(q, k, v, kept=kept):
            kept["keys"] = k
            return sdpa(q, k, v)

        features, count = Dense(small_target, small_draft, tokens).features[:-1], len(tokens) - 1
        with torch.no_grad():
            follow = small_target.embed_tokens(torch.tensor(tokens[1:]))
            small_draft.head(follow, features, torch.arange(count), keep, count)
        cache = drafter.reader.caches[0]
        places = places_of(cache.pool, count, row)[0]
        assert torch.allclose(cache.keys[0][places], kept["keys"], atol=1e-4)
    engine.close()


def test_layers_that_draft_nothing_are_kept_warm(small_target, shared_draft):
    """A chain of 1 uses one MTP layer of three; when the shape grows, the others must know the whole text."""
    draft = shared_draft("mtp-three-layers")
    engine = engine_after_steps(small_target, draft, "4,1,5", 2)
    for shape in ("1,1,2", "2,1,3", "1,1,2", "4,1,5"):
        engine.set_shape(DraftShape.parse(shape))
        engine.step()
    tree = proposed(engine)
    for row, request in enumerate(engine._running):
        dense = Dense(small_target, draft, request.prompt_ids + request.output_ids)
        assert tree.tokens[row].tolist() == [request.output_ids[-1], *dense.best(4)]
    engine.close()


def test_a_dropped_engine_leaves_no_hooks(small_target, small_draft):
    """Hooks that stay would keep hidden states of every later forward, training's included."""

    def hooks() -> int:
        return sum(len(module._forward_pre_hooks) for module in small_target.model.modules())

    gc.collect()
    before = hooks()
    engine = Engine(small_target, small_draft)
    assert hooks() == before + 3
    engine.generate([[3, 4]], SamplingParams(max_tokens=4))
    del engine
    gc.collect()
    assert hooks() == before
