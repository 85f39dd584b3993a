"""The tokens of a request that are new since the last look at it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from toolkit.infer.request.request import Request, TokenLogprob


@dataclass(frozen=True)
class Update:
    """Tokens of one request since the last update; `finish_reason` is set on the last update.

    stop_reason: the stop id or stop string that ended the request. logprobs: one per token if the request asked.
    """

    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def since(cls, request: Request, sent: int) -> Update:
        """The tokens after the first `sent` tokens of the answer."""
        return cls(
            tuple(request.output_ids[sent:]),
            tuple(request.token_from_draft[sent:]),
            request.finish_reason,
            request.stop_reason,
            tuple(request.logprobs[sent:]),
        )

    def singly(self) -> Iterator[Update]:
        """The same as updates of one token each; the last one has the end."""
        last = len(self.token_ids) - 1
        for at in range(last):
            one = slice(at, at + 1)
            yield Update(self.token_ids[one], self.from_draft[one], None, None, self.logprobs[one])
        yield replace(
            self,
            token_ids=self.token_ids[last:],
            from_draft=self.from_draft[last:],
            logprobs=self.logprobs[last:],
        )
