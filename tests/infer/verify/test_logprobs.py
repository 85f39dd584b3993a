"""Log-probabilities of accepted tokens, and stop strings inside accepted runs."""

from __future__ import annotations

import pytest
import torch

from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams

PROMPTS = [[3, 4, 5], [8, 9, 10, 11, 12], [20]]


def check_against_hugging_face(target, request) -> None:
    """Every entry equals the log-softmax of one forward over prompt and answer, to 1e-4."""
    ids = torch.tensor([request.prompt_ids + request.output_ids])
    law = target.model(input_ids=ids).logits[0].log_softmax(dim=-1)[len(request.prompt_ids) - 1 :]
    assert [entry.token_id for entry in request.logprobs] == request.output_ids
    for place, entry in enumerate(request.logprobs):
        assert entry.logprob == pytest.approx(law[place, entry.token_id].item(), abs=1e-4)
        best = law[place].topk(request.params.logprobs)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [token for token, _ in entry.top] == best.indices.tolist()


@pytest.mark.parametrize("shape", [None, "4,1,5", "4,4,16"])
def test_logprobs_equal_a_hugging_face_forward(small_target, small_draft, shape, monkeypatch):
    """The entries are those of the accepted nodes, of the raw law (temperature and penalties do not show), and each
    row gets as many as it asked for; logits scored in parts must not shift them."""
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


@pytest.mark.parametrize("tree", [False, True])
def test_stop_string_inside_an_accepted_run(tiny_target, oracle, reference, tree):
    """Wherever in a run the string is complete, the answer, its log, its logprobs and its end are plain decoding's."""
    decode = tiny_target.tokenizer.decode
    tried = 0
    for prompt in ([30, 31, 32, 33, 34], [50, 60, 70], [100, 7, 9], [200, 201]):
        answer = reference(tiny_target, prompt, 40)
        for end in range(2, 20):
            text, before = decode(answer[:end]), decode(answer[: end - 1])
            stop = text[len(before) - 1 :]  # begins in the token before
            if "\ufffd" in text or len(text) <= len(before) or not before or text.find(stop) != len(before) - 1:
                continue
            tried += 1
            engine = Engine(tiny_target, max_running_requests=1)
            engine.shape = DraftShape.parse("4,1,5")  # the engine drafts; what, the oracle decides
            engine.drafter = oracle({tuple(prompt): answer}, tiny_target.vocab_size, right=1.0, tree=tree)
            engine._memory.slack = 16  # the oracle's trees have up to 13 nodes
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
