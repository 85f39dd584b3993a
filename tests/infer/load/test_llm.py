"""The engine from Python: `LLM(...).generate(...)`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from toolkit import LLM, SamplingParams
from toolkit.bench.near_tie import find_divergence, plain_logits
from toolkit.infer.load.llm import OfflinePromptError, read_offline_prompts
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import EngineError
from toolkit.infer.request.request import PromptTooLongError

REPOSITORY = Path(__file__).resolve().parents[3]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
EXAMPLE = re.compile(r"```python\n(from toolkit import LLM.*?)```", re.DOTALL)
TEXTS = ["the quick brown fox", "seven wizards count", "rivers, trains", "the weather in spring"]


@pytest.fixture(scope="module")
def llm(tiny_draft_directory):
    with LLM(draft=tiny_draft_directory, shape="3,2,6", max_running_requests=2) as opened:
        yield opened


def test_answers_are_the_targets_own_in_order(llm, tiny_target, reference):
    """Two rows for four prompts of other lengths: a mix-up of answers would go unseen by the caller."""
    ids = [tiny_target.tokenizer(text)["input_ids"] for text in TEXTS]
    settings = [SamplingParams(max_tokens=count) for count in (12, 3, 9, 5)]
    wanted = [reference(tiny_target, one, params.max_tokens) for one, params in zip(ids, settings, strict=True)]
    drafted, plain = llm.generate(TEXTS, settings), llm.generate(ids, settings, speculative=False)
    for done in (drafted, plain):
        assert [one.token_ids for one in done] == wanted and [one.prompt_ids for one in done] == ids
    assert {one.finish_reason for one in drafted} <= {"stop", "length"}
    assert drafted[0].events and all(0 <= one.first_token_s <= one.seconds for one in drafted)


def test_a_conversation_is_rendered_as_the_server_does(llm):
    """Another prompt than the chat template's would get another answer than the server gives."""
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Count apples"}]
    rendered = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCount apples<|im_end|>\n<|im_start|>assistant\n"
    )
    (done,) = llm.generate([messages], SamplingParams(max_tokens=4))
    assert done.prompt_ids == llm.tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert llm.generate(messages, SamplingParams(max_tokens=4))[0].token_ids == done.token_ids


def test_raw_text_goes_on_where_the_prompt_ends(llm):
    """prompt + answer must read as one text, the space between them included."""
    (done,) = llm.generate("the quick brown", SamplingParams(max_tokens=10, ignore_eos=True))
    whole = llm.tokenizer.decode(done.prompt_ids + done.token_ids, skip_special_tokens=True)
    assert "the quick brown" + done.text == whole


def test_a_stop_string_cuts_text_tokens_and_counts(llm):
    """What stands behind the stop string belongs to no answer, in no list."""
    params = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=1)
    (whole,) = llm.generate("apples and", params)
    stop = whole.text[3:5]
    (cut,) = llm.generate("apples and", SamplingParams(max_tokens=16, ignore_eos=True, logprobs=1, stop=stop))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert 0 < len(cut.token_ids) < 16 and cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.logprobs) == len(cut.from_draft) == len(cut.token_ids)
    assert 1 + sum(event.committed for event in cut.events) == len(cut.token_ids)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("more", [{}, {"disable_overlap_schedule": True}, {"torch_compile": True}])
def test_settings_of_a_gpu_leave_the_answers_alone(tiny_draft_directory, tiny_target, reference, more):
    """As a user opens it: a GPU's own share of memory, recorded rounds, one after the other, of compiled layers."""
    settings = {
        "device": "cuda",
        "dtype": "float32",
        "mem_fraction_static": 0.2,
        "cuda_graph_max_bs": 2,
        "max_running_requests": 2,
    }
    with LLM(draft=tiny_draft_directory, shape="3,2,6", **settings, **more) as opened:
        found = opened.generate(TEXTS, SamplingParams(max_tokens=24))
        assert opened.engine.has_graphs
    for one in found:

        def logits_after(ids, prompt=one.prompt_ids):
            return plain_logits(tiny_target, [*prompt, *ids])

        wanted = reference(tiny_target, one.prompt_ids, 24)
        parted = find_divergence(wanted, one.token_ids, logits_after, torch.float32)
        assert parted is None or parted.near_tie, parted


def test_one_prompt_that_does_not_fit_stops_all(llm):
    """Nothing runs before all prompts are checked, nothing stays in the engine, and the prompt is named."""
    with pytest.raises(PromptTooLongError) as caught:
        llm.generate([[5], [5] * 512])
    assert "prompt 1 of 2" in caught.value.__notes__[0]
    assert not llm.engine.has_work()
    with pytest.raises(EngineError, match="there are 2 prompts and 1 sampling settings"):
        llm.generate([[5], [6]], [SamplingParams()])


def test_each_prompt_may_have_a_draft_shape_of_its_own(llm):
    """Side by side, in all the forms; a shape that is dropped on the way would be that of the LLM, of 5 drafts."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    done = llm.generate(TEXTS, params, shape=["2,1,3", None, DraftShape(2, 2, 4), DraftShape.chain(1)])
    assert [{event.offered for event in one.events} for one in done] == [{2}, {5}, {3}, {1}]
    plain = llm.generate(TEXTS, params, speculative=False)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    with pytest.raises(ValueError, match="there are 4 prompts and 1 draft shapes"):
        llm.generate(TEXTS, params, shape=["1,1,2"])
    with pytest.raises(ValueError, match="2,1,3 and speculative is false"):
        llm.generate(TEXTS, params, shape="2,1,3", speculative=False)


def test_a_closed_llm_leaves_the_target_as_it_was(tiny_draft_directory):
    """Hooks that stay would make every later forward of the target slower, and keep the head alive."""
    with LLM(draft=tiny_draft_directory, shape=DraftShape.chain(2), context_length=64) as opened:
        assert opened.shape == DraftShape.chain(2) and opened.engine.context_length == 64
        opened.generate([5, 6, 7], SamplingParams(max_tokens=3))
    opened.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in opened.target.model.modules())
    with pytest.raises(EngineError, match="this LLM is closed"):
        opened.generate([5, 6, 7])


HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ({"role": "user"}, "prompts is {'role': 'user'} .dict.; a list of prompts"),
        ([HELLO, [5, 6]], "prompt 1 is no conversation as others are"),
        ([[5], [5, "6"]], "prompt 1 is .5, '6'. .list."),
        ([""], "prompt 0 is '' .*with one token or more"),
        (["a", "\ud83d"], "prompt 1 is not valid unicode"),
        ([HELLO, [{"role": "user"}]], "prompt 1: the field 'content' is missing"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "prompt 0: calls of tools are not supported"),
    ],
)
def test_what_is_no_prompt(tiny_target, prompts, says):
    """A text taken apart into letters, or a message without words, would be answered: wrongly."""
    with pytest.raises(OfflinePromptError, match=says):
        read_offline_prompts(prompts, tiny_target.tokenizer)


@pytest.mark.parametrize("code", [code for page in PAGES for code in EXAMPLE.findall(page.read_text("utf-8"))])
def test_the_examples_run(tiny_draft_directory, tmp_path, monkeypatch, code):
    """They are the first thing that somebody copies; only the draft directory's place is made up here."""
    (tmp_path / "runs" / "smollm2-135m").mkdir(parents=True)
    (tmp_path / "runs" / "smollm2-135m" / "ckpt").symlink_to(tiny_draft_directory)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {})
