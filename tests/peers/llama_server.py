"""llama.cpp's `llama-server` and our engine on the same prompts, greedily: tokens, and drafts offered and accepted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from toolkit import LLM, SamplingParams

MAX_TOKENS = 48
# As exact as ours: float32 keys and values, no other layout of weights, no fused attention.
EXACT = "-t 1 --no-repack -fa off -ctk f32 -ctv f32 -ctkd f32 -ctvd f32 --no-warmup --fit off".split()


@contextmanager
def llama_server(path: Path, drafts: int, log: Path, slots: int, *more: str) -> Iterator[str]:
    """The address of a server with a slot for each prompt: a slot used twice keeps a hidden state of the first.

    more: the kind of draft, and its file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["-m", str(path), "--port", port, "-np", str(slots), "-c", str(slots * 256), *more]
    words += ["--spec-draft-n-max", str(drafts), "--spec-draft-p-min", "0"]
    with log.open("w") as said:
        process = subprocess.Popen([os.environ["TOOLKIT_LLAMA_SERVER"], *words, *EXACT], stdout=said, stderr=said)
    try:
        for _ in range(300):
            assert process.poll() is None, log.read_text(encoding="utf-8")
            try:
                urlopen(f"http://127.0.0.1:{port}/health")
                break
            except (URLError, ConnectionError):
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def llamas_answers(path: Path, prompts: list[list[int]], drafts: int, log: Path, *more: str) -> list[dict[str, Any]]:
    found = []
    with llama_server(path, drafts, log, len(prompts), *more) as address:
        for slot, prompt in enumerate(prompts):
            asked = {"prompt": prompt, "n_predict": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "id_slot": slot}
            asked |= {"return_tokens": True, "cache_prompt": False}
            body, kind = json.dumps(asked).encode(), {"Content-Type": "application/json"}
            with urlopen(Request(f"{address}/completion", body, kind)) as reply:
                said = json.load(reply)
            counts = said["timings"]
            found.append(
                {"output_ids": said["tokens"], "drafted": counts["draft_n"], "accepted": counts["draft_n_accepted"]}
            )
    return found


def our_answers(prompts: list[list[int]], drafts: int, **names: str) -> list[dict[str, Any]]:
    asked = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    found = []
    with LLM(**names, shape=f"{drafts},1,{drafts + 1}", dtype="float32", prefix_cache=False) as llm:
        for prompt in prompts:
            one = llm.generate([prompt], asked)[0]
            drafted = accepted = 0
            left = MAX_TOKENS - 1  # prefill gives the first token
            for event in one.events:
                offered = min(drafts, left - 1)  # llama.cpp drafts no more than it may still return
                drafted, accepted = drafted + offered, accepted + min(event.accepted, offered)
                left -= event.accepted + 1
            found.append({"output_ids": one.token_ids, "drafted": drafted, "accepted": accepted})
    return found
