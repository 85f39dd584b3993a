"""The terminal chat, with a real engine on the tiny target."""

from __future__ import annotations

import argparse
import io
import re

import pytest

from toolkit.commands import chat
from toolkit.commands.chat import ChatSession
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.params import EngineError, SamplingParams


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def engine(tiny_target, tiny_draft):
    engine = Engine(tiny_target, tiny_draft, max_running_requests=1)
    yield engine
    engine.close()


@pytest.fixture
def conversation(engine, tiny_target):
    return ChatSession(engine, tiny_target.tokenizer, SamplingParams(max_tokens=24))


def ask(conversation, text, interrupted=lambda: False):
    shown = []
    _, answer = conversation.ask(text, lambda piece, drafted: shown.append(piece), interrupted)
    return answer, "".join(shown)


def test_second_turn_sees_the_first_and_reset_forgets(conversation):
    """What scrolls by is what the next turn is rendered with. A reset conversation must answer like a new one."""
    answer, first = ask(conversation, "hello")
    assert answer.n_tokens == 24 and answer.finish_reason == "length"
    assert conversation.messages[1:] == [{"role": "assistant", "content": first}]
    ask(conversation, "hello")
    assert len(conversation.messages) == 4
    conversation.reset()
    assert conversation.messages == [] and ask(conversation, "hello")[1] == first


def test_interrupt_stops_the_answer_only(conversation, engine):
    """Ctrl-C between steps: the engine is free again, the part that was shown stays in the conversation."""
    steps = iter([False, False, True])
    answer, _ = ask(conversation, "hello", lambda: next(steps))
    assert answer.finish_reason == "abort" and 0 < answer.n_tokens < 24
    assert not engine.has_work()
    assert ask(conversation, "again")[0].finish_reason in ("stop", "length")


def test_painter_marks_drafts_and_disarms_control_characters():
    """Only drafted pieces are coloured; a model must not be able to drive the terminal."""
    out = Terminal()
    painter = chat.Painter(out, chat.GREEN)
    for piece in [("own ", False), ("drafted", True), ("\x1b]0;title\x07", False)]:
        painter.write(*piece)
    painter.end()
    assert out.getvalue() == f"own {chat.GREEN}drafted{chat.END}\ufffd]0;title\ufffd\n"


def test_the_plain_speed_is_measured_outside_of_the_conversation(conversation, engine, monkeypatch):
    """A guessed plain speed would make any head look good; timing it must leave no trace in the conversation."""
    steps = []
    monkeypatch.setattr(engine, "step", lambda step=engine.step: steps.append(step()))
    assert conversation.plain_tokens_per_s() > 0
    assert not conversation.messages and not engine.has_work()
    all_steps = len(steps)
    monkeypatch.setattr(chat, "TIMED_SECONDS", 0.0)  # a large model: no more steps than are needed
    steps.clear()
    assert conversation.plain_tokens_per_s() > 0
    assert len(steps) < all_steps and not engine.has_work()


def test_a_line_that_cannot_be_answered_does_not_end_the_chat(capsys, monkeypatch):
    """A too long line is an error message, and the chat goes on; so it does after bytes that are no text."""
    asked = []

    def answer(text):
        asked.append(text)
        raise EngineError("too long")

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\xff\ntwo\n"), encoding="utf-8"))
    chat.talk(answer, lambda: None)
    assert asked == ["one\udcff", "two"] and capsys.readouterr().err.count("too long") == 2


def run(arguments):
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    return chat.run(parser.parse_args(arguments))


def test_one_shot_prints_the_answer_alone_on_stdout(tiny_draft_directory, capsys):
    """`toolkit chat --prompt` in a shell pipe: stdout is the answer, everything else is on stderr."""
    arguments = ["--draft", str(tiny_draft_directory), "--prompt", "hello", "--max-tokens", "12", "--device", "cpu"]
    assert run(arguments) == 0
    drafted = capsys.readouterr()
    assert "\x1b" not in drafted.out and drafted.out.endswith("\n")
    # A random head is soon known to be useless: then nothing is drafted, and there is no accept_length.
    assert re.search(
        r"\[12 tokens, \d+ of them drafted, \d+\.\d tokens/s, cut at the token limit, "
        r"accept_length (\d\.\d\d over \d+|- over 0) verify steps, adaptive up to chain 4 \(4,1,5\), temperature 0; "
        r"plain decoding about \d+\.\d tokens/s here\]",
        drafted.err,
    )
    assert "\x1b" not in drafted.err
    assert run([*arguments, "--shape", "4,1,5"]) == 0
    fixed = capsys.readouterr().err
    assert re.search(r"accept_length \d\.\d\d over [1-9]\d* verify steps, chain 4", fixed)
    assert re.search(r"; plain decoding about \d+\.\d tokens/s here", fixed)
    assert run([*arguments, "--no-draft"]) == 0
    plain = capsys.readouterr()
    assert plain.out == drafted.out and re.search(r"\[plain decoding, 12 tokens, \d+\.\d tokens/s, cut", plain.err)
