"""The speculative engine: continuous batching, one target forward per step, and the target's own tokens.

In float32 they are those of plain decoding. In bfloat16 they are equal, or first part at a near-tie: two tokens whose
logits differ by less than the rounding of a verify step.

The KV cache of a row with L tokens holds the first L-1. The last token is the root of the row's next draft tree.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.cache.cache_manager import DEFAULT_MEMORY, KVMemory, MemorySettings
from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.cache.linear_states import LinearStates, check_chains
from toolkit.infer.cache.round_state import RoundState
from toolkit.infer.drafters.choose_drafter import (
    Draft,
    Lookup,
    cached_token_bytes,
    choose_drafter,
    default_shape,
    with_choices,
)
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.engine.cpu_door import compile_flags, install_native_ops
from toolkit.infer.engine.first_launches import FirstLaunches
from toolkit.infer.engine.prefill import PromptReader
from toolkit.infer.engine.round import EagerRounds, RoundContext, commit, round_numbers
from toolkit.infer.engine.scheduler import Move, Padding, Scheduler
from toolkit.infer.graphs.compiled_forward import compile_for_eager_rounds
from toolkit.infer.graphs.graph_rounds import GraphRounds
from toolkit.infer.graphs.overlap import Launches
from toolkit.infer.graphs.recordings import GraphSettings
from toolkit.infer.kernels.dispatch import use_device
from toolkit.infer.request.detokenize import Detokenizer
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.grammar import Grammars
from toolkit.infer.request.params import EngineError, SamplingParams
from toolkit.infer.request.request import Request, checked_prompt, one_for_each
from toolkit.infer.verify.sampler import NodeLogprobs
from toolkit.infer.verify.verifiers import ForcedAcceptance, VerifyResult, choose_verifier
from toolkit.targets.target import Target
from toolkit.thread_limit import thread_limit


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; on a CPU torch raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


class Engine:
    """Owns the target's KV cache and the running requests. Not thread-safe: one thread calls step().

    draft: a head, n-gram lookup, or None for plain decoding.
    shape: the draft shape; a chain of 4 by default.
    max_running_requests: the largest batch; further requests wait.
    context_length: limit of prompt plus answer in tokens, at most the target's context; None: as much of it as fits.
    verify: how drafts are accepted at a temperature above 0: "target", or for chains of a head "rejection" or "block"
        (see verifiers.py). All preserve the target's distribution. With "target" a seed gives the tokens of plain
        decoding (in bfloat16 up to near-ties); with the others they also depend on the drafts. "auto" is "block" for
        chains of a head and requests without a seed, and "target" otherwise. Greedy answers are the same with each.
    adaptive: choose in every step `shape`, a smaller shape or no draft, by the current tokens per second (see
        adaptive.py). False: always draft `shape`, as a measurement of one shape needs.
    lookup: draft by lookup too where a text repeats itself (lookup.py). None: by the head alone.
    memory: size of the KV cache.
    deterministic: as the option of EngineConfig; changes the target's modules in place (batch_invariant.py).
    torch_compile: compile target and head (CPU). graphs: run rounds as CUDA graphs, captured here, one in flight (GPU).
    forced: accept drafts by chance, not by the target's choices, so answers mean nothing (benchmarks of hardware).

    Raises DraftDirError or UnsupportedTargetError for an unusable head or target, CompileError if compilation fails.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None = None,
        shape: DraftShape | None = None,
        *,
        max_running_requests: int = 16,
        context_length: int | None = None,
        verify: str = "target",
        adaptive: bool = False,
        lookup: Lookup | None = None,
        memory: MemorySettings = DEFAULT_MEMORY,
        deterministic: bool = False,
        torch_compile: bool = False,
        graphs: GraphSettings | None = None,
        forced: ForcedAcceptance | None = None,
    ) -> None:
        if shape is not None and draft is None:
            raise EngineError(f"`shape` is {shape.as_text()}, but nothing is drafted; give `draft`, or leave it out")
        if deterministic and (torch_compile or verify != "target"):
            raise EngineError('`deterministic` is set: verify="target" is needed, and no `torch_compile`')
        self.target = target
        use_device(target.device)
        install_native_ops(target.device)
        with torch.inference_mode():
            self._forward = TargetForward(target, deterministic=deterministic)
            sizes, shapes = (self._forward.kv_shape, max_running_requests), self._forward.state_shapes
            beside = sum(one.bytes for one in shapes), cached_token_bytes(draft)
            self.context_length = memory.context(*sizes, context_length, self._forward.max_context, *beside)
            pool = memory.pool(*sizes, self.context_length, *beside)
            self._cache = KVCache(self._forward.kv_shape, pool, in_order=deterministic)
            self._states = LinearStates.of_pool(shapes, pool, target.device)
            self.shape = None if draft is None else shape or default_shape(draft)
            check_chains(self._states, self.shape, recorded=graphs is not None)
            has_head = isinstance(draft, DraftCheckpoint)
            self.verifier = choose_verifier(verify, self.shape, head=has_head, recorded=graphs is not None)
            draws = self.verifier.draws_for if self.verifier.draws_drafts else None
            self.drafter = choose_drafter(target, draft, self.shape, pool, draws=draws)
            state = RoundState(max_running_requests, pool, target.device)
            self._around_step: Callable[[], AbstractContextManager[None]] = nullcontext
            if torch_compile:
                compiled = compile_for_eager_rounds(self._forward, self.drafter, max_running_requests, compile_flags())
                self._around_step = compiled.running
        head = self.drafter if isinstance(self.drafter, HeadDrafter) else None
        if self.shape is not None:
            self.drafter = with_choices(self.drafter, self.shape, lookup, target.device, adaptive=adaptive)
        limits = (self.context_length, self.drafter.lookahead, self._slack(self.shape))
        self._memory = KVMemory(pool, *limits, reuse=memory.prefix_cache, states=self._states)
        padding: Padding = "none" if self._states is not None else "little" if target.device.type == "cpu" else "any"
        self.scheduler = Scheduler(max_running_requests, memory.chunked_prefill_size, self._memory, padding=padding)
        self._prompts = PromptReader(target, self._forward, self._cache, self.scheduler, self._states)
        context = RoundContext(self._forward, self._cache, self._states, head, self.context_length, forced)
        self._rounds = EagerRounds(context, state, self.verifier)
        parts = (partial(round_numbers, context), state, self._forward, self._cache, self.drafter, self.verifier)
        self._launches = Launches(None if graphs is None else GraphRounds(graphs, *parts), self.scheduler)
        self.first_launches = FirstLaunches(context, state, self.scheduler.chunk)
        self._detokenizer = Detokenizer(target.tokenizer)
        self.grammars = Grammars(target.tokenizer, target.vocab_size, target.stop_ids)
        self._arrivals = itertools.count()
        self._limited = thread_limit(target.device, changing=not self._forward.fixes_threads)

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        speculative: bool = True,
        shape: DraftShape | None = None,
        verify: str | None = None,
        priority: int = 0,
    ) -> Request:
        """Queue a prompt. Its own draft shape is at most the engine's, its `verify` one of `Verifier.of_request`; None:
        the engine's. A request of a lower priority number is read earlier, and loses its pages later.

        Raises PromptTooLongError, DraftShapeError, VerifyError, EngineError for an empty prompt or an id outside the
        vocabulary, SamplingError for a stop id or a biased id outside the vocabulary or an unsupported grammar.
        """
        prompt = checked_prompt(prompt_ids, self.target.vocab_size, self.context_length)
        if shape is not None:
            shape.check_asked(self.shape, speculative)
        params.check_ids(self.target.vocab_size)
        request = Request(
            prompt_ids=prompt,
            params=params.seeded(),
            states_seed=params.seed is not None,
            speculative=speculative and self.shape is not None,
            shape=shape,
            verify=self.verifier.of_request(verify),
            priority=priority,
            grammar=self.grammars.start(params),
            arrival=next(self._arrivals),  # after all that may refuse the request: ranks count alike
            stop_set=frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else self.target.stop_ids),
            token_limit=min(params.max_tokens, self.context_length - len(prompt)),
            text=self._detokenizer.stream(params.stop, unsearched=params.min_tokens) if params.stop else None,
        )
        self.scheduler.enqueue(request)
        return request

    @torch.inference_mode()
    def abort(self, request: Request) -> None:
        """End a request now with finish_reason "abort". Its cache row is free in the next step."""
        if request.finished:
            return
        request.finish_reason, request.finished_at = "abort", time.perf_counter()
        if not self.scheduler.drop_unstarted(request):
            self._finish()

    @property
    def max_running_requests(self) -> int:
        """The largest batch."""
        return self.scheduler.max_running_requests

    @property
    def _running(self) -> list[Request]:
        return self.scheduler.running

    @property
    def has_graphs(self) -> bool:
        """Whether rounds run as CUDA graphs. A replay runs no host code, so module hooks do not fire."""
        return self._launches.graphs is not None

    def keep_pace(self, gap_s: float) -> None:
        """Read prompts in chunks of at most about so many seconds while requests run, by the measured speed (CPU)."""
        if self.target.device.type == "cpu":
            self._prompts.gap_s = gap_s

    @property
    def eager_rounds(self) -> int:
        """Rounds that ran without a graph, of an engine that has some."""
        return self._launches.eager_rounds

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def set_shape(self, shape: DraftShape) -> None:
        """Draft with another shape from the next step on.

        Raises EngineError without a draft head, DraftShapeError if the head or the verifier does not support it."""
        self.verifier.check_shape(shape)
        check_chains(self._states, shape)
        slack = self._slack(shape)
        self._memory.check_slack(slack)
        self.drafter.set_shape(shape)
        # The unread features of the old shape may need more slots than the new shape does.
        self.shape, self._memory.slack = shape, max(slack, self._memory.slack) if self.has_work() else slack
        self._launches.shape_changed()

    def close(self) -> None:
        """Remove the engine's hooks from the target. Do not step the engine afterwards."""
        self.drafter.close()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one round. Returns the requests that got tokens or ended.

        With overlap a round returns its requests one step later (see overlap.py)."""
        use_device(self.target.device)
        with self._limited(), self._around_step():
            touched = self._land()
            if not self._launches.in_flight:
                touched += self._schedule()
                if self._running:
                    touched += self._round()
        return list(dict.fromkeys(touched))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        speculative: bool = True,
        shape: DraftShape | None | Sequence[DraftShape | None] = None,
    ) -> list[Request]:
        """Run all prompts to completion. Returns the requests in the order of the prompts.

        params, shape: one for all prompts, or one for each. Raises the errors of add_request before the first step.
        """
        settings = one_for_each(params, SamplingParams, len(prompts), "sampling settings")
        shapes = one_for_each(shape, DraftShape | None, len(prompts), "draft shapes")
        requests: list[Request] = []
        try:
            for place, (prompt, one, asked) in enumerate(zip(prompts, settings, shapes, strict=True)):
                try:
                    requests.append(self.add_request(prompt, one, speculative=speculative, shape=asked))
                except ValueError as error:
                    error.add_note(f"this was prompt {place} of {len(prompts)} (counted from 0)")
                    raise
            while any(not request.finished for request in requests):
                self.step()
        finally:
            for request in requests:
                self.abort(request)
        return requests

    def _schedule(self) -> list[Request]:
        """Allocate pages for every row, prefill the prompts that are due, and sample their first tokens."""
        self._change_rows(self.scheduler.make_room)
        before = len(self._running)
        try:
            begun = self._prompts.read_due(self.drafter, self._keep)
        except BaseException as error:
            self.scheduler.put_back()
            self._rounds.rows_changed()  # prompts prefilled before the failure hold rows now
            if not out_of_memory(error):
                raise
            return self.scheduler.read_less(str(error))
        if len(self._running) > before:
            self._rounds.rows_changed()
            self._finish()
        return begun

    def _commit(
        self, result: VerifyResult, logprobs: NodeLogprobs | None, started: float, proposed: float
    ) -> list[Request]:
        touched = commit(self._running, result, logprobs, started, proposed)
        self._finish()
        return touched

    def _finish(self) -> None:
        """Free the rows of ended requests. The last row moves into each free row."""
        if self._launches.may_take_rows():
            self._change_rows(lambda: self.scheduler.retire(self._keep))

    def _round(self) -> list[Request]:
        """Propose, verify and commit, or launch the round as a graph (with overlap it lands in the next step)."""
        if self._launches.launch():
            return [] if self._launches.overlap else self._land()
        started = time.perf_counter()
        out = self._rounds(self._running, self.drafter)
        return self._commit(out.result, out.logprobs, started, out.proposed)

    def _land(self) -> list[Request]:
        """Commit the result of the round in flight, if there is one."""
        if (landed := self._launches.land()) is None:
            return []
        result, began = landed  # a graph has no time per part: the whole round counts as verification
        return self._commit(result, None, began, began)

    def _keep(self, row: int, request: Request) -> None:
        """Insert the positions that a row has read into the prefix cache; wipe those of a request that failed."""
        if request.failed:
            self._memory.pool.clear(row)
        elif request.ready:
            drafted = self.drafter.positions_read(row, request)
            read = min(request.length - 1, drafted or request.length)
            self._memory.keep(row, request.prompt_ids + request.output_ids, read, drafted > 0)

    def _change_rows(self, change: Callable[[], list[Move]]) -> None:
        """Apply a change of rows of the scheduler to the drafter and the sampler."""
        before = len(self._running)
        for row, source in change():
            self.drafter.move_row(row, source)
        if len(self._running) < before:
            self._rounds.rows_changed()

    def _slack(self, shape: DraftShape | None) -> int:
        """Number of positions that a step may write after a row's tokens."""
        return 1 if shape is None else max(shape.num_draft_tokens, self.drafter.reach(shape))

    def check_integrity(self) -> None:
        """Assert that queue, rows, pages and caches agree; tests call it after every step."""
        self.scheduler.check_integrity(self._launches.in_flight)
        assert all(one.length <= self.context_length for one in self._running), "a request outgrew the context"
