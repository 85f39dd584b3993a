"""Offline inference from Python: `LLM(target, draft=...).generate(prompts, SamplingParams(...))`.

Prompts (texts, lists of ids, conversations) become ids in the same way as in the server.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from toolkit.chat_rows import encodable, short
from toolkit.infer.engine.config import ConfigError, EngineConfig
from toolkit.infer.request.chat_prompt import ChatPromptError, chat_ids
from toolkit.infer.request.detokenize import Detokenizer
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import EngineError, SamplingParams
from toolkit.infer.request.request import (
    AcceptanceStats,
    Answer,
    Request,
    TokenLogprob,
    Update,
    VerifyEvent,
    events_of_answer,
    one_for_each,
    summarise,
)
from toolkit.jsonl import DataError

if TYPE_CHECKING:  # an engine needs transformers' models, which take seconds to import: the first LLM does that
    from toolkit.infer.drafters.choose_drafter import Draft
    from toolkit.infer.load.load_engine import LoadedEngine

Shape = DraftShape | str | None  # the text is "num_steps,top_k,num_draft_tokens" or "num_draft_tokens"


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    prompt_ids: the ids of the prompt.
    text: without special tokens, truncated before the stop string; with a raw prompt, its continuation.
    token_ids: including the stop id that ended the answer.
    finish_reason: "stop" or "length"; "abort" where a grammar exceeded its limits of work or logits are not finite.
    stop_reason: the stop id or stop string; with "abort" what happened.
    logprobs: one per token; None if not requested.
    from_draft: per token, whether it was an accepted draft.
    events: the verify steps.
    first_token_s, seconds: from submission to the first and to the last token.
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
        """Acceptance statistics over this answer's verify steps."""
        return summarise(self.events)

    @property
    def accept_length(self) -> float:
        """Tokens committed per verify step, at least 1; nan without drafts."""
        return self.acceptance.accept_length


