"""Runs the target's own Hugging Face layers on the engine's KV cache.

The engine registers one attention function with transformers. A forward's attention metadata (cache, places, masks)
reaches it as the keyword `attention_metadata` of the body's forward. No mask function is registered under that name, so
transformers builds no mask.

Shapes: B rows, N tokens per row, H hidden size, Hq/Hkv heads, D head dim of queries and keys, Dv of values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.errors import TargetError
from toolkit.infer.attention.batch_invariant import depends_on_threads, make_batch_invariant
from toolkit.infer.attention.fused_layer import FusedLayers, fuse_norms
from toolkit.infer.attention.layer_attention import register_attention
from toolkit.infer.attention.linear_layers import keeping, linear_layers, step_by_node
from toolkit.infer.attention.metadata import AttentionMetadata, prompt_metadata, tree_metadata
from toolkit.infer.attention.probe import PROBE, AttentionProbe
from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.cache.linear_states import LinearStates, RowStates, StateProbe, StateShape
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.kernels.dispatch import ops_for
from toolkit.infer.kernels.paged_reference import Scoring
from toolkit.infer.request.params import UnsupportedTargetError
from toolkit.targets.target import Target

# input_ids and positions [B, N], metadata, states of linear-attention layers -> last hidden state [B, N, H]
RunBody = Callable[[Tensor, Tensor, AttentionMetadata, RowStates | None], Tensor]

ATTENTION = "toolkit"
PROBE_TOKENS = 8
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Errors that a body may raise when it gets an argument it does not know.
FOREIGN = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, others: dict[str, Any]) -> Tensor:
    """Attend with the forward's metadata. The probe has checked that the rest of `others` can be ignored."""
    metadata: AttentionMetadata = others["attention_metadata"]
    places: dict[int, int] | None = others.get("cache_layers")
    layer = module.layer_idx if places is None else places[module.layer_idx]
    return metadata.attend(layer, q, k, v, scoring)


register_attention(ATTENTION, _attend)


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; on a CPU torch raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


