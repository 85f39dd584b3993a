"""The engine from Python, without a server: `LLM(target, draft=...).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from toolkit.infer.cache.cache_manager import MemorySettings
from toolkit.infer.engine.engine_thread import Update
from toolkit.infer.load.answer import Answer, events_of_answer
from toolkit.infer.load.offline_prompts import read_offline_prompts
from toolkit.infer.load.open_parallel import open_parallel
from toolkit.infer.request.acceptance import AcceptanceStats, summarise
from toolkit.infer.request.detokenize import Detokenizer
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.errors import EngineError
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request, TokenLogprob, VerifyEvent, one_for_each

Shape = DraftShape | str | None  # the text is "num_steps,top_k,num_draft_tokens"


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    text: without special tokens, cut before the stop string that ended it; a raw prompt's goes on where the prompt
    ends. token_ids: the stop id that ended the answer included. finish_reason: "stop" or "length"; stop_reason: the
    stop id or stop string. logprobs: one for each token, None unless asked for. from_draft: for each token, whether it
    was an accepted draft. events: its verify steps. first_token_s, seconds: from the call to the first and last token.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[TokenLogprob] | None
    from_draft: list[bool]
    events: list[VerifyEvent]
    first_token_s: float
    seconds: float

    @cached_property
    def acceptance(self) -> AcceptanceStats:
        """Counts over this answer's verify steps."""
        return summarise(self.events)

    @property
    def accept_length(self) -> float:
        """Tokens committed per verify step, at least 1; nan where nothing was drafted."""
        return self.acceptance.accept_length


