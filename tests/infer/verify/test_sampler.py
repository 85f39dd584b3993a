"""The tokens of mixed batches, what an engine that follows the target's draws writes, and its log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch

from tests.infer.conftest import oracle_engine
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape, chain_tree
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request
from toolkit.infer.verify.sampler import Sampler, greedy, most_probable


def choose(params: list[SamplingParams], logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The sampler over nodes that stand alone, for requests without an answer yet."""
    requests = [Request([1], one) for one in params]
    nodes = torch.zeros_like(positions)
    tree = chain_tree(nodes[:, 0], nodes[:, 1:], [True] * len(params))
    return Sampler(requests, logits.shape[-1], torch.device("cpu"))(logits, positions, tree).tokens


def test_greedy_rows_beside_drawn_ones():
    """Rows keep their places, and temperature 0 takes the lowest id among equals."""
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(0)).round()
    params = [SamplingParams(), SamplingParams(temperature=1.0, seed=3), SamplingParams()]
    positions = torch.tensor([[4, 5], [4, 5], [6, 7]])
    mixed = choose(params, logits, positions)
    alone = choose(params[1:2], logits[1:2], positions[1:2])
    assert torch.equal(mixed[[0, 2]], greedy(logits[[0, 2]])) and torch.equal(mixed[1:2], alone)
    assert greedy(torch.zeros(1, 1, 9)).item() == 0


def test_the_most_probable_are_the_same_however_many_are_asked():
    """Among equal logits, of which bfloat16 has many, plain topk chooses by how many are asked: entries would then
    depend on the largest `logprobs` in the batch."""
    logits = torch.randn(2, 3, 3000, generator=torch.Generator().manual_seed(0)).mul(3).round()
    logits[0, 0, 7], logits[0, 1, ::2] = -math.inf, -0.0
    wanted = logits.add(0.0).sort(dim=-1, descending=True, stable=True).indices
    for count in (0, 3, 2999, 5000):
        found = most_probable(logits.bfloat16().float(), count)
        assert torch.equal(logits.gather(-1, found), logits.gather(-1, wanted[..., :count]))
        assert torch.equal(found[:, 2], wanted[:, 2, :count]) and torch.equal(
            found, most_probable(logits, 3000)[..., :count]
        )


PROMPTS = [[3, 4, 5], [8, 9, 10, 11, 12], [20]]


def check_against_hugging_face(target, request) -> None:
    """Every entry equals the log-softmax of one forward over prompt and answer, to 1e-4."""
    ids = torch.tensor([request.prompt_ids + request.output_ids])
    logprobs = target.model(input_ids=ids).logits[0].log_softmax(dim=-1)[len(request.prompt_ids) - 1 :]
    assert [entry.token_id for entry in request.logprobs] == request.output_ids
    for place, entry in enumerate(request.logprobs):
        assert entry.logprob == pytest.approx(logprobs[place, entry.token_id].item(), abs=1e-4)
        best = logprobs[place].topk(request.params.logprobs)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [token for token, _ in entry.top] == best.indices.tolist()


@pytest.mark.parametrize("shape", [None, "4,4,16"])
def test_logprobs_equal_a_hugging_face_forward(small_target, small_draft, shape, monkeypatch):
    """The entries are those of the accepted nodes, of the raw distribution (temperature and penalties do not show).
    Each row gets as many as it asked for; logits scored in parts must not shift them."""
    engine = Engine(small_target, small_draft, DraftShape.parse(shape or "1,1,2"), max_running_requests=3)
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=30, ignore_eos=True),
        SamplingParams(max_tokens=35, ignore_eos=True, logprobs=5, temperature=0.8, presence_penalty=1.0, seed=0),
    ]
    for rows in (512, 10):
        monkeypatch.setattr("toolkit.infer.verify.verifiers.LOGIT_ROWS", rows)
        got = engine.generate(PROMPTS, params, speculative=shape is not None)
        assert not got[1].logprobs
        with torch.inference_mode():
            for request in (got[0], got[2]):
                check_against_hugging_face(small_target, request)
    engine.close()


def test_stop_string_inside_an_accepted_run(tiny_target, reference):
    """Wherever in a run the string is complete, the answer, its log, its logprobs and its end are plain decoding's."""
    decode = tiny_target.tokenizer.decode
    tried = 0
    for prompt in ([30, 31, 32, 33, 34], [50, 60, 70]):
        answer = reference(tiny_target, prompt, 40)
        for end in range(2, 20):
            text, before = decode(answer[:end]), decode(answer[: end - 1])
            stop = text[len(before) - 1 :]  # begins in the token before
            if "\ufffd" in text or len(text) <= len(before) or not before or text.find(stop) != len(before) - 1:
                continue
            tried += 1
            engine = oracle_engine(tiny_target, {tuple(prompt): answer}, right=1.0, tree=True, max_running_requests=1)
            params = SamplingParams(max_tokens=40, stop=(stop, "never written"), logprobs=1)
            request = engine.generate([prompt], params)[0]
            assert request.output_ids == answer[:end]
            assert (request.finish_reason, request.stop_reason) == ("stop", stop)
            assert len(request.logprobs) == len(request.token_from_draft) == end
            assert 1 + sum(event.committed for event in request.events) == end
    assert tried > 3


def test_stop_strings_begin_behind_min_tokens(tiny_target, reference):
    """A stop string in the first min_tokens tokens does not end the answer, nor does one that begins there."""
    prompt = [30, 31, 32, 33, 34]
    answer = reference(tiny_target, prompt, 20)
    first = next(text for n in range(1, 6) if "\ufffd" not in (text := tiny_target.tokenizer.decode(answer[:n])))
    stopped = Engine(tiny_target).generate([prompt], SamplingParams(max_tokens=20, stop=first))[0]
    assert stopped.stop_reason == first and len(stopped.output_ids) <= 5
    later = Engine(tiny_target).generate([prompt], SamplingParams(max_tokens=20, stop=first, min_tokens=6))[0]
    assert later.output_ids == answer[: len(later.output_ids)] and len(later.output_ids) > 6
