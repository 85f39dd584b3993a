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


def test_a_log_file_gets_few_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CI log shows no carriage returns: bars glued together there are one unreadable line."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(3600, "train", "step", initial=600) as bar:
        for _ in range(3000):
            bar.update(1, "loss 2.5")
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()
    assert stream.getvalue().startswith("train: 3600/3600 steps, 00:00 min, ")
    assert stream.getvalue().rstrip().endswith("left, loss 2.5") and stream.getvalue().count("\n") == 2


def test_a_terminal_gets_one_line_that_messages_do_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar redraws its own line; a message in between stands on a line of its own."""
    stream = Terminal()
    handler = logging.getLogger("toolkit").handlers[0] if get_logger("x") else None
    assert isinstance(handler, logging.StreamHandler)
    monkeypatch.setattr(handler, "stream", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(4, "prompts", "prompt") as bar:
        bar.update(2)
        get_logger("x").warning("trouble")
        bar.update()
    lines = [line.split("\r")[-1] for line in stream.getvalue().splitlines()]
    assert "toolkit: trouble" in lines and "3/4" in lines[-1]
