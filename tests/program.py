"""Runs a program of the tests in a process of its own and reads what it prints. It chooses Triton's interpreter at
import, or it patches torch, which a real GPU of the same process would find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def lines_of(program: str, *given: str, interpreted: bool = False) -> list[dict[str, Any]]:
    """The JSON objects that `python -m tests.<program> <given>` prints. interpreted: on Triton's interpreter."""
    pytest.importorskip("triton")
    if interpreted and not interpreter_works():
        pytest.skip("this Triton's interpreter does not work with this numpy: take Triton 3.7 or numpy 2.3")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TRITON_INTERPRET": "1" if interpreted else "0"}
    line = [sys.executable, "-m", f"tests.{program}", *given]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def said_by(program: str, *given: str, interpreted: bool = False) -> dict[str, Any]:
    """The one JSON object that a program prints."""
    [found] = lines_of(program, *given, interpreted=interpreted)
    return found


def interpreter_works() -> bool:
    """Triton up to 3.6 turns one-element arrays into numbers in a way that numpy 2.4 took away."""
    triton = pytest.importorskip("triton")
    old, new = (tuple(map(int, module.__version__.split(".")[:2])) for module in (triton, numpy))
    return old > (3, 6) or new < (2, 4)
