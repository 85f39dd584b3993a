"""Rollouts by vLLM's CPU server are those of the bundled engine: the same ids, float32, greedy.

Opt-in: TOOLKIT_VLLM_PYTHON names the interpreter of an environment with vLLM's CPU build. The target is tiny and
random.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from toolkit import cli

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        "TOOLKIT_VLLM_PYTHON" not in os.environ, reason="TOOLKIT_VLLM_PYTHON names no interpreter that has vLLM"
    ),
]


@pytest.fixture
def url(target: Path, tmp_path: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--port", port, "--dtype", "float32"]
    words += ["--served-model-name", "renamed", "--max-model-len", "256", "--enforce-eager", "--host", "127.0.0.1"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
    log = tmp_path / "log"
    with log.open("w") as said:
        process = subprocess.Popen(
            [os.environ["TOOLKIT_VLLM_PYTHON"], *words], stdout=said, stderr=said, env=environment
        )
    try:
        for _ in range(300):
            assert process.poll() is None, log.read_text(encoding="utf-8")[-3000:]
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                    break
            except httpx.TransportError:
                pass
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def test_the_same_rollouts(target: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one and two turns; answers that stop, and answers that are cut."""
    monkeypatch.chdir(tmp_path)
    turns = [[f"count {number} apples", "and the rivers?"][: 1 + number % 2] for number in range(16)]
    chats = [
        {"id": str(at), "messages": [{"role": "user", "content": turn} for turn in one]} for at, one in enumerate(turns)
    ]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    recipe = f"name: tiny\ntarget: {{model: {target}, dtype: float32}}\nprompts: {{sources: [prompts.jsonl]}}\n"
    Path("r.yaml").write_text(recipe + "rollouts: {max_tokens: 40}\n")
    common = ["rollouts", "--recipe", "r.yaml", "--prompts", "prompts.jsonl", "--out"]
    assert cli.main([*common, "engine.jsonl"]) == 0
    assert cli.main([*common, "vllm.jsonl", f"rollouts.server={url}"]) == 0
    found = []
    for name in ("engine.jsonl", "vllm.jsonl"):
        rows = map(json.loads, Path(name).read_text(encoding="utf-8").splitlines())
        found.append({row["id"]: (row["input_ids"], row["response_spans"], row["finish_reason"]) for row in rows})
        by = json.loads(Path(name).read_text(encoding="utf-8").splitlines()[0])["provenance"].get("server")
    assert found[0] == found[1] and len(found[0]) == 16
    assert by["model"] == "renamed" and by["engine"] == "vllm" and by["version"]
