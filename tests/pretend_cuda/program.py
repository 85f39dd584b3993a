"""Runs a program of this folder and reads what it prints. In a process of its own: it patches torch, and torch and the
package keep tables by device, which a real GPU of the same process would find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def said_by(program: str, *given: str) -> dict[str, Any]:
    """The JSON object that `python -m tests.pretend_cuda.<program> <given>` prints."""
    pytest.importorskip("triton")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TRITON_INTERPRET": "0"}
    line = [sys.executable, "-m", f"tests.pretend_cuda.{program}", *given]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
