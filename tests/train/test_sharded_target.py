"""A target that is sharded over two processes computes the states of an unsharded one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.process
def test_a_sharded_target_equals_the_unsharded_one(tiny_target_directory, tmp_path):
    """fp32, bf16 and a mixture of experts, bit by bit. Detects full weights that are not freed, a layer that is not
    resharded after its forward, and a process with fewer texts to store that runs fewer forwards."""
    command = [sys.executable, str(Path(__file__).with_name("sharded_target_process.py")), str(tiny_target_directory)]
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
            local, total = found["bytes"]
            assert 2 * local == total > 0 and found["bytes after"] == found["bytes"], name
            assert found["kept"] == 0 and found["read"] and all(found["equal"]), (name, found)
