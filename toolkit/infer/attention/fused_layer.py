"""Fused kernels of a target's layers: on a GPU its norms, and whole decoder layers of Llama and the families that have
its layer (Mistral, Qwen2, Qwen3).

    norm | q, k, v in one product | rotation and write to the cache | attention | product + residual
    norm | gate, up in one product, silu(gate) * up                 |             product + residual

transformers runs some thirty operations for a layer, six of them for a norm, in bf16 eight. A class of norms is
recognised by what it computes: `reference.rms_norm` in one of its forms, to the bit, on random numbers. A fused layer
is some Triton kernels on a GPU; on a CPU it is one native call, or two around an attention of many tokens, for packed
bfloat16 or int8 weights. A layer is recognised by its class, its parts and what it computes: one layer of each class
must give the same numbers fused (on a GPU a float32 copy of it). Layers of other families run as they are; some have
Llama's parts and differ by layer or position (SmolLM3, Ministral 3, GLM-4.5).

Shapes: B rows, N tokens per row, H hidden size, K inputs and O outputs of a product, I intermediate size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.infer.kernels import reference
from toolkit.infer.kernels.dispatch import REFERENCE, Ops, ops_for
from toolkit.infer.kernels.paged_reference import Scoring
from toolkit.infer.kernels.reference import attend_causal
from toolkit.targets.target import Target

EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
FORMS = ((0.0, True), (1.0, False), (0.0, False))  # offset and rounded of `reference.rms_norm`: Llama, Gemma, others
SAMPLES = 64
Form = tuple[str, float, bool]  # name of the epsilon, offset, rounded
_fused_kinds: dict[type, type | None] = {}  # by class of norms, the fused one; None: it computes something else
_forms: dict[type, Form] = {}  # of the fused classes


def fuse_norms(body: nn.Module, device: torch.device) -> None:
    """Let the body's norms run by the device's kernel, if it has one, where no gradients are recorded.

    Each norm becomes one of a class below its own, so that a copy of the body is fused and other models are not.
    """
    if ops_for(device.type).rms_norm is reference.rms_norm:
        return
    for module in body.modules():
        kind = type(module)
        if kind in _forms or kind is nn.RMSNorm or not kind.__name__.endswith("RMSNorm"):
            continue
        if kind not in _fused_kinds:
            form = _form_of(module)
            _fused_kinds[kind] = None if form is None else _fused_kind(kind, form)
        fused = _fused_kinds[kind]
        if fused is not None:
            module.__class__ = fused


def is_fused(norm: nn.Module) -> bool:
    """Whether this norm runs by the device's kernel, which computes each row by itself."""
    return fused_form(norm) is not None


def fused_form(norm: nn.Module) -> Form | None:
    """The form of a norm that runs by the device's kernel; None for others."""
    return None if norm._parameters.get("weight") is None else _forms.get(type(norm))


def _form_of(module: nn.Module) -> Form | None:
    """Return the name of the norm's epsilon, and the form that it computes; None if it computes something else."""
    eps = next((name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)), None)
    own = dict(module.named_parameters())
    if eps is None or list(own) != ["weight"] or own["weight"].dim() != 1:
        return None
    weight, generator = own["weight"], torch.Generator().manual_seed(0)
    trial, x = (
        torch.randn(*shape, generator=generator).to(weight.device, weight.dtype)
        for shape in (weight.shape, (SAMPLES, len(weight)))
    )
    with torch.no_grad():
        out = torch.func.functional_call(module, {"weight": trial}, (x,))
        for offset, rounded in FORMS:
            if torch.equal(out, reference.rms_norm(x, trial, getattr(module, eps), offset, rounded)):
                return eps, offset, rounded
    return None


def _fused_kind(kind: type[nn.Module], form: Form) -> type:
    eps, offset, rounded = form
    own: Callable[..., Tensor] = kind.forward

    def forward(module: Any, *given: Any, **named: Any) -> Tensor:
        weight = module._parameters.get("weight")  # None: of another form than the norm that was looked at
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or weight is None or named or len(given) > 1:
            return own(module, *given, **named)
        x, norm = given[0], ops_for(weight.device.type).rms_norm
        if norm is reference.rms_norm or x.dtype != weight.dtype:
            return own(module, x)
        return norm(x, weight, getattr(module, eps), offset, rounded)

    fused = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    _forms[fused] = form
    return fused


CLASSES = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}  # of transformers
PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
OF_ATTENTION, OF_MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
TRIAL = 5  # tokens of the comparison
LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the layer's contribution
enabled = True  # benchmarks switch it off


