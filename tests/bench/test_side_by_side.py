import time

import pytest
from jinja2 import TemplateError

from toolkit.bench.prompts import Prompt
from toolkit.bench.side_by_side import BenchError, Mode, ResumeLog, Sampling, rotated, run_side_by_side
from toolkit.data.chat_template import ChatTemplateError
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.request import PromptTooLongError

CHAIN, TREE = DraftShape.chain(2), DraftShape(2, 2, 4)
SAMPLING = Sampling(max_tokens=8, temperature=0.0, seed=0)
PLAIN_RUNS = [[97], [98], [99]]  # "abc", one token a step


def prompts(*turns):
    return [Prompt(str(place), "task", each) for place, each in enumerate(turns)]


def two_engines(scripted, script=lambda ids, shape: PLAIN_RUNS if shape is None else [[97], [98, 99]]):
    """A plain and a speculative engine that share one log of who ran when."""
    log: list[str] = []
    plain, speculative = scripted(script, log), scripted(script, log)
    modes = [Mode(plain, None), Mode(speculative, CHAIN), Mode(speculative, TREE)]
    return modes, log


def text(ids):
    return "".join(chr(i) for i in ids)


def test_order_rotates_from_prompt_to_prompt():
    """With a fixed order a machine that slows down would always slow the same mode."""
    assert [rotated("abc", place) for place in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_modes_are_interleaved_in_rotating_order(scripted, words):
    """Running the modes one after the other would compare different states of the machine."""
    modes, log = two_engines(scripted)
    run_side_by_side(modes, words, prompts(("p",), ("q",), ("r",)), SAMPLING, warmup=0)
    names = ["plain", CHAIN.name, TREE.name]
    assert log == names + names[1:] + names[:1] + names[2:] + names[:2]


def test_adaptive_drafting_chooses_for_itself(scripted, words):
    """Setting its shape before each prompt would make it forget what it has learned of the machine."""
    engine = scripted(lambda ids, shape: PLAIN_RUNS)
    mode = Mode(engine, TREE, adaptive=True)
    (done,) = run_side_by_side([mode], words, prompts(("p",)), SAMPLING, warmup=0)
    assert done.mode == "adaptive" and engine.shape is None and done.answers[0].output_ids == (97, 98, 99)


def test_warm_up_comes_first_and_is_not_in_the_result(scripted, words):
    """Caches that fill in the first run would count against the first mode."""
    modes, log = two_engines(scripted)
    rounds = run_side_by_side(modes, words, prompts(("p",)), SAMPLING, warmup=1)
    assert len(rounds) == 3 and log == ["plain", CHAIN.name, TREE.name] * 2


def test_later_turns_follow_plain_decodings_answer_in_every_mode(scripted, words):
    """Histories of their own would give the modes different prompts after one near-tie, and no comparison."""
    script = lambda ids, shape: PLAIN_RUNS if shape is None else [[120], [121, 122]]  # noqa: E731
    modes, _ = two_engines(scripted, script)
    rounds = run_side_by_side(modes, words, prompts(("p", "q")), SAMPLING, warmup=0)
    asked = {(done.mode, done.answers[0].question.turn): text(done.answers[0].question.prompt_ids) for done in rounds}
    for mode in ("plain", CHAIN.name, TREE.name):
        assert asked[mode, 0] == "u:p|a:"
        assert asked[mode, 1] == "u:p|a:abc|u:q|a:"


def test_every_turn_follows_the_system_message(scripted, words):
    """Left out, the prompts would not be those that the chats have."""
    modes, _ = two_engines(scripted)
    asked = [Prompt("0", "task", ("one", "two"), system="Be brief.")]
    rounds = run_side_by_side(modes, words, asked, SAMPLING)
    found = [text(answer.question.prompt_ids) for each in rounds for answer in each.answers]
    assert len(found) == 6 and all("Be brief." in one and one.index("Be brief.") < one.index("one") for one in found)


def test_a_batch_holds_prompts_of_different_numbers_of_turns(scripted, words):
    modes, _ = two_engines(scripted)
    seen = []
    rounds = run_side_by_side(
        modes, words, prompts(("p", "q"), ("r",), ("s",)), SAMPLING, batch=2, on_progress=lambda *at: seen.append(at)
    )
    groups = [
        [answer.question.prompt.question_id for answer in done.answers] for done in rounds if done.mode == "plain"
    ]
    assert groups == [["0", "1"], ["0"], ["2"]]
    assert seen[-1] == (12, 12)


def test_seeds_differ_by_question_and_not_by_mode(scripted, words):
    """One seed for all questions would draw the same numbers in all; one a mode would make tokens part."""
    modes, _ = two_engines(scripted)
    sampling = Sampling(max_tokens=8, temperature=0.8, seed=3)
    rounds = run_side_by_side(modes, words, prompts(("p", "q"), ("r",)), sampling, warmup=0)
    seeds: dict[tuple[str, int], set[int]] = {}
    for done in rounds:
        question = done.answers[0].question
        seeds.setdefault((question.prompt.question_id, question.turn), set()).add(question.params.seed)
    assert all(len(found) == 1 for found in seeds.values())
    assert len(set.union(*seeds.values())) == 3
    assert modes[0].engine.params[0].temperature == 0.8


def test_prefill_and_decode_are_timed_apart(scripted, words):
    """A long prompt would hide the gain of speculation. Sleeps: 40 ms before the first token, 3 x 10 ms after.

    Sleeping only ever takes longer, and the upper bounds are loose.
    """

    class Slow(scripted):
        def step(self):
            time.sleep(0.01 if self.running[0][0].output_ids else 0.04)
            return super().step()

    engine = Slow(lambda ids, shape: [[1], [2], [3], [4]])
    (done,) = run_side_by_side([Mode(engine, None)], words, prompts(("p",)), SAMPLING, warmup=0)
    assert done.decode_tokens == 3
    assert 0.04 <= done.prefill_s < 1.0 and 0.03 <= done.decode_s < 1.0


def test_a_prompt_that_is_too_long_is_named(words):
    class Full:
        def add_request(self, *_, **__):
            raise PromptTooLongError("the prompt has 900 tokens")

        def has_work(self):
            return False

    with pytest.raises(BenchError, match="prompt 0, turn 0: the prompt has 900 tokens"):
        run_side_by_side([Mode(Full(), None)], words, prompts(("p",)), SAMPLING, warmup=0)


def test_a_template_that_refuses_the_messages_is_a_clear_error(scripted, words, monkeypatch):
    """Some templates refuse roles or orders; that is the user's to know, not a traceback of Jinja's."""

    def refuse(*_, **__):
        raise TemplateError("only one turn")

    monkeypatch.setattr(words, "apply_chat_template", refuse)
    with pytest.raises(ChatTemplateError, match="only one turn"):
        run_side_by_side(two_engines(scripted)[0], words, prompts(("x",)), SAMPLING)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_killed_measurement_goes_on(scripted, words, tmp_path, batch):
    """Hours of decoding must not be lost; what is kept and what is decoded later are one result."""
    asked = prompts(("p", "q"), ("r",), ("s",), ("t", "u"))

    class Killed(scripted):
        def add_request(self, prompt_ids, params, *, speculative=True):
            if text(prompt_ids).startswith("u:s"):
                raise KeyboardInterrupt
            return super().add_request(prompt_ids, params, speculative=speculative)

    def script(ids, shape):
        return PLAIN_RUNS if shape is None else [[97], [98, 99]]

    def measure(modes, **more):
        seen = []
        rounds = run_side_by_side(
            modes, words, asked, SAMPLING, batch=batch, warmup=1, on_progress=lambda *at: seen.append(at), **more
        )
        return [(done.mode, done.answers) for done in rounds], seen

    whole, _ = measure(two_engines(scripted)[0])
    keep = ResumeLog(tmp_path / "rounds.jsonl", {"seed": 0})
    with pytest.raises(KeyboardInterrupt):
        measure([Mode(Killed(script), None), Mode(scripted(script), CHAIN), Mode(scripted(script), TREE)], keep=keep)
    with keep.path.open("a") as handle:
        handle.write('{"group": 2, "rou')  # the torn line of a SIGKILL
    modes, log = two_engines(scripted)
    found, seen = measure(modes, keep=keep)
    assert found == whole
    assert seen[0] == (9 + batch, 18) and seen[-1] == (18, 18)
    assert len(log) == 3 + 9, "warm-up, then the last two prompts alone"
    again, log = two_engines(scripted)
    assert measure(again, keep=keep)[0] == whole and not log, "nothing is left to decode, not even to warm up"
    other = ResumeLog(keep.path, {"seed": 1})
    assert other.read(asked, SAMPLING) == {} and not keep.path.exists(), "rounds of other settings must not be mixed in"
