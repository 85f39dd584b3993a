"""One kind of decoder layer, or another part of a target or head, as a program: exported once, compiled by Inductor,
kept on disk for the next start.

The layer's weights are inputs of the program, so that one serves all layers of its kind. A program has no guards and
never compiles again: it is for one token, or for a range of numbers of tokens.

Shapes: T tokens of all rows, side by side; H hidden size.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from toolkit.infer.cpu.compile_cpp import compiler, compiler_name, cpu_flags
from toolkit.infer.cpu.layer_runner import Program
from toolkit.infer.cpu.packed_products import C_FUNCTIONS, merge_products, stand_in, teach_inductor
from toolkit.infer.request.errors import CompileError
from toolkit.log import get_logger
from toolkit.targets.cache import build_once, cache_root

logger = get_logger(__name__)

PACKAGE = "layer.pt2"
# How far a compiled layer's output may be from the layer's own, of its size: both round, in another order.
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
Runs = TypeVar("Runs")


@dataclass(frozen=True)
class TokenRange:
    """The numbers of tokens that a program is for; last None: any from `first` on."""

    first: int
    last: int | None

    @property
    def example(self) -> int:
        """The number that a program is traced with and compared on."""
        return self.first if self.first == self.last else self.first + 1

    def __str__(self) -> str:
        if self.first == self.last:
            return f"{self.first} token{'s' if self.first > 1 else ''}"
        return f"{self.first} {'and more' if self.last is None else f'to {self.last}'} tokens"


TOKEN_RANGES = (TokenRange(1, 1), TokenRange(2, None))


def program_for(tokens: int, programs: Mapping[TokenRange, Runs]) -> Runs:
    """Of programs in the order of their ranges."""
    for wanted, program in programs.items():
        if wanted.last is None or tokens <= wanted.last:
            return program
    raise AssertionError(f"no program is for {tokens} tokens")


def allowed_difference(dtype: torch.dtype) -> float:
    """Of a compiled layer's output from the layer's own, of its size."""
    return ALLOWED.get(dtype, ALLOWED[torch.bfloat16])


def difference(got: Tensor, own: Tensor) -> float:
    """How far one is from the other, of its size; infinite for another shape."""
    if got.shape != own.shape or torch.equal(got, own):
        return 0.0 if got.shape == own.shape else torch.inf
    return float((got.float() - own.float()).norm() / own.float().norm())


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Attributes that are set while these are traced go again: they are of no numbers."""
    held: list[dict[str, Any]] = [vars(one) for one in modules]
    held += [of_module[kind] for of_module in held for kind in ("_buffers", "_parameters")]
    before = [dict(one) for one in held]
    try:
        yield
    finally:
        for one, then in zip(held, before, strict=True):
            one.clear()
            one.update(then)


def weights_of(layer: nn.Module) -> dict[str, Tensor]:
    """All that a layer's forward reads of itself, by name."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a layer's keywords, in order; what is not a tensor becomes part of the program."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    found = []
    for inner in value:
        found += tensors_in(inner)
    return found


def _with_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """`value` with its tensors replaced by the next of `tensors`."""
    if isinstance(value, Tensor):
        return tensors.pop(0)
    if isinstance(value, dict):
        return {key: _with_tensors(inner, tensors) for key, inner in value.items()}
    return type(value)(_with_tensors(one, tensors) for one in value) if isinstance(value, (tuple, list)) else value


class _Held(nn.Module):
    """A layer without its hooks, which are called outside of the program."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.layer).forward(self.layer, *args, **kwargs)


