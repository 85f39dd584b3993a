"""What operators see of a server: metrics, the status page, a log line, and statistics beside an answer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from types import SimpleNamespace

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from toolkit.infer.engine.engine import EngineLoad
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Answer, Request, VerifyEvent
from toolkit.infer.server.completions import Served
from toolkit.infer.server.metrics import PREFIX, Rates, ServerMetrics, line_of

FIELDS = {"model": "tiny", "messages": [{"role": "user", "content": "count apples"}], "temperature": 0}
IDLE = EngineLoad(0, 0, 0, 0, 512)


@pytest.fixture
def scene(scripted, tiny_target, running):
    """A server whose answers are 30 tokens long, in steps of two drafted tokens of four and a bonus."""
    tokenizer = tiny_target.tokenizer
    ids = (tokenizer("apples and pears " * 40, add_special_tokens=False)["input_ids"] * 8)[:400]
    engine = scripted(lambda _: ids, run=3, stop_id=tokenizer.eos_token_id)
    served = Served("tiny", tokenizer, engine, 512, "fp_x", "chain 4")
    with running(served) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)
        yield SimpleNamespace(
            url=url, engine=engine, ask=lambda **more: client.chat.completions.create(**FIELDS, **more)
        )


def metrics_of(url, **headers):
    """Values by name and label, without "toolkit_"."""
    answer = httpx.get(f"{url}/metrics", headers=headers)
    assert answer.status_code == 200
    return {
        (sample.name.removeprefix(PREFIX), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_an_answer_counts_while_it_is_written(scene):
    """Throughput of answers that take minutes must not appear in one jump at their end, and must not count twice."""
    scene.engine.step_seconds = 0.02
    stream = scene.ask(max_tokens=120, stream=True)
    chunks = iter(stream)
    for _ in range(8):
        next(chunks)
    while_running = metrics_of(scene.url)
    assert 0 < while_running["completion_tokens_total",] < 120
    assert while_running["requests_running",] == 1
    assert ("requests_total", "length") not in while_running
    assert list(chunks)[-1].choices[0].finish_reason == "length"
    time.sleep(0.05)
    values = metrics_of(scene.url)
    assert values["completion_tokens_total",] == 120 and values["requests_total", "length"] == 1
    assert values["committed_tokens_total",] == 119 - 119 % 3


def test_refusals_and_failures_are_counted(scene):
    """Load that is sent away, wrong requests and failing steps write no answer, and would be seen nowhere."""
    post = lambda **more: httpx.post(f"{scene.url}/v1/chat/completions", json={**FIELDS, **more}, timeout=20)  # noqa: E731
    assert post(max_tokens=4).status_code == 200
    assert [post(temprature=1).status_code, post(n=0).status_code, post(model="x").status_code] == [400, 400, 404]
    scene.engine.fail_next_step = RuntimeError("out of pages")
    assert post().status_code == 500
    values = metrics_of(scene.url)
    assert {status: values["http_requests_total", status] for status in ("200", "400", "404", "500")} == {
        "200": 1, "400": 2, "404": 1, "500": 1,
    }  # fmt: skip
    assert values["failed_steps_total",] == 1


def test_a_cut_answer_counts_to_its_end():
    """A stop string may end the text inside of a step: what the engine wrote after it counts nowhere."""
    metrics, answer = ServerMetrics(lambda: IDLE, lambda: 0), Answer(None)
    request = Request([1, 2], SamplingParams(max_tokens=20))
    metrics.follow(request, answer)
    for end, n_tokens in ((1, 1), (1, 4), (2, 5)):
        request.events[:] = [VerifyEvent(4, 4, 2, 3, False, 0.0, 0.0, 0.0, 1)] * end
        answer.n_tokens = n_tokens
        metrics.sample(0.0)
    metrics.record(request, answer, request.submitted_at + 1)
    totals = metrics.sample(1.0).totals
    assert totals["completion_tokens_total"] == 5
    assert totals["verify_steps_total"] == 1 and totals["committed_tokens_total"] == 3


def test_plain_steps_are_counted_beside_those_that_drafted():
    """Of ten steps one drafts: an accept_length of 3 is a tenth of the story. Idle seconds bring the speed down, and
    leave the accept length unknown."""
    metrics, answer = ServerMetrics(lambda: IDLE, lambda: 0), Answer(None)
    request = Request([1, 2], SamplingParams(max_tokens=20))
    assert metrics.latest == Rates()
    metrics.sample(0.0)
    metrics.follow(request, answer)
    request.events[:] = [VerifyEvent(4, 4, 2, 3, False, 0, 0, 0, 1), *9 * [VerifyEvent(0, 0, 0, 1, False, 0, 0, 0, 1)]]
    answer.n_tokens = 13
    totals = metrics.sample(1.0).totals
    assert [totals[f"{name}_total"] for name in ("decode_steps", "plain_steps", "decoded_tokens")] == [10, 9, 12]
    assert metrics.latest == pytest.approx((13, 13.0, 3, 0.5, 0.1, 1.2))
    assert "accept_length 3.00 in 10% of the steps, 1.20 tokens a step" in line_of(IDLE, metrics.latest)
    for second in range(2, 13):
        metrics.sample(float(second))
        metrics.sample(second + 0.1)  # takes its place: history has one entry a second
    assert metrics.latest.tokens == 0 and metrics.latest.accept_length is None
    history = metrics.status(13.0)["history"]
    assert len(history) <= 14 and sum(one["tokens"] for one in history) == 13 and history[-1]["ago_s"] == 0


def test_acceptance_of_one_request(scene):
    """On request only, with each answer, and in the last chunk of a streamed one."""
    body = {**FIELDS, "max_tokens": 11, "n": 2, "return_acceptance": True, "stream": True}
    reply = httpx.post(f"{scene.url}/v1/chat/completions", json=body, timeout=20)
    events = [json.loads(event) for event in re.findall(r"data: ({.*})", reply.text) if '"acceptance"' in event]
    choices = [event["choices"][0] for event in events]
    assert sorted(choice["index"] for choice in choices) == [0, 1]
    for choice in choices:
        acceptance = choice["acceptance"]
        # a token of the prefill, three whole steps of two drafts and a bonus, and one that the limit cut
        counts = [acceptance[name] for name in ("accept_length", "drafts", "verify_steps", "plain_steps")]
        assert counts == [3.0, 4, 3, 0] and acceptance["histogram"] == [0, 0, 3, 0, 0]
        assert (acceptance["accepted_tokens"], acceptance["draft_tokens"]) == (6, 12)
        assert set(acceptance["seconds"]) == {"queue", "prefill", "decode", "draft", "verify", "commit"}
        assert min(acceptance["seconds"].values()) >= 0
    whole = httpx.post(f"{scene.url}/v1/chat/completions", json={**body, "stream": False}, timeout=20).json()
    assert [choice["acceptance"]["histogram"] for choice in whole["choices"]] == [[0, 0, 3, 0, 0]] * 2
    without = httpx.post(f"{scene.url}/v1/chat/completions", json={**body, "return_acceptance": False}, timeout=20)
    assert "acceptance" not in without.text


def test_status(scene):
    """The page reads these figures; what it misses it would show as a blank."""
    before = httpx.get(f"{scene.url}/status").json()
    assert before["total"]["accept_length"] is None and before["now"]["tokens_per_s"] == 0 and not before["positions"]
    scene.ask(max_tokens=10)
    status = httpx.get(f"{scene.url}/status").json()
    assert status["model"] == "tiny" and status["shape"] == "chain 4"
    assert status["total"]["completion_tokens"] == 10 and status["total"]["requests"] == {"length": 1}
    assert status["total"]["accept_length"] == status["now"]["accept_length"] == 3
    assert status["positions"][1] == {"offered": 3, "accepted": 3}
    assert status["load"] == {
        "running": 0, "waiting": 0, "request_tokens": 0, "cached_tokens": 0, "capacity_tokens": 4 * 512,
        "refused_rows": 0, "eager_rounds": 0,
    }  # fmt: skip
    assert status["mean_seconds"]["time_to_first_token"] > 0 and status["history"][-1]["ago_s"] == 0


CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)


@pytest.mark.process
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_the_page_in_a_browser(scene, tmp_path):
    """A mistake in its script would leave all figures at a dash."""
    scene.ask(max_tokens=10)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=4000", "--dump-dom", scene.url], capture_output=True, text=True, timeout=60
    )
    assert re.search(r'id="accept-length">3\.00<', done.stdout), done.stdout[-3000:] + done.stderr[-2000:]
    assert ">live<" in done.stdout and "100 %" in done.stdout and "10 tokens written" in done.stdout
