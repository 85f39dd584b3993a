"""A request, the tokens that are new since the last look at it, and the log of its verify steps.

Every statistic of acceptance is computed from this log, by `summarise`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from toolkit.infer.request.detokenize import TextStream
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.grammar import GrammarState
from toolkit.infer.request.params import EngineError, SamplingParams

NOT_FINITE = "the target's logits are not finite (NaN or infinity)"  # why a request failed
FinishReason = Literal["stop", "length", "abort"]


class PromptTooLongError(EngineError):
    """The prompt leaves no room for an answer in the engine's context."""


class TokenLogprob(NamedTuple):
    """Log-probability of one token of an answer; top: (id, log-probability) of the most probable ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class VerifyEvent:
    """One verify step of one request.

    offered: drafted nodes in the tree (0: a plain decoding step). depth_offered: depth of the deepest one.
    accepted: accepted draft tokens. committed: appended tokens; accepted + 1 unless truncated.
    truncated: a stop id, a stop string or max_tokens cut the accepted tokens, so `committed < accepted + 1`.
    draft_s, verify_s, commit_s: seconds of the step's parts for the whole batch of `batch` requests.
    """

    offered: int
    depth_offered: int
    accepted: int
    committed: int
    truncated: bool
    draft_s: float
    verify_s: float
    commit_s: float
    batch: int


@dataclass(eq=False)
class Request:
    """One prompt and its state in the engine. Compared by identity."""

    # written by the caller, once
    prompt_ids: list[int]
    params: SamplingParams
    speculative: bool = True
    shape: DraftShape | None = None  # its draft shape, limited by the engine's; None: the engine's
    states_seed: bool = False  # True: the caller gave the seed; False: `seeded` added it
    forced_ids: Sequence[int] | None = None  # the answer to write, whatever the target chooses; eager rounds only
    verify: str | None = None  # the rule that accepts its drafts (see verifiers.py); None: the engine's
    priority: int = 0  # lower runs first; among equals the order of arrival decides
    arrival: int = 0
    submitted_at: float = field(default_factory=time.perf_counter)
    # written by the Engine only
    output_ids: list[int] = field(default_factory=list)
    token_from_draft: list[bool] = field(default_factory=list)  # True: an accepted draft token, False: the target's own
    events: list[VerifyEvent] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per output id if params.logprobs is set
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the prompt's tokens after the first
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or stop string that ended the answer; with "abort" the failure
    first_token_at: float | None = None
    finished_at: float | None = None
    stop_set: frozenset[int] = frozenset()
    token_limit: int = 0  # maximum number of output tokens: max_tokens, or less if the context ends first
    grammar: GrammarState | None = None  # what the answer must match
    text: TextStream | None = None  # text in which stop strings are searched; None without stop strings
    # written by the Engine and the Scheduler
    admitted_at: float | None = None  # when it first left the queue (perf_counter)
    n_read: int = 0  # during prefill: tokens of `context_ids` whose keys the row holds
    ready: bool = False  # prefill of `context_ids` is complete: the request can be drafted for
    cached_tokens: int = 0  # prompt tokens found in the prefix cache, so not read
    preemptions: int = 0  # times it lost its pages to requests before it in `order`

    @property
    def order(self) -> tuple[int, int]:
        """Its place in the queue; where memory runs out, the last ones of this order give way."""
        return self.priority, self.arrival

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def ends_with_next(self) -> bool:
        """True if the next round ends the request for certain: each round appends at least one token."""
        return len(self.output_ids) + 1 >= self.token_limit

    @property
    def length(self) -> int:
        """Number of tokens in the sequence so far, prompt included."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def context_ids(self) -> list[int]:
        """The tokens whose keys must be in the cache before the next round: all but the newest output token."""
        return self.prompt_ids + self.output_ids[:-1]

    @property
    def unread(self) -> int:
        return len(self.prompt_ids) + max(0, len(self.output_ids) - 1) - self.n_read

    @property
    def failed(self) -> bool:
        """Whether it ended by a failure of its own, which `stop_reason` names."""
        return self.finish_reason == "abort" and self.stop_reason is not None

    def fail(self, reason: str) -> None:
        """End it by a failure of its own."""
        self.finish_reason, self.stop_reason, self.finished_at = "abort", reason, time.perf_counter()
        self.first_token_at = self.first_token_at or self.finished_at

    def append_run(self, tokens: Sequence[int], accepted: int) -> int:
        """Append `accepted` draft tokens and then the bonus token, up to the first stop or the token limit.

        If the grammar has failed, append nothing and end the request with finish_reason "abort".
        Returns the number of appended tokens; sets `finish_reason` and `finished_at` if the answer ends.
        """
        now = time.perf_counter()
        if self.grammar is not None and self.grammar.failure is not None:
            self.fail(self.grammar.failure)
            return 0
        if self.first_token_at is None:
            self.first_token_at = now
        for count, token in enumerate(tokens, start=1):
            self.output_ids.append(token)
            self.token_from_draft.append(count <= accepted)
            self.stop_reason = self._stop_at(token)
            if self.stop_reason is not None:
                self.finish_reason = "stop"
            elif len(self.output_ids) >= self.token_limit:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                self.finished_at = now
                return count
        return len(tokens)

    def _stop_at(self, token: int) -> int | str | None:
        """Return the stop id or the stop string that ends the answer with this token, or None."""
        if token in self.stop_set:
            return token
        if self.text is None:
            return None
        self.text.push(token)
        return self.text.hit