class LLM:
    """A target, with or without a draft head, in this process. The tokens are the target's own either way.

        with LLM(draft="runs/smollm2-135m/ckpt") as llm:
            print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].text)

    target: the demo's name, a hub id, a directory or a .gguf file; None takes the one that the draft directory names.
    draft: a draft directory, "ngram" (no head: what followed the same words earlier is drafted), or None for plain
    decoding. shape: a DraftShape or "num_steps,top_k,num_draft_tokens"; None takes the best measured one, else a chain
    of 4. adaptive: draft less than the shape, or nothing, where that is faster; None: unless a shape was given. verify:
    "auto", "target", "rejection" or "block" (see Engine). token_map: a freq_N.pt for heads that share the target's
    output matrix. revision: of a target on a hub.
    max_batch: answers written at once (serve's --max-running-requests); more prompts wait. max_context: tokens of
    prompt and answer together.
    max_total_tokens, prefix_cache, chunked_prefill_size: what answers and kept prefixes hold at most, whether any are
    kept, and how many tokens of prompts are read between two rounds of running answers. mem_fraction: in place of
    max_total_tokens, the cache's share of a GPU's free memory (None: 0.8), or of the machine's (0.125).
    dtype: auto, bfloat16 or float32. quantization: int8 or int4 for a target of a byte or half of one a weight (CPU),
    none, or auto (as the draft directory states it). draft_quantization: int8 for a head of a byte a weight (CPU),
    none, or auto (int8 beside a quantised target, and for bfloat16 heads on a CPU). torch_compile: both run compiled,
    which the first start pays with a minute or two and a C++ compiler; on a GPU those of recorded rounds, of up to
    torch_compile_max_bs answers.
    cuda_graph_max_bs: rounds of up to so many answers run as recorded graphs (GPU); disable_overlap_schedule: each is
    launched only when the results of the one before it are read. device: auto (a GPU if there is one), cpu, cuda,
    cuda:1. tensor_parallel_size: processes of this machine that divide the weights and the cache, each on a GPU of its
    own (or on the CPU).

    Not thread-safe. Raises ValueError: OpenError, DraftDirError, DraftShapeError, TargetError, TokenMapError and other
    errors that say what came and what is needed. `generate` raises RankLostError when another process of several ends.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        shape: DraftShape | str | None = None,
        adaptive: bool | None = None,
        verify: str = "auto",
        token_map: str | Path | None = None,
        max_batch: int = 16,
        max_context: int | None = None,
        max_total_tokens: int | None = None,
        mem_fraction: float | None = None,
        prefix_cache: bool = True,
        chunked_prefill_size: int = 1024,
        dtype: str = "auto",
        quantization: str = "auto",
        draft_quantization: str = "auto",
        torch_compile: bool = False,
        torch_compile_max_bs: int | None = None,
        cuda_graph_max_bs: int | None = None,
        disable_overlap_schedule: bool = False,
        device: str = "auto",
        revision: str | None = None,
        tensor_parallel_size: int = 1,
    ) -> None:
        opened = open_parallel(
            tensor_parallel_size,
            draft=draft,
            target=None if target is None else str(target),
            revision=revision,
            shape=shape,
            adaptive=adaptive,
            verify=verify,
            token_map=token_map,
            dtype=dtype,
            quantization=quantization,
            draft_quantization=draft_quantization,
            torch_compile=torch_compile,
            torch_compile_max_bs=torch_compile_max_bs,
            cuda_graph_max_bs=cuda_graph_max_bs,
            overlap_schedule=not disable_overlap_schedule,
            device=device,
            max_batch=max_batch,
            max_context=max_context,
            memory=MemorySettings(max_total_tokens, prefix_cache, chunked_prefill_size, fraction=mem_fraction),
        )
        self.engine, self.target, self.shape = opened.engine, opened.target, opened.shape
        self.tokenizer = opened.target.tokenizer
        self._detokenizer = Detokenizer(self.tokenizer)
        self._closed = False

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative: bool = True,
        shape: Shape | Sequence[Shape] = None,
    ) -> list[Completion]:
        """Answer prompts, many at once; the completions come back in the prompts' order.

        prompts: a list of texts (raw completions), of lists of token ids (the same, tokenised already), or of
        conversations, lists of {"role", "content"} messages, to which the chat template is applied as the server does
        it; or one of these alone. params: one for all, or one for each; None is greedy, 128 tokens at most.
        speculative False decodes plainly. shape: what is drafted for all prompts, or for each, in the forms that LLM
        takes: at most the LLM's own shape, which None stands for. Nothing runs before all prompts have been checked.
        Raises EngineError (OfflinePromptError, PromptTooLongError), DraftShapeError, SamplingError.
        """
        if self._closed:
            raise EngineError("this LLM is closed; open another one")
        read = read_offline_prompts(prompts, self.tokenizer)
        settings = SamplingParams() if params is None else params
        shapes = [_shape(one) for one in one_for_each(shape, Shape, len(read.ids), "draft shapes")]
        requests = self.engine.generate(read.ids, settings, speculative=speculative, shape=shapes)
        return [self._completion(request, read.raw) for request in requests]

    def close(self) -> None:
        """Take the engine's hooks off the target; nothing can be generated afterwards. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _completion(self, request: Request, raw: bool) -> Completion:
        params = request.params
        context = request.prompt_ids if raw else ()
        stream = self._detokenizer.stream(params.stop, context, unsearched=params.min_tokens)
        answer = Answer(stream)
        text = answer.feed(Update.since(request, 0))
        assert answer.finish_reason is not None, "the engine returned an answer that has not ended"
        assert request.first_token_at is not None and request.finished_at is not None
        count = answer.n_tokens  # fewer than the engine wrote where a raw text's stop string was complete sooner
        return Completion(
            prompt_ids=list(request.prompt_ids),
            token_ids=request.output_ids[:count],
            text=text,
            finish_reason=answer.finish_reason,
            stop_reason=stream.hit if stream.stopped else request.stop_reason,
            logprobs=None if params.logprobs is None else answer.take_logprobs(),
            from_draft=request.token_from_draft[:count],
            events=events_of_answer(request.events, count),
            first_token_s=request.first_token_at - request.submitted_at,
            seconds=request.finished_at - request.submitted_at,
        )


def _shape(given: Shape) -> DraftShape | None:
    return DraftShape.parse(given) if isinstance(given, str) else given
