"""The clients that people use get from `toolkit serve` what they expect, and no request makes it fail.

Opt-in: TOOLKIT_CLIENTS_PYTHON names the interpreter of an environment with openai, langchain-openai and
schemathesis. TOOLKIT_PEERS_DRAFT may name a trained head; else head and target are tiny and random.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        "TOOLKIT_CLIENTS_PYTHON" not in os.environ, reason="TOOLKIT_CLIENTS_PYTHON names no interpreter with clients"
    ),
]


@pytest.fixture(scope="module")
def url(tiny_draft_directory: Path) -> Iterator[str]:
    """A server's address, with /v1."""
    draft = os.environ.get("TOOLKIT_PEERS_DRAFT", str(tiny_draft_directory))
    command = [sys.executable, "-m", "toolkit", "serve", "--draft", draft, "--port", "0", "--context-length", "512"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith("ready at"):
                break
        else:
            pytest.fail("the server did not start")
        yield line.split()[2]
        server.terminate()


def environment() -> dict[str, str]:
    """Without this project on the path, and without a way out for the clients' telemetry."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"LANGSMITH_TRACING": "false", "NO_PROXY": "127.0.0.1"}


def test_ordinary_calls(url: str) -> None:
    """Whole, streamed, with tools and their results; each client in its newest version."""
    model = httpx.get(f"{url}/models").json()["data"][0]["id"]
    script = str(Path(__file__).with_name("server_clients.py"))
    command = [os.environ["TOOLKIT_CLIENTS_PYTHON"], script, url, model]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600)
    passed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [one["client"] for one in passed] == ["openai", "langchain-openai"]


def test_no_request_makes_the_server_fail(url: str, tmp_path: Path) -> None:
    """Schemathesis makes requests from the OpenAPI document, right ones and wrong ones: no 5xx."""
    base = url.removesuffix("/v1")
    program = str(Path(os.environ["TOOLKIT_CLIENTS_PYTHON"]).with_name("schemathesis"))
    document = httpx.get(f"{base}/openapi.json").json()
    for schema in document["components"]["schemas"].values():  # a request for another model would only be a 404
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"const": httpx.get(f"{url}/models").json()["data"][0]["id"]}
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(document))
    command = [program, "run", str(path), "--url", base, "--checks", "not_a_server_error", "--seed", "1"]
    command += ["--phases", "examples,coverage,fuzzing", "-n", "40", "--request-timeout", "60"]
    command += ["--suppress-health-check", "all", "--no-color"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=1500, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-5000:]
    found = re.search(r"(\d+) generated", done.stdout)
    assert found is not None and int(found[1]) > 100, done.stdout[-2000:]
    print(found[0])
    assert httpx.get(f"{base}/health").status_code == 200