class LLM:
    """An engine in this process: a target, with or without a draft. Drafts do not change the answers in float32; in
    bfloat16 an answer is equal, or first parts from plain decoding at a near-tie.

        with LLM(draft="runs/smollm2-135m/ckpt") as llm:
            print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].text)

    target, draft, options: fields of EngineConfig (`toolkit serve --help` lists them as flags). They override `config`.
    shape may also be a DraftShape.

    Not thread-safe. Raises ValueError: ConfigError, DraftDirError, DraftShapeError, TargetError and others.
    `generate` raises RankLostError if another process of `tensor_parallel_size` ends.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        from toolkit.infer.load.load_engine import load_engine

        given = {"target": None if target is None else str(target), "draft": draft}
        options |= {name: value for name, value in given.items() if value is not None}
        if isinstance(options.get("shape"), DraftShape):
            options["shape"] = options["shape"].as_text()
        self.config = (config or EngineConfig()).with_options(**options)
        self._closed = False
        self._take(load_engine(self.config))
        self.tokenizer = self.target.tokenizer
        self._detokenizer = Detokenizer(self.tokenizer)

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative: bool = True,
        shape: Shape | Sequence[Shape] = None,
    ) -> list[Completion]:
        """Answer prompts in batches. Returns the completions in the order of the prompts.

        prompts: a list of texts (raw completions), of lists of token ids (tokenised raw completions), or of
            conversations (lists of {"role", "content"} messages, rendered by the chat template as in the server); or a
            single one of these.
        params: one for all prompts, or one per prompt. None: greedy, at most 128 tokens.
        speculative: False for plain decoding.
        shape: the draft shape, one for all prompts or one per prompt, as a DraftShape or text; at most the LLM's own
            shape, which is the default.

        Checks all prompts before the first step.
        Raises EngineError (OfflinePromptError, PromptTooLongError), DraftShapeError, SamplingError.
        """
        self._check_open()
        ids, raw = read_offline_prompts(prompts, self.tokenizer)
        settings = SamplingParams() if params is None else params
        shapes = one_for_each(shape, Shape, len(ids), "draft shapes")
        shapes = [DraftShape.parse(one) if isinstance(one, str) else one for one in shapes]
        requests = self.engine.generate(ids, settings, speculative=speculative, shape=shapes)
        return [self._completion(request, raw) for request in requests]

    def update_weights(self, weights: Mapping[str, Tensor] | str | Path) -> None:
        """Replace the target's weights without a restart; answers are then those of a new LLM with these weights.

        weights: a state dict of the target's model, as `model.state_dict()` of its trainer gives it (any device, any
            float dtype; of tied weights one name suffices), or the name of a checkpoint: a directory, hub id or .gguf
            with the configuration of the target.

        The weights are rounded, packed and quantised as those before. CUDA graphs and compiled programs stay; the
        prefix cache and the running statistics of adaptive drafting are dropped. Tokenizer, stop ids, draft shape and
        the draft head stay: see `refresh_draft`.
        Changes nothing if the weights do not fit. Raises WeightsError with all missing, unexpected and wrongly shaped
        names, TargetError for a checkpoint of another configuration, EngineError while requests of `engine` run and
        with tensor parallelism.
        """
        from toolkit.targets.fixed_linear import with_tied
        from toolkit.targets.load import load_weights

        self._check_idle()
        where = "the state dict" if isinstance(weights, Mapping) else str(weights)
        given = weights if isinstance(weights, Mapping) else load_weights(self.target, weights)
        self._replace_weights(self.target.model, with_tied(self.target.model, given, where), where)

    def refresh_draft(self, draft: Mapping[str, Tensor] | str | Path) -> None:
        """Replace the draft without a restart; drafts are then those of a new LLM with this draft in the same shape.

        draft: a state dict of the current head, by the names of a draft directory, or a draft as the argument `draft`
            of LLM: a directory, hub id or "ngram".

        A head of the same configuration and token map is copied into the current one. Any other draft replaces it: the
        target stays loaded, the KV cache is made anew, and graphs are captured and the head is compiled again.
        Changes nothing if the draft does not fit, or if no engine can be built with it. Raises the errors of LLM,
        WeightsError as `update_weights`, and EngineError while requests of `engine` run and with tensor parallelism. If
        the engine with the old draft cannot be built again either, this LLM is closed.
        """
        from toolkit.infer.load.load_draft import fit_draft, load_draft

        self._check_idle()
        head = getattr(self._loaded.draft, "head", None)
        if isinstance(draft, Mapping):
            if head is None:
                drafts = "nothing drafts" if self._loaded.draft is None else "n-gram lookup drafts"
                raise ConfigError(f"a state dict of a draft head is given, but {drafts} here; give a draft directory")
            self._replace_weights(head, draft, "the state dict")
            return
        config = self.config.with_options(target=self.target.name, draft=str(draft))
        if self.shape is not None:
            config = config.with_options(shape=self.shape.as_text(), adaptive=self._loaded.adaptive)
        config.check(self.target.device.type)
        new: Any = load_draft(draft, self.target.name, self.target.revision)
        new = fit_draft(new, self.target, config.token_map, config.draft_confidence)
        if head is not None and _is_same_head(self._loaded.draft, new):
            self._replace_weights(head, new.head.state_dict(), str(draft))
        else:
            self._rebuild(config, new)
        self.config = config

    def close(self) -> None:
        """Remove the engine's hooks from the target. `generate` fails afterwards. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this LLM is closed; make another one")

    def _check_idle(self) -> None:
        """Raise EngineError if requests run, or if other processes hold shards of the weights."""
        self._check_open()
        if self.engine.has_work():
            raise EngineError(
                "the engine has requests that have not ended, and their cache holds the old weights' keys and values; "
                "step until they end, or abort them, before the weights are replaced"
            )
        if self.config.tensor_parallel_size > 1:
            raise EngineError(
                f"`tensor_parallel_size` is {self.config.tensor_parallel_size}, and weights cannot be replaced in "
                "several processes; open a new LLM, or use one process"
            )

    @torch.inference_mode()  # the drafter's copies were made in this mode
    def _replace_weights(self, module: Any, weights: Mapping[str, Tensor], where: str) -> None:
        """Check all weights, then copy them in place: CUDA graphs and compiled programs stay valid. What was learned
        with the old ones is dropped."""
        from toolkit.targets.fixed_linear import check_weights, copy_weights

        check_weights(module, weights, where)
        copy_weights(module, weights)
        self.engine.scheduler.memory.forget_prefixes()
        self.engine.drafter.weights_changed()

    def _take(self, loaded: LoadedEngine) -> None:
        self._loaded = loaded
        self.engine, self.target, self.shape = loaded.engine, loaded.target, loaded.shape
        self._closed = False

    def _rebuild(self, config: EngineConfig, draft: Draft) -> None:
        """Replace the engine by one of `config` that drafts with `draft`.

        On errors go on with the old draft; if that fails too (or on Ctrl-C) this LLM is closed.
        """
        from toolkit.infer.engine.cpu_door import pack
        from toolkit.infer.load.load_engine import build_engine

        target, old = self.target, self._loaded.draft
        pack(target, draft, config.draft_quantization)  # the target is packed already
        self.close()
        del self.engine, self._loaded  # their cache must be free before the size of the next one is chosen
        _free_memory()
        try:
            self._take(build_engine(config, target, draft))
        except Exception as error:  # memory may be short, or a kernel not compile
            traceback.clear_frames(error.__traceback__)  # they hold what was built of the next engine
            _free_memory()
            self._take(build_engine(self.config, target, old))
            raise

    def _completion(self, request: Request, raw: bool) -> Completion:
        params = request.params
        context = request.prompt_ids if raw else ()
        stream = self._detokenizer.stream(params.stop, context, unsearched=params.min_tokens)
        answer = Answer(stream)
        text = answer.feed(Update.since(request, 0))
        assert answer.finish_reason is not None, "the engine returned an answer that has not ended"
        assert request.first_token_at is not None and request.finished_at is not None
        count = answer.n_tokens  # fewer than the engine's if the text completed the stop string earlier
        return Completion(
            prompt_ids=list(request.prompt_ids),
            token_ids=request.output_ids[:count],
            text=text,
            finish_reason=answer.finish_reason,
            stop_reason=request.stop_reason if stream.hit is None else stream.hit,
            logprobs=None if params.logprobs is None else answer.take_logprobs(),
            from_draft=request.token_from_draft[:count],
            events=events_of_answer(request.events, count),
            first_token_s=request.first_token_at - request.submitted_at,
            seconds=request.finished_at - request.submitted_at,
        )