class _Call(nn.Module):
    """What is exported: hidden [1, T, H], the tensors of the keywords, the weights -> hidden [1, T, H]; or as another
    part is called, with one tensor [1, T, ..] and keywords."""

    def __init__(self, layer: nn.Module, keywords: dict[str, Any]) -> None:
        super().__init__()
        self._held = (_Held(layer),)  # in a tuple: its weights are not this module's
        self._keywords, self._names = keywords, [f"layer.{name}" for name in weights_of(layer)]

    def forward(self, hidden: Tensor, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        split = len(tensors) - len(self._names)
        weights = dict(zip(self._names, tensors[split:], strict=True))
        keywords = _with_tensors(self._keywords, list(tensors[:split]))
        return torch.func.functional_call(self._held[0], weights, (hidden,), keywords)


def compile_layer(layer: nn.Module, hidden: Tensor, keywords: dict[str, Any], tokens: TokenRange) -> Program:
    """The program of a layer that is called as layer(hidden, **keywords), hidden [1, T, H] with T in `tokens`.

    Taken from the cache if an earlier start compiled it. Raises CompileError, which names the layer and what stands in
    the way.
    """
    inputs = [hidden, *tensors_in(keywords), *(stand_in(weight) for weight in weights_of(layer).values())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PyTorch about its own code
        with unchanged(layer.modules()):
            exported = _exported(layer, hidden, keywords, inputs, tokens)
        return _program(exported, inputs, f"{type(layer).__name__} for {tokens}")


def _program(exported: Any, inputs: Sequence[Tensor], what: str) -> Program:
    """The exported layer as machine code, from the cache or made now."""
    folder = cache_root() / "compiled" / _key(exported, inputs)
    if folder.is_dir():
        logger.info("torch_compile: %s is there from an earlier start", what)
    else:
        check_compiler()
        logger.info("torch_compile: compiling %s; the next start finds it in %s", what, folder.parent)
    build_once(folder, lambda made: _compile(exported, made / PACKAGE, what))
    return Program(folder / PACKAGE)


def check_compiler() -> None:
    """Raises CompileError unless there is the C++ compiler that Inductor would call."""
    if compiler() is None:
        raise CompileError(
            f"torch_compile needs a C++ compiler once, and {compiler_name()} is not there: install it (Debian, Ubuntu: "
            "apt install g++), name another one in CXX, or leave --torch-compile out"
        )


def _exported(
    layer: nn.Module, hidden: Tensor, keywords: dict[str, Any], inputs: Sequence[Tensor], tokens: TokenRange
) -> Any:
    n_weights = len(weights_of(layer))
    dynamic: list[Any] = [None] * len(inputs)
    if tokens.first != tokens.last:
        dim = torch.export.Dim("tokens", min=tokens.first, max=tokens.last)
        dynamic = [{1: dim}] * (len(inputs) - n_weights) + [None] * n_weights
    try:
        exported = torch.export.export(
            _Call(layer, keywords), tuple(inputs), dynamic_shapes=(dynamic[0], tuple(dynamic[1:])), strict=False
        )
    except Exception as error:  # whatever the family's own code raises when it is traced
        raise _refused(layer, f"cannot be traced for {tokens}", error) from error
    if exported.constants or exported.state_dict:
        raise _refused(layer, f"reads tensors that are not its weights: {', '.join(exported.constants)}", None)
    if exported.graph_signature.user_inputs_to_mutate or exported.graph_signature.buffers_to_mutate:
        raise _refused(layer, "writes to what it is called with", None)
    merge_products(exported.graph_module)
    return exported


def _refused(layer: nn.Module, why: str, error: Exception | None) -> CompileError:
    said = "" if error is None else f" ({type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]})"
    return CompileError(f"torch_compile: {type(layer).__name__} {why}{said}; leave --torch-compile out for this target")


def _compile(exported: Any, path: Path, what: str) -> None:
    teach_inductor()
    try:
        options = {"aot_inductor.custom_ops_to_c_shims": C_FUNCTIONS}
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=options)
    except Exception as error:  # the compiler's own words are in the message
        raise CompileError(
            f"torch_compile: compiling {what} failed ({type(error).__name__}); leave --torch-compile out. {error}"
        ) from error


def _key(exported: Any, inputs: Sequence[Tensor]) -> str:
    """Of all that decides the machine code: the traced program, torch, this CPU and the threads that will run it."""
    program = [*_computed(exported.graph), str(exported.range_constraints)]
    layout = [(str(tensor.dtype), tuple(tensor.stride())) for tensor in inputs]
    program += [declaration for declarations in C_FUNCTIONS.values() for declaration in declarations]
    machine = [torch.__version__, torch.backends.cpu.get_cpu_capability(), cpu_flags(), torch.get_num_threads()]
    return hashlib.sha256(repr((program, layout, machine)).encode()).hexdigest()[:32]


def _computed(graph: Graph) -> list[str]:
    """What a graph computes, however its nodes are named and ordered: some bodies go through sets."""
    known: dict[Node, str] = {}
    for place, node in enumerate(graph.nodes):
        what = place if node.op == "placeholder" else node._pretty_print_target(node.target)
        given = map_arg((node.args, node.kwargs), lambda one: known[one])
        said = repr((node.op, what, given, str(node.meta.get("val"))))
        known[node] = hashlib.sha256(said.encode()).hexdigest()
    return sorted(known[node] for node in graph.nodes if not node.users)
