"""Which of the launched processes log; progress lines and their estimates, by a fake clock."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.log import Progress, get_logger

REPOSITORY = Path(__file__).resolve().parents[1]
CODE = "from toolkit.log import get_logger; log = get_logger('x'); log.info('news'); log.warning('trouble')"


@pytest.mark.parametrize(
    ("variables", "messages"),
    [
        ({}, ["news", "trouble"]),
        ({"LOCAL_RANK": "0"}, ["news", "trouble"]),
        ({"LOCAL_RANK": "3"}, ["trouble"]),
        ({"LOCAL_RANK": "3", "TOOLKIT_LOG": "debug"}, ["news", "trouble"]),
    ],
)
def test_only_the_first_process_logs_info(variables: dict[str, str], messages: list[str]) -> None:
    """Otherwise eight GPUs would print every line eight times; warnings of all processes must be printed."""
    plain = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "TOOLKIT_LOG")}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env={**plain, **variables}, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert [line.split(": ")[-1] for line in done.stderr.splitlines()] == messages


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_estimate_waits_until_it_is_roughly_right() -> None:
    """The first of 100 units took 80 s of compiling: told at once, an estimate would be 2 hours for 100 s of work."""
    clock, told = Clock(), {}
    bar = Progress(100, "prompts", "prompt", stream=io.StringIO(), clock=clock)
    for done in range(1, 101):
        clock.now = 80.0 + (done - 1)
        bar.update()
        told[done] = bar.remaining_s()
    assert [done for done in told if told[done] is not None][0] == 81  # as long after the first unit as before it
    assert told[81] == pytest.approx(19.0)


def test_an_estimate_needs_a_share_of_the_work() -> None:
    """Three quick units of 200 say nothing of the others. An earlier session's units do not count as quick ones."""
    clock = Clock()
    bar = Progress(240, "answers", "answer", initial=40, stream=io.StringIO(), clock=clock)
    told = []
    for _ in range(12):
        clock.now += 2.0
        bar.update()
        told.append(bar.remaining_s())
    assert told[:10] == [None] * 10 and told[10] == pytest.approx(2.0 * 189)


def test_a_log_file_gets_few_whole_lines() -> None:
    """A CI log shows no carriage returns: bars glued together there are one unreadable line."""
    clock, stream = Clock(), io.StringIO()
    with Progress(3600, "train", "step", stream=stream, clock=clock) as bar:
        for _ in range(3600):
            clock.now += 1.0
            bar.update(1, "loss 2.5")
    lines = stream.getvalue().splitlines()
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()
    assert lines[0] == "train: 30/3,600 steps, 0:30 min, loss 2.5"
    assert lines[6] == "train: 210/3,600 steps, 3:30 min, 1.00 steps/s, about 56 min left, loss 2.5"
    assert lines[-1] == "train: 3,600/3,600 steps, 60:00 min, 1.00 steps/s, loss 2.5" and len(lines) < 70


def test_work_that_did_nothing_writes_no_line() -> None:
    """A stage that fails at once must not end in "0/0" between its error and the prompt."""
    stream = io.StringIO()
    with Progress(None, "measure", "answer", stream=stream):
        pass
    assert stream.getvalue() == ""


def test_a_terminal_gets_one_line_that_messages_do_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar redraws its own line; a message in between stands on a line of its own."""
    monkeypatch.setenv("TERM", "xterm")
    clock, stream = Clock(), Terminal()
    handler = logging.getLogger("toolkit").handlers[0] if get_logger("x") else None
    assert isinstance(handler, logging.StreamHandler)
    monkeypatch.setattr(handler, "stream", stream)
    with Progress(4, "prompts", "prompt", stream=stream, clock=clock) as bar:
        clock.now = 1.0
        bar.update(2)
        get_logger("x").warning("trouble")
        clock.now = 2.0
        bar.update()
    erased = "\r\x1b[K"
    states = stream.getvalue().split(erased)
    assert states[2].startswith("prompts [############............] 2/4 prompts")
    assert states[3] == "toolkit: trouble\n" and states[-1].endswith("\n") and "3/4" in states[-1]
