import pytest

from toolkit.bench.acceptance import ONE_BY_ONE
from toolkit.bench.prompts import Prompt
from toolkit.bench.rows import ceiling_of
from toolkit.bench.side_by_side import (
    PERFECT,
    Mode,
    ResumeLog,
    Sampling,
    SideBySide,
    longest_prompt,
    run_side_by_side,
    with_context,
)
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape

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


def test_modes_are_interleaved_in_rotating_order(scripted, words):
    """Running the modes one after the other would compare different states of the machine."""
    modes, log = two_engines(scripted)
    run_side_by_side(modes, words, prompts(("p",), ("q",), ("r",)), SAMPLING, warmup=0)
    names = ["plain", CHAIN.name, TREE.name]
    assert log == names + names[1:] + names[:1] + names[2:] + names[:2]


def test_later_turns_follow_plain_decodings_answer_in_every_mode(scripted, words):
    """Histories of their own would give the modes different prompts after one near-tie, and no comparison."""
    script = lambda ids, shape: PLAIN_RUNS if shape is None else [[120], [121, 122]]  # noqa: E731
    modes, _ = two_engines(scripted, script)
    rounds = run_side_by_side(modes, words, prompts(("p", "q")), SAMPLING, warmup=0)
    asked = {(done.mode, done.answers[0].question.turn): text(done.answers[0].question.prompt_ids) for done in rounds}
    for mode in ("plain", CHAIN.name, TREE.name):
        assert asked[mode, 0] == "u:p|a:"
        assert asked[mode, 1] == "u:p|a:abc|u:q|a:"


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


@pytest.mark.parametrize("batch", [2])
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


def test_the_ceiling_stays_where_an_answer_parts(scripted, tiny_target):
    """In 16 bits plain decoding's answer may not be what the target writes beside drafts. Here it never is: plain
    decoding is a script that no model follows."""
    plain = scripted(lambda ids, shape: [[97 + place] for place in range(12)])
    with SideBySide(with_context(ONE_BY_ONE, 40, 12), tiny_target, 1) as engines:
        modes = [Mode(plain, None), engines.open_perfect(2)]
        rounds = run_side_by_side(modes, tiny_target.tokenizer, prompts(("p",), ("q",)), Sampling(12, 0.0, 0), warmup=0)
    assert ceiling_of(rounds, 2)["accept_length"] == 3.0
    assert all(len(answer.output_ids) == 12 for done in rounds for answer in done.answers)
    steps = [len(answer.events) for done in rounds if done.mode == PERFECT for answer in done.answers]
    assert steps == [4, 4], "no token of them is decoded plainly"


TALK = Prompt("1", "count", ("count apples and pears", "numbers and rivers", "spring"), "be short")


def test_a_conversation_fits(tiny_target):
    """Its last prompt has all earlier answers, in which a random model writes bytes that are read as other tokens."""
    with_room = longest_prompt(tiny_target, [TALK], 20)
    engine = Engine(tiny_target, context_length=with_room + 20)
    rounds = run_side_by_side([Mode(engine, None)], tiny_target.tokenizer, [TALK], Sampling(20, 1.5, 0))
    engine.close()
    asked = [len(answer.question.prompt_ids) for one in rounds for answer in one.answers]
    assert len(asked) == 3 and max(asked) <= with_room
    alone = Prompt("2", "count", TALK.turns[:1], TALK.system)
    assert longest_prompt(tiny_target, [alone], 20) == asked[0], "of a single turn exactly"
