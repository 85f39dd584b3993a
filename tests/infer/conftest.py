"""An engine that writes what a test tells it, in runs of the lengths that a test chooses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from toolkit.checkpoint.draft_dir import save_draft
from toolkit.infer.request import PromptTooLongError, Request, VerifyEvent
from toolkit.infer.sampling_params import SamplingParams


class ScriptedEngine:
    """The engine's interface without a model: `script(prompt_ids)` gives the output, `run` tokens a step."""

    def __init__(self, script: Callable[[Sequence[int]], Sequence[int]], run: int = 1, stop_id: int = 2) -> None:
        self.script = script
        self.run = run
        self.stop_id = stop_id
        self.max_context = 512
        self.max_batch = 4
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.aborted: list[Request] = []
        self.fail_next_step: Exception | None = None
        self.step_seconds = 0.0
        self.allow = threading.Event()
        self.allow.set()

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        speculative: bool = True,
        request_id: str | None = None,
    ) -> Request:
        if len(prompt_ids) >= self.max_context:
            raise PromptTooLongError(f"{len(prompt_ids)} tokens, {self.max_context} fit")
        request = Request(request_id or "r", list(prompt_ids), params, speculative)
        request.stop_set = frozenset([self.stop_id])
        request.token_limit = min(params.max_tokens, self.max_context - len(prompt_ids))
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        if request.finish_reason is None:
            request.finish_reason = "abort"
            self.aborted.append(request)
        self.waiting = [r for r in self.waiting if r is not request]
        self.running = [r for r in self.running if r is not request]

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[Request]:
        self.allow.wait(10)
        time.sleep(self.step_seconds)
        if self.fail_next_step is not None:
            error, self.fail_next_step = self.fail_next_step, None
            raise error
        while self.waiting and len(self.running) < self.max_batch:
            self.running.append(self.waiting.pop(0))
        touched = list(self.running)
        for request in touched:
            self._write(request)
        self.running = [request for request in self.running if request.finish_reason is None]
        return touched

    def _write(self, request: Request) -> None:
        done = len(request.output_ids)
        length = self.run if done else 1  # the first token is the prefill's
        ids = list(self.script(request.prompt_ids))[done : done + length]
        ids += [self.stop_id] * (length - len(ids))
        count = request.append_run(ids, length - 1)
        if done:
            cut = count < length
            request.events.append(VerifyEvent(4, 4, length - 1, count, cut, 0.0, 0.0, 0.0, len(self.running)))


@pytest.fixture(scope="session")
def scripted() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture(scope="session")
def tiny_draft_directory(tiny_target, tiny_draft, tiny_target_directory, tmp_path_factory):
    """The tiny draft on disk; it names the tiny target's directory as its target."""
    meta = {"target": {"name": str(tiny_target_directory), "revision": None}}
    directory = tmp_path_factory.mktemp("tiny-draft")
    return save_draft(directory, tiny_draft.head.state_dict(), tiny_draft.head.config, tiny_draft.token_map, meta)