class FusedLayer:
    """The forward of one layer. place: its number in the cache. scoring: of its attention."""

    def __init__(self, layer: Any, place: int, scoring: Scoring, ops: Ops) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._place, self._scoring, self._ops = place, scoring, ops
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._out, self._down = attention.o_proj, mlp.down_proj
        of_input = attention.q_proj, attention.k_proj, attention.v_proj
        self._qkv = joined([one.weight for one in of_input])
        self._qkv_bias = None if attention.q_proj.bias is None else joined([one.bias for one in of_input])
        self._gate_up = joined([mlp.gate_proj.weight, mlp.up_proj.weight])
        width = attention.head_dim
        self._heads = attention.q_proj.out_features // width, attention.k_proj.out_features // width
        self._head_norms = None  # Qwen3 has them
        if hasattr(attention, "q_norm"):
            self._head_norms = attention.q_norm.weight, attention.k_norm.weight, eps_of(attention.q_norm)

    def __call__(
        self,
        hidden_states: Tensor,
        *_unused: Any,
        position_embeddings: tuple[Tensor, Tensor],
        attention_metadata: Any,
        **_more: Any,
    ) -> Tensor:
        """hidden_states [B, N, H] -> [B, N, H]; position_embeddings: cos and sin [B, N, D]."""
        ops, out, down = self._ops, self._out, self._down
        before_attention, before_mlp = self._norms
        x = ops.rms_norm(hidden_states, before_attention.weight, eps_of(before_attention), 0.0, True)
        qkv = ops.linear(x, self._qkv, self._qkv_bias, None)
        attended = self._attend(qkv, position_embeddings, attention_metadata).flatten(2)
        hidden_states = ops.linear(attended, out.weight, out.bias, hidden_states)
        x = ops.rms_norm(hidden_states, before_mlp.weight, eps_of(before_mlp), 0.0, True)
        return ops.linear(ops.gated_linear(x, self._gate_up), down.weight, down.bias, hidden_states)

    def _attend(self, qkv: Tensor, rotation: tuple[Tensor, Tensor], metadata: Any) -> Tensor:
        cos, sin = (one.expand(len(qkv), -1, -1).contiguous() for one in rotation)
        if metadata.in_place:
            pages, starts, first = metadata.places(self._place)
            q, _, _ = self._ops.rotate_joined(qkv, cos, sin, self._heads, self._head_norms, pages, starts, first)
            return metadata.attend_written(q.transpose(1, 2), pages, self._scoring)
        q, k, v = self._ops.rotate_joined(qkv, cos, sin, self._heads, self._head_norms, None, None, 0)
        return metadata.attend(self._place, *(one.transpose(1, 2) for one in (q, k, v)), self._scoring)


def joined(weights: Sequence[Tensor]) -> Tensor:
    """Weights [O, K], or biases [O], one below the other as one tensor, of which they become views: new values that are
    copied into them are those of the whole."""
    whole = _whole_of(weights)
    if whole is None:
        with torch.inference_mode(False), torch.no_grad():  # the model may be trained later
            whole = torch.cat([one.detach() for one in weights])
            for weight, part in zip(weights, whole.split([len(one) for one in weights]), strict=True):
                weight.data = part
    return whole


def _whole_of(weights: Sequence[Tensor]) -> Tensor | None:
    """The tensor that these weights are adjacent rows of; None if they are not."""
    first, width = weights[0], weights[0].shape[1:]
    begin = first.storage_offset()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and weight.is_contiguous()
        if not same or weight.storage_offset() != begin:
            return None
        begin += weight.numel()
    return first.detach().as_strided((sum(map(len, weights)), *width), first.stride(), first.storage_offset())


def eps_of(norm: Any) -> float:
    form = fused_form(norm)
    assert form is not None, "a norm of a fused layer has a known form"
    return float(getattr(norm, form[0]))


class FusedLayers:
    """The layers of a target that run fused inside `running`; other users of the model run transformers' own.

    scorings: of the attention layers, by number. places: their numbers in the cache.
    """

    def __init__(self, target: Target, scorings: Mapping[int, Scoring], places: Mapping[int, int]) -> None:
        ops, checked = ops_for(target.device.type), dict[type, bool]()
        self._calls: dict[nn.Module, Callable[..., Tensor]] = {}
        self._by_kernels = enabled and ops.rms_norm is not reference.rms_norm
        if not enabled or (ops.decoder_layer is None and not self._by_kernels):
            return
        for number, layer in enumerate(target.layers):
            scoring = scorings.get(number)
            if scoring is None or scoring.sinks is not None or not _has_parts(layer):
                continue
            if type(layer) not in checked:
                checked[type(layer)] = _computes_the_same(target, layer, scoring, ops)
            call = _fused_call(layer, places[number], scoring, ops) if checked[type(layer)] else None
            if call is not None:
                self._calls[layer] = call

    def multiplies(self, linear: nn.Module) -> bool:
        """Whether the op `linear` may compute this layer: there are fused layers, and the layer is a plain one."""
        return self._by_kernels and bool(self._calls) and _is_plain(linear)

    def running(self) -> AbstractContextManager[None]:
        """Context manager: these layers run fused, unless gradients are recorded."""
        return replaced({} if torch.is_grad_enabled() else self._calls)


