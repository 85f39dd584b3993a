"""EAGLE-2 and MTP heads: the drafter with its caches equals the head run over whole sequences, step by step."""

from __future__ import annotations

import pytest
import torch

from toolkit.infer.drafters import head_drafter
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams

HEADS = ["eagle2-two-layers", "mtp", "mtp-three-layers", "mtp-hidden-first"]
KEPT = [0, *range(5, 24)]


def sdpa(q, k, v):
    """Causal attention over one sequence, [T, heads, hd]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


class Dense:
    """The definition, as a trainer unrolls it: no caches, every layer over the whole sequence."""

    def __init__(self, target, draft, tokens: list[int]) -> None:
        self.target, self.head, self.tokens, self.ids = target, draft.head, tokens, draft.token_map.ids
        config = draft.head.config
        kept = {}
        hook = target.final_norm.register_forward_pre_hook(lambda _module, args: kept.update(before=args[0]))
        with torch.no_grad():
            after = target.body(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state
        hook.remove()
        before_norm = getattr(config, "target_hidden", "post_norm") == "pre_norm"
        self.features = (kept["before"] if before_norm else after)[0]

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
        return self.target.logits(self.head.read(layer, state[-1]))[self.ids].float().log_softmax(-1)


def engine_after_steps(target, draft, shape: str, steps: int) -> Engine:
    generator = torch.Generator().manual_seed(5)
    engine = Engine(target, draft, DraftShape.parse(shape), max_running_requests=4)
    for length in (6, 13, 3):
        prompt = torch.randint(1, target.vocab_size, (length,), generator=generator).tolist()
        engine.add_request(prompt, SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    return engine


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("steps", [5])
def test_chain_equals_the_whole_sequence(small_target, shared_draft, name, steps):
    """A wrong feature (before or after the norm), shift between MTP layers, or a stale key would change a draft."""
    draft = shared_draft(name, KEPT)
    engine = engine_after_steps(small_target, draft, "5,1,6", steps)
    with torch.inference_mode():
        tree = engine.drafter.propose(engine._running, engine._rounds.set_rows(engine._running)[0])
    for row, request in enumerate(engine._running):
        dense, path = Dense(small_target, draft, request.prompt_ids + request.output_ids), []
        with torch.no_grad():
            for _ in range(5):
                path.append(KEPT[int(dense.log_probs(path).argmax())])
        assert tree.tokens[row].tolist() == [request.output_ids[-1], *path]
    engine.close()


@pytest.mark.parametrize("name", HEADS)
def test_tree_equals_the_whole_sequence(small_target, shared_draft, monkeypatch, name):
    """Every candidate's score must be that of its own path, in every MTP layer's cache."""
    draft = shared_draft(name, KEPT)
    engine = engine_after_steps(small_target, draft, "4,3,31", 4)
    seen = {}
    inner = head_drafter.draft_beams

    def spy(*args):
        seen["candidates"] = inner(*args)
        return seen["candidates"]

    monkeypatch.setattr(head_drafter, "draft_beams", spy)
    with torch.inference_mode():
        engine.drafter.propose(engine._running, engine._rounds.set_rows(engine._running)[0])
    tokens, parents, _, scores = seen["candidates"]
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
                total += known[prefix][KEPT.index(token)].item()
            assert scores[row, candidate].item() == pytest.approx(total, abs=3e-4)
    engine.close()


@pytest.mark.parametrize("name", ["mtp-three-layers"])
def test_layers_that_draft_nothing_are_kept_warm(small_target, shared_draft, name):
    """A chain of 1 uses one MTP layer of three; when the shape grows, the others must know the whole text."""
    draft = shared_draft(name)
    engine = engine_after_steps(small_target, draft, "4,1,5", 2)
    for shape in ("1,1,2", "2,1,3", "1,1,2", "4,1,5"):
        engine.set_shape(DraftShape.parse(shape))
        engine.step()
    with torch.inference_mode():
        tree = engine.drafter.propose(engine._running, engine._rounds.set_rows(engine._running)[0])
    for row, request in enumerate(engine._running):
        dense, path = Dense(small_target, draft, request.prompt_ids + request.output_ids), []
        with torch.no_grad():
            for _ in range(4):
                path.append(int(dense.log_probs(path).argmax()))
        assert tree.tokens[row].tolist() == [request.output_ids[-1], *path]
    engine.close()