def checked_prompt(prompt_ids: Sequence[int], vocab_size: int, context_length: int) -> list[int]:
    """Return the prompt as a list of ints. Raises EngineError for bad ids or no ids, PromptTooLongError."""
    prompt = [int(token) for token in prompt_ids]
    if not prompt:
        raise EngineError("the prompt has no tokens; at least one is needed")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise EngineError(
            f"the prompt has ids from {min(prompt)} to {max(prompt)}; the target's vocabulary is 0..{vocab_size - 1}: "
            "tokenise with the target's own tokenizer"
        )
    if len(prompt) >= context_length:
        raise PromptTooLongError(
            f"the prompt has {len(prompt)} tokens; the context holds {context_length}, the answer included: "
            f"shorten the prompt to at most {context_length - 1} tokens"
        )
    return prompt


def one_for_each(given: Any, kind: Any, count: int, what: str) -> list[Any]:
    """Return one item per prompt: `given` repeated `count` times if it is a single `kind`, else its items.

    Raises EngineError if the number of items differs from `count`."""
    items = [given] * count if isinstance(given, kind) else list(given)
    if len(items) != count:
        raise EngineError(f"there are {count} prompts and {len(items)} {what}; give one, or one for each")
    return items


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


class Answer:
    """One request's answer as text, counted exactly up to its end. `finish_reason` is None until it ends.

    The engine ends the answer at the token that completes a stop string, also among accepted drafts; the text is cut
    before the stop string. The text of a raw completion includes the space between prompt and answer, so a stop string
    may be complete one token earlier here than in the engine. Later tokens count neither as text nor as tokens.
    """

    def __init__(self, text: TextStream) -> None:
        self._text = text
        self.n_tokens = 0
        self.n_from_draft = 0
        self._logprobs: list[TokenLogprob] = []  # of the tokens since the last take_logprobs()
        self.finish_reason: str | None = None

    def feed(self, update: Update) -> str:
        """Add an update. Returns the new text that can be shown."""
        return "".join(text for text, _ in self.feed_pieces(update))

    def take_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the tokens since the last call; empty if the request did not ask for them."""
        taken, self._logprobs = self._logprobs, []
        return taken

    def drop(self) -> None:
        """Forget the answer, which was asked for with no tokens; it ended by its limit."""
        self.n_tokens = self.n_from_draft = 0
        self._logprobs, self.finish_reason = [], "length"

    def feed_pieces(self, update: Update) -> list[tuple[str, bool]]:
        """Add an update. Returns the new text as (text, from_draft), one piece per token that completed some text."""
        pieces: list[tuple[str, bool]] = []
        last = len(update.token_ids) - 1
        for i, (token_id, drafted) in enumerate(zip(update.token_ids, update.from_draft, strict=True)):
            self.n_tokens += 1
            self.n_from_draft += drafted
            self._logprobs += update.logprobs[i : i + 1]
            if i == last and isinstance(update.stop_reason, int):
                break  # the stop id is not text, even if the tokenizer does not mark it as special
            pieces.append((self._text.push(token_id), drafted))
            if self._text.hit is not None:
                self.finish_reason = "stop"
                return pieces
        if update.finish_reason is not None:
            pieces.append((self._text.finish(), False))
            self.finish_reason = "stop" if self._text.hit is not None else update.finish_reason
        return [piece for piece in pieces if piece[0]]


def events_of_answer(events: Sequence[VerifyEvent], n_tokens: int) -> list[VerifyEvent]:
    """The verify steps of the first `n_tokens` tokens. A step across the answer's end is marked truncated.

    The first token comes from the prefill, so step 1 begins with token 2.
    """
    kept, written = [], 1
    for event in events:
        if written >= n_tokens:
            break
        room = n_tokens - written
        kept.append(event if event.committed <= room else replace(event, committed=room, truncated=True))
        written += event.committed
    return kept


@dataclass(frozen=True)
class AcceptanceStats:
    """Statistics over verify steps that offered drafts and were not truncated.

    verify_steps: counted steps. truncated_steps: skipped steps, cut by a stop id, a stop string or max_tokens.
    accept_length: mean tokens committed per counted step, bonus token included, so >= 1 (nan without steps).
    accept_rate[i]: of the steps that offered depth i+1 and accepted depth i, the share that accepted depth i+1.
    accept_rate_unconditional[i]: of the steps that offered depth i+1, the share that accepted depth i+1.
    offered, accepted: drafted nodes and accepted nodes, summed over counted steps.
    histogram[i]: counted steps that accepted exactly i drafted tokens.
    offered_by_depth[i]: counted steps that offered depth i+1.
    """

    verify_steps: int
    truncated_steps: int
    accept_length: float
    accept_rate: tuple[float, ...]
    accept_rate_unconditional: tuple[float, ...]
    offered: int
    accepted: int
    histogram: tuple[int, ...]
    offered_by_depth: tuple[int, ...]

    @property
    def accepted_by_depth(self) -> tuple[int, ...]:
        """[i]: counted steps that accepted depth i+1, so at least i+1 drafted tokens."""
        return tuple(sum(self.histogram[depth:]) for depth in range(1, len(self.histogram)))


def summarise(events: Iterable[VerifyEvent]) -> AcceptanceStats:
    """Summarise events of any requests. Plain decoding steps (offered == 0) are skipped; prefill logs no event."""
    drafted = [event for event in events if event.offered > 0]
    counted = [event for event in drafted if not event.truncated]
    deepest = max((event.depth_offered for event in counted), default=0)
    conditional, unconditional, offering_by_depth = [], [], []
    for depth in range(1, deepest + 1):
        offering = [event.accepted for event in counted if event.depth_offered >= depth]
        reaching = [accepted for accepted in offering if accepted >= depth - 1]
        passed = sum(accepted >= depth for accepted in reaching)
        conditional.append(passed / len(reaching) if reaching else float("nan"))
        unconditional.append(passed / len(offering))
        offering_by_depth.append(len(offering))
    by_accepted = Counter(event.accepted for event in counted)
    accepted_total = sum(accepted * steps for accepted, steps in by_accepted.items())
    return AcceptanceStats(
        verify_steps=len(counted),
        truncated_steps=len(drafted) - len(counted),
        accept_length=1 + accepted_total / len(counted) if counted else float("nan"),
        accept_rate=tuple(conditional),
        accept_rate_unconditional=tuple(unconditional),
        offered=sum(event.offered for event in counted),
        accepted=accepted_total,
        histogram=tuple(by_accepted[accepted] for accepted in range(deepest + 1)) if counted else (),
        offered_by_depth=tuple(offering_by_depth),
    )