@contextmanager
def replaced(calls: Mapping[nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
    """Context manager: the layers' forwards are these calls. Hooks of the layers still fire. Compiled layers stay."""
    calls = {layer: call for layer, call in calls.items() if "forward" not in layer.__dict__}
    for layer, call in calls.items():
        layer.__dict__["forward"] = call
    try:
        yield
    finally:
        for layer in calls:
            layer.__dict__.pop("forward", None)


def _fused_call(layer: Any, place: int, scoring: Scoring, ops: Ops) -> Callable[..., Tensor] | None:
    """The fused forward of a layer with Llama's parts; None if its weights are of another kind."""
    if ops.decoder_layer is not None:
        return ops.decoder_layer(layer, place, scoring)
    return FusedLayer(layer, place, scoring, ops) if _has_plain_parts(layer) else None


def _has_parts(layer: Any) -> bool:
    """Whether the layer is of a known class and has its parts."""
    of_transformers = type(layer).__module__.startswith("transformers.models.")
    if not of_transformers or type(layer).__name__ not in CLASSES or "forward" in layer.__dict__:
        return False
    return {name for name, _ in layer.named_children()} == PARTS


def _has_plain_parts(layer: Any) -> bool:
    """Whether the layer's parts are plain linear layers that nothing hooks into, and norms of a known form."""
    parts = [(layer.self_attn, OF_ATTENTION), (layer.mlp, OF_MLP)]
    linears: list[Any] = [getattr(owner, name, None) for owner, names in parts for name in names]
    if not all(map(_is_plain, linears)) or any(one.bias is not None for one in linears[4:6]):
        return False
    of_heads = [getattr(layer.self_attn, name) for name in ("q_norm", "k_norm") if hasattr(layer.self_attn, name)]
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *of_heads]
    forms = [fused_form(norm) for norm in norms]
    biases = {one.bias is None for one in linears[:3]}
    return len(biases) == 1 and all(form is not None and form[1:] == (0.0, True) for form in forms)


def _is_plain(linear: Any) -> bool:
    return type(linear) is nn.Linear and not linear._forward_hooks and not linear._forward_pre_hooks


class _Uncached:
    """Attention metadata of the comparison: causal, without a cache."""

    in_place = False

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        return attend_causal(q, k, v, scaling=scoring.scaling)

    def row_attention(self, *_layer: Any) -> None:
        """There is no cache."""


@torch.no_grad()
def _computes_the_same(target: Target, layer: nn.Module, scoring: Scoring, ops: Ops) -> bool:
    """Compare a layer with its fused form by what each adds to random numbers; on a GPU a float32 copy of it."""
    rotary = getattr(target.body, "rotary_emb", None)
    exact, dtype = layer, target.dtype
    if ops.decoder_layer is None:
        exact, dtype, ops = copy.deepcopy(layer).float(), torch.float32, REFERENCE
    if rotary is None:
        return False
    device, generator = target.device, torch.Generator().manual_seed(0)
    x = torch.randn(2, TRIAL, target.hidden_size, generator=generator).to(device, dtype)
    at = torch.arange(TRIAL, device=device).expand(2, -1)
    rotation = rotary(x, at)
    if not isinstance(rotation, tuple) or len(rotation) != 2:
        return False
    metadata: dict[str, Any] = {"position_embeddings": rotation, "attention_metadata": _Uncached()}
    later = torch.full((TRIAL, TRIAL), float("-inf"), device=device, dtype=dtype).triu(1)[None, None]
    # Without a mask, eager attention sees later tokens too.
    mask = later if target.config._attn_implementation == "eager" else None
    theirs = exact(x, attention_mask=mask, position_ids=at, **metadata)
    call = _fused_call(exact, 0, scoring, ops)
    if call is None or not isinstance(theirs, Tensor):
        return False
    ours = call(x, **metadata)
    return ((ours - theirs).norm() <= LARGEST_ERROR[dtype] * (theirs - x).norm()).item()