def _is_same_head(old: Any, new: Any) -> bool:
    """Whether the weights of `new` can be copied into the drafter of `old`, which has a head."""
    same = hasattr(new, "head") and old.head.config == new.head.config
    return same and torch.equal(old.token_map.ids, new.token_map.ids)


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


# -- prompts -----------------------------------------------------------------------------------------------------------

NEEDED = 'a text, a list of token ids, or a conversation (a list of {"role": ..., "content": ...}) is needed'


class OfflinePromptError(EngineError):
    """A value that is not a prompt, or conversations beside other prompts in one call."""


def read_offline_prompts(prompts: Any, tokenizer: Any) -> tuple[list[list[int]], bool]:
    """Return the ids of one prompt or of a list of prompts, and whether the answers continue their texts; else each is
    a turn of a conversation. Raises OfflinePromptError with the prompt's index."""
    if isinstance(prompts, str) or _all_are(prompts, Integral) or _all_are(prompts, Mapping):
        prompts = [prompts]
    if not isinstance(prompts, list | tuple) or not prompts:
        raise OfflinePromptError(f"prompts is {short(prompts)} ({type(prompts).__name__}); a list of prompts is needed")
    chats = [_all_are(prompt, Mapping) for prompt in prompts]
    if any(chats) and not all(chats):
        raise OfflinePromptError(f"prompt {chats.index(not chats[0])} is no conversation as others are; {NEEDED}")
    return [_ids(prompt, place, tokenizer) for place, prompt in enumerate(prompts)], not chats[0]


def _ids(prompt: Any, place: int, tokenizer: Any) -> list[int]:
    if _all_are(prompt, Mapping):
        return _chat_ids(prompt, place, tokenizer)
    try:
        ids = tokenizer(encodable(prompt, f"prompt {place}"))["input_ids"] if isinstance(prompt, str) else prompt
    except DataError as error:
        raise OfflinePromptError(str(error)) from error
    if not _all_are(ids, Integral) or any(isinstance(token, bool) for token in ids):
        raise OfflinePromptError(
            f"prompt {place} is {short(prompt)} ({type(prompt).__name__}); {NEEDED}, with one token or more"
        )
    return [int(token) for token in ids]


def _chat_ids(messages: Sequence[Mapping[str, Any]], place: int, tokenizer: Any) -> list[int]:
    from pydantic import ValidationError  # here: who gives no conversation needs no pydantic

    from toolkit.infer.request.chat_messages import ChatMessage

    try:
        read = [ChatMessage.model_validate(dict(message)) for message in messages]
        if any(message.tool_calls or message.role == "tool" for message in read):
            raise OfflinePromptError(f"prompt {place}: calls of tools are not supported here, but by `toolkit serve`")
        return chat_ids(tokenizer, [message.for_template() for message in read])
    except ChatPromptError as error:
        raise OfflinePromptError(f"prompt {place}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"]]
        raise OfflinePromptError(f"prompt {place}: {': '.join([*where, first['msg']])}") from error


def _all_are(prompt: Any, kind: Any) -> bool:
    """Whether it is a list with something in it, all of that kind."""
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(one, kind) for one in prompt)
