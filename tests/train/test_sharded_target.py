"""Two processes that hold half of a target each see the states that the whole one has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.process
def test_two_halves_are_one_target(tiny_target_directory, tmp_path):
    """fp32, bf16 and a mixture of experts, to the bit. Weights that stay whole beside the parts, a layer that is not
    cut again after its forward, and a process with fewer texts to store that runs fewer forwards, would each show."""
    command = [sys.executable, str(Path(__file__).with_name("half_a_target.py")), str(tiny_target_directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen([*command, str(tmp_path), str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)
    for rank in range(2):
        answers = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert answers.pop("stored") and len(answers) == 3
        for name, found in answers.items():
            here, everywhere = found["bytes"]
            assert 2 * here == everywhere > 0 and found["bytes after"] == found["bytes"], name
            assert found["kept"] == 0 and found["read"] and all(found["equal"]), (name, found)