class TargetForward:
    """The target's body with the engine's attention. Other users of the model keep their own attention setting.

    deterministic: a token's hidden state has the same bits in every batch, part of a prompt and draft tree. The modules
    of the target are changed for it, in place (batch_invariant.py).

    The constructor raises TargetError if memory runs out; UnsupportedTargetError if a layer does not call the engine's
    attention, if it uses an unsupported attention feature, if the engine's logits differ from the model's own, or if
    bits differ where they must not.
    """

    def __init__(self, target: Target, *, deterministic: bool = False) -> None:
        self.target, self.deterministic = target, deterministic
        self.run_body: RunBody = self._run_body  # graphs/compiled_forward.py puts a compiled body here
        self._configs = _attention_configs(target.body)
        self.max_context = _context_limit(target)
        self.linear_layers = linear_layers(target.config)
        attending = (layer for layer in range(target.n_layers) if layer not in self.linear_layers)
        self._cache_layers = {layer: place for place, layer in enumerate(attending)}
        self.state_shapes: list[StateShape] = []  # of the linear-attention layers
        try:
            step_by_node(target.layers, self.linear_layers)
            fuse_norms(target.body, target.device)
            if deterministic:
                make_batch_invariant(target, self.max_context)
            probe = self._probe_layers()
            self.kv_shape = probe.kv_shape(type(target.model).__name__, list(self._cache_layers), target.device)
            self._fused = FusedLayers(target, {} if deterministic else probe.scorings, self._cache_layers)
            self.compare_logits()
            if deterministic:
                self._compare_bits()
        except TargetError:
            raise
        except (*FOREIGN, MemoryError) as error:
            if out_of_memory(error):
                raise TargetError(
                    f"memory ran out on {target.device} while the engine checked {type(target.model).__name__}: {error}"
                ) from error
            raise UnsupportedTargetError(
                f"{type(target.model).__name__} does not run on the engine's attention ({type(error).__name__}: "
                f"{error}); use a target of another family, or Hugging Face's generate"
            ) from error

    def __call__(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, states: RowStates | None = None
    ) -> Tensor:
        """input_ids and positions [B, N] -> last hidden state after the final norm [B, N, H].

        states: of the rows' linear-attention layers, for a target that has some.
        """
        return self.run_body(input_ids, positions, metadata, states)

    def _run_body(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, states: RowStates | None
    ) -> Tensor:
        with self.own_attention(ATTENTION), self._fused.running():
            if states is None:
                return self.states(input_ids, positions, attention_metadata=metadata)
            with keeping(states):
                linear = {self._state_keyword: states, "cache_layers": self._cache_layers}
                return self.states(input_ids, positions, attention_metadata=metadata, **linear)

    def logits(self, hidden: Tensor) -> Tensor:
        """Last hidden states [..., H] -> logits [..., V], by the device's product of few rows if it has one."""
        target, head = self.target, self.target.lm_head
        if not self._fused.multiplies(head):
            return target.logits(hidden)
        return target.finish_scores(ops_for(target.device.type).linear(hidden, head.weight, head.bias, None))

    def states(self, input_ids: Tensor, positions: Tensor, **keywords: Any) -> Tensor:
        """As `__call__`, with the attention that is set now; keywords: for the body's layers."""
        body = self.target.body(input_ids=input_ids, position_ids=positions, use_cache=False, **keywords)
        return body.last_hidden_state

    @contextmanager
    def own_attention(self, name: str) -> Iterator[None]:
        """Context manager: the body calls the attention `name` of transformers' AttentionInterface."""
        before = [config._attn_implementation_internal for config in self._configs]
        for config in self._configs:
            config._attn_implementation_internal = name
        try:
            yield
        finally:
            for config, setting in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = setting

    def _probe_layers(self) -> AttentionProbe:
        probe = AttentionProbe(self.max_context)
        device = self.target.device
        at = torch.arange(2, device=device)[None]
        linear = StateProbe()
        with self.own_attention(PROBE):
            more = {self._state_keyword: linear} if self.linear_layers else {}
            self.states(torch.zeros_like(at), at, attention_metadata=probe, **more)
        self.state_shapes = linear.shapes
        return probe

    @property
    def fixes_threads(self) -> bool:
        """Whether another number of threads may change bits that must stay."""
        return self.deterministic and depends_on_threads(self.target)

    @cached_property
    def _state_keyword(self) -> str:
        """The name of the cache among the arguments of the body's forward."""
        names = inspect.signature(self.target.body.forward).parameters
        return "cache" if "cache" in names else "past_key_values"

    def compare_logits(self, running: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Compare the logits of the engine's forward with the model's own; half the tokens are a prompt, half a chain.

        running: context manager around the engine's forwards. Raises UnsupportedTargetError if the logits differ.
        """
        ids = self._probe_ids
        with running():
            ours = self._logits_in_parts(PROBE_TOKENS // 2, PROBE_TOKENS // 2).float()
        theirs = self.target.model(input_ids=ids, use_cache=False).logits.float()
        difference = ((ours - theirs).norm() / theirs.norm()).item()
        allowed = 1e-3 if self.target.dtype == torch.float32 else 1e-1
        if not difference <= allowed:
            raise UnsupportedTargetError(
                f"{type(self.target.model).__name__}: the engine's logits differ from the model's own by "
                f"{difference:.2g} of their size (allowed: {allowed:g}); this family has an attention the engine does "
                "not reproduce"
            )

    def _compare_bits(self) -> None:
        """Raise UnsupportedTargetError if logits depend on what is computed together."""
        whole = self._logits_in_parts(PROBE_TOKENS)
        for parts in ((1,) * PROBE_TOKENS, (PROBE_TOKENS - 3, 3)):
            if not torch.equal(whole, self._logits_in_parts(*parts)):
                raise UnsupportedTargetError(
                    f"{type(self.target.model).__name__}: the logits of {PROBE_TOKENS} tokens in parts of "
                    f"{', '.join(map(str, parts))} differ in bits from those computed at once, so `deterministic` does "
                    "not hold for this target; leave it out, or use another dtype or quantization"
                )

    @property
    def _probe_ids(self) -> Tensor:
        ids = torch.arange(PROBE_TOKENS, device=self.target.device) * 7919 % self.target.vocab_size
        return ids[None]

    def _logits_in_parts(self, *parts: int) -> Tensor:
        """The logits [1, N, V] of the probe's tokens, in forwards of so many tokens: a prompt, then chains."""
        ids, device = self._probe_ids, self.target.device
        pool = PagePool(1, PROBE_TOKENS)
        pool.grow(0, PROBE_TOKENS)
        cache = KVCache(self.kv_shape, pool, in_order=self.deterministic)
        table = pool.table(0, 1, pool.pages_of(PROBE_TOKENS), device)
        states = LinearStates(self.state_shapes, 1, device, pool.page_size) if self.linear_layers else None
        hidden, first = [], 0
        for tokens in parts:
            at = torch.arange(first, first + tokens, device=device)[None]
            if first == 0:
                metadata = prompt_metadata(cache, 0, [0], tokens)
                before = None if states is None else states.prompt(0, [0])
            else:
                chain = torch.ones(1, tokens, tokens, dtype=torch.bool, device=device).tril()
                length = torch.tensor([first], device=device)
                metadata = tree_metadata(cache, table, length, PROBE_TOKENS, chain, at - first)
                before = None if states is None else states.nodes(1)
            hidden.append(self(ids[:, first : first + tokens], at, metadata, before))
            first += tokens
            if states is not None and first == parts[0]:
                states.end_prompt([first])
        return self.logits(torch.cat(hidden, dim=1))


def _attention_configs(body: nn.Module) -> list[Any]:
    """Return the distinct configs in the body from which its layers read their attention setting."""
    configs = [getattr(module, "config", None) for module in body.modules()]
    return list({id(config): config for config in configs if hasattr(config, "_attn_implementation_internal")}.values())


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the rope settings of a model, and those of its layer types if they differ."""
    ropes = getattr(config, "rope_parameters", None) or {}
    return [ropes, *(inner for inner in ropes.values() if isinstance(inner, dict))]


def _context_limit(target: Target) -> int:
    """Return the maximum context in tokens; a length-dependent rope ends where its frequencies would change."""
    config, every = target.config, _ropes(target.config)
    if any(rope.get("rope_type") in LENGTH_DEPENDENT_ROPE for rope in every):
        name = "original_max_position_embeddings"
        stated = [rope.get(name) for rope in every] + [getattr(config, name, None)]
        return min([target.max_context, *(value for value in stated if value)])
    return target.max_context
