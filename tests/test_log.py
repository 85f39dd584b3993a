"""Which of the launched processes log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
