"""The speculative engine: many requests, one target forward per step, exactly the target's own tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.draft_tree import DraftShape
from toolkit.infer.request import PromptTooLongError, Request
from toolkit.infer.sampling_params import SamplingParams
from toolkit.target.load import Target

__all__ = ["Engine", "PromptTooLongError"]


class Engine:
    """Owns the target's KV cache and the running requests. Not thread-safe: one thread steps it."""

    def __init__(
        self,
        target: Target,
        draft: DraftCheckpoint | None = None,
        shape: DraftShape | None = None,
        *,
        max_batch: int = 16,
        max_context: int | None = None,
    ) -> None:
        raise NotImplementedError

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        speculative: bool = True,
        request_id: str | None = None,
    ) -> Request:
        """Queue a prompt. Raises PromptTooLongError, or ValueError for an empty prompt or ids outside the vocabulary."""
        raise NotImplementedError

    def abort(self, request: Request) -> None:
        """End a request now; its finish_reason becomes "abort" and its cache row is free for the next step."""
        raise NotImplementedError

    def has_work(self) -> bool:
        raise NotImplementedError

    def set_shape(self, shape: DraftShape) -> None:
        """Draft with another shape from the next step on."""
        raise NotImplementedError

    def step(self) -> list[Request]:
        """One round. Returns the requests that got tokens or ended in it."""
        raise NotImplementedError

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_finish: Callable[[Request], None] | None = None,
        speculative: bool = True,
    ) -> list[Request]:
        """Run prompts to their ends; the answers come back in the prompts' order."""
        raise NotImplementedError
