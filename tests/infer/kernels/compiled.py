"""Compiles what launches of Triton kernels would run on a GPU that is not there."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature


@dataclass(frozen=True)
class Launch:
    """A launch that was caught instead of run."""

    kernel: JITFunction
    grid: tuple[int, ...]
    given: tuple[Any, ...]
    named: dict[str, Any]  # further arguments, and options of the compiler


def catch_launches(into: list[Launch]) -> None:
    """From now on note every launch of a kernel in `into`, and run none."""

    def catch(kernel: JITFunction, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        into.append(Launch(kernel, tuple(grid), given, named))

    JITFunction.run = catch


@dataclass(frozen=True)
class Variant:
    """What Triton compiles for a launch: types, constants and divisibilities of the arguments, and options."""

    kernel: JITFunction
    types: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    divisible: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    def key(self) -> str:
        return repr((self.kernel.__name__, self.types, self.constants, self.divisible, self.options))


def variant(launch: Launch, capability: int) -> Variant:
    """By Triton's own rules, which read the arguments' values."""
    backend = make_backend(GPUTarget("cuda", capability, 32))
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    bound, kinds, options = bind(*launch.given, **launch.named)
    names, values = list(bound), list(bound.values())
    return Variant(
        launch.kernel,
        {name: kind for name, (kind, _) in zip(names, kinds, strict=True)},
        {(place,): values[place] for place, (kind, _) in enumerate(kinds) if kind == "constexpr"},
        {(place,): backend.parse_attr(key) for place, (_, key) in enumerate(kinds) if isinstance(key, str)},
        options,
    )


@dataclass(frozen=True)
class Compiled:
    """What ptxas says of a kernel: bytes of registers that a thread stores to memory, bytes of shared memory that a
    block takes, registers of a thread."""

    spilled: int
    shared: int
    registers: int


def compile_variant(chosen: Variant, capability: int) -> Compiled:
    """Compile for sm_<capability> down to machine code, which needs no GPU. Raises what the compiler raises."""
    knobs.compilation.always_compile, knobs.nvidia.dump_ptxas_log = True, True
    source = ASTSource(chosen.kernel, chosen.types, chosen.constants, chosen.divisible)
    with redirect_stdout(io.StringIO()) as log:
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=chosen.options)
    spilled, registers = (
        [int(number) for number in re.findall(pattern, log.getvalue())]
        for pattern in (r"(\d+) bytes spill stores", r"Used (\d+) registers")
    )
    assert spilled and made.asm["cubin"], f"ptxas said nothing of {chosen.kernel.__name__}: {log.getvalue()}"
    return Compiled(sum(spilled), made.metadata.shared, max(registers))
