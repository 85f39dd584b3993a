"""Which operations round a token's numbers by what is computed beside it.

    python benchmarks/bit_sources.py [--target smollm2-135m] [--draft runs/NAME/ckpt] [--variants auto int8]

One request is answered alone, and then under other schedules: in parts, beside other requests, with drafts; without
`deterministic`, and with it. Wherever an operation gets a token's numbers with the same bits and returns others, it is
a source of differences. A row for each schedule and kind of operation: how many of its results are such a source, of
how many, and the first one; a row without an operation where there is none.

Compiled schedules are compared with the request alone by the same compiled target. Its layers are one program between
two attentions: what differs in that is `before` the attention that gets it.
Writes benchmarks/results/bit-sources-<hardware>.json.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deterministic import VARIANTS, WEIGHTS
from results_folder import leave
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from toolkit.bench.acceptance import describe_target
from toolkit.bench.prompts import builtin_prompts
from toolkit.bench.records import command_line, make_record
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.load.load_engine import build_engine, device_of, load_models
from toolkit.infer.request.chat_prompt import chat_ids
from toolkit.infer.request.params import SamplingParams

ATTENTION = "attention"
SPARE_CONTEXT = 64
# Options by schedule; `beside`: so many other requests.
SCHEDULES: dict[str, dict[str, Any]] = {
    "parts of 16": {"chunked_prefill_size": 16},
    "parts of 64": {"chunked_prefill_size": 64},
    "beside 7": {"max_running_requests": 8, "beside": 7},
    "chain 4,1,5": {"shape": "4,1,5"},
    "tree 4,4,16": {"shape": "4,4,16"},
    "tree 5,8,32": {"shape": "5,8,32"},
    "compiled, parts of 16": {"torch_compile": True, "chunked_prefill_size": 16},  # refused under `deterministic`
    "compiled, beside 7": {"torch_compile": True, "max_running_requests": 8, "beside": 7},
    "compiled, chain 4,1,5": {"torch_compile": True, "shape": "4,1,5"},
}


class Event(NamedTuple):
    """An operation of one forward: its name, kind, and the rows [B, N, ..] that it got and returned."""

    name: str
    kind: str
    given: Tensor
    returned: Tensor


@dataclass(frozen=True)
class Call:
    """One forward. ids, positions [B, N]; sees [B, N, N] bool."""

    ids: Tensor
    positions: Tensor
    sees: Tensor
    events: list[Event] = field(default_factory=list)


# By position: the operations in order, each with the bits that it got and returned.
Trace = dict[int, list[tuple[str, str, bytes, bytes]]]


class Recorder:
    """The forwards of an engine's target, as it runs."""

    def __init__(self, engine: Engine) -> None:
        self.calls: list[Call] = []
        self._body_of = engine._forward.target.body
        compiled = getattr(engine._around_step, "__self__", None)
        self._compiled = compiled is not None
        self._holder, self._name = (compiled, "_run_body") if self._compiled else (engine._forward, "run_body")
        self._run = getattr(self._holder, self._name)

    @contextmanager
    def recording(self) -> Iterator[None]:
        leaves = [] if self._compiled else [
            (path, one) for path, one in self._body_of.named_modules() if not list(one.children())
        ]  # fmt: skip
        handles = [one.register_forward_hook(self._hook(path)) for path, one in leaves]
        setattr(self._holder, self._name, self._body)
        try:
            yield
        finally:
            setattr(self._holder, self._name, self._run)
            for handle in handles:
                handle.remove()

    def _body(self, ids: Tensor, positions: Tensor, metadata: Any, states: Any) -> Tensor:
        mask, nodes = getattr(metadata, "_node_mask", None), ids.shape[1]
        causal = torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(len(ids), -1, -1)
        # A root's id is in a buffer of the rounds, which the next round overwrites.
        self.calls.append(Call(ids.clone(), positions.clone(), causal if mask is None else mask.clone()))
        events, given = self.calls[-1].events, ids.clone()[..., None]
        events.append(Event("ids", "ids", given, given))
        out = self._run(ids, positions, _Attending(metadata, self.calls[-1]), states)
        if self._compiled:
            events.append(Event("output", "output", out.clone(), out.clone()))
        return out

    def _hook(self, path: str) -> Any:
        def keep(module: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
            call, first = self.calls[-1], given[0] if given else None
            out = torch.cat(returned, dim=-1) if isinstance(returned, tuple) else returned
            if isinstance(first, Tensor) and first.shape[:2] == out.shape[:2] == call.ids.shape:
                call.events.append(Event(path, type(module).__name__, first.clone(), out))

        return keep

    def trace(self, text: Sequence[int]) -> Trace:
        """What was computed for the tokens of `text`, which the first request has read and written."""
        found: Trace = {}
        for call in self.calls:
            at, ids = call.positions[0].tolist(), call.ids[0].tolist()
            right = [place < len(text) and text[place] == token for place, token in zip(at, ids, strict=True)]
            for node, place in enumerate(at):
                seen = call.sees[0, node].nonzero().flatten().tolist()
                if all(right[one] for one in seen) and (at[0] == 0 or place not in found):
                    found[place] = [(one.name, one.kind, _bits(one.given, node), _bits(one.returned, node))
                                    for one in call.events]  # fmt: skip
        return found


class _Attending:
    """Attention metadata that keeps what its layers compute."""

    def __init__(self, metadata: Any, call: Call) -> None:
        self._metadata, self._call = metadata, call

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Any) -> Tensor:
        out = self._metadata.attend(layer, q, k, v, scoring)
        given = torch.cat([part.transpose(1, 2).flatten(2) for part in (q, k, v)], dim=-1)
        self._call.events.append(Event(f"layers.{layer}", ATTENTION, given, out.clone()))  # compiled code reuses it
        return out


def _bits(rows: Tensor, node: int) -> bytes:
    return rows[0, node].contiguous().flatten().view(torch.uint8).numpy().tobytes()


class Source(NamedTuple):
    """A kind of operation. differs: its results that differ by themselves, of `results`; first: the first of them."""

    differs: int
    results: int
    first: str


def sources(one: Trace, other: Trace) -> dict[str, Source]:
    """The kinds of operations that differ by themselves: in the order of the text, then of layers, as far as the two
    answers have the same tokens. A token's first event has its id.

    An attention's result differs by itself only where no earlier token's differed in this layer. What torch computes
    between two modules counts as `before` the second."""
    counts, totals, first = Counter[str](), Counter[str](), dict[str, str]()
    unequal_keys = set[str]()
    for place in sorted(one.keys() & other.keys()):
        if one[place][0][2] != other[place][0][2]:
            break  # the answers part here, by what differed before: another token's numbers are others
        clean = True  # nothing differed for this token yet
        for (name, kind, given, returned), (_, _, given2, returned2) in zip(one[place], other[place], strict=True):
            source = None
            totals[kind] += 1
            if given != given2:
                source = f"before {kind}" if clean else None
            elif returned != returned2 and not (kind == ATTENTION and name in unequal_keys):
                source = kind
            if kind == ATTENTION and given != given2:
                unequal_keys.add(name)
            clean = clean and given == given2 and returned == returned2
            if source is not None:
                counts[source] += 1
                first.setdefault(source, f"{name}, token {place}")
    return {kind: Source(counts[kind], totals[kind.removeprefix("before ")], where) for kind, where in first.items()}


def traced(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> tuple[list[int], Trace]:
    """The first prompt's text, and the trace of its answer beside the others."""
    recorder = Recorder(engine)
    with recorder.recording():
        request = engine.generate(prompts, params)[0]
    engine.close()
    text = [*request.prompt_ids, *request.output_ids]
    return text, recorder.trace(text)


def rows_of(config: EngineConfig, max_tokens: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of all schedules with these options, and a description of the target."""
    target, draft = load_models(config, device_of(config))
    asked = [one.turns[0] for one in builtin_prompts()]
    texts = [" ".join(asked[first : first + 6]) for first in range(8)]
    most = target.max_context - max_tokens - SPARE_CONTEXT
    prompts = [chat_ids(target.tokenizer, [{"role": "user", "content": text}])[:most] for text in texts]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    rows, alone_by = [], dict[bool, Trace]()
    for name, options in SCHEDULES.items():
        compiled = "torch_compile" in options
        if ("shape" in options and draft is None) or (compiled and config.deterministic):
            continue
        if compiled not in alone_by:
            one = build_engine(config.with_options(torch_compile=compiled), target).engine
            alone_by[compiled] = traced(one, prompts[:1], params)[1]
        alone = alone_by[compiled]
        more = {key: value for key, value in options.items() if key != "beside"}
        engine = build_engine(config.with_options(**more), target, draft if "shape" in more else None).engine
        _, other = traced(engine, prompts[: 1 + options.get("beside", 0)], params)
        row = {
            "schedule": name, "deterministic": config.deterministic, "dtype": str(target.dtype).removeprefix("torch."),
            "quantization": target.quantization, "tokens": len(alone.keys() & other.keys()),
        }  # fmt: skip
        found = sources(alone, other)
        rows += [
            {**row, "operation": kind, "differs": one.differs, "share": one.differs / one.results, "first": one.first}
            for kind, one in found.items()
        ] or [{**row, "operation": None, "differs": 0, "share": 0.0, "first": None}]
    return rows, describe_target(target)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="(default: the one that --draft names)")
    parser.add_argument("--draft")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["auto"], metavar="NAME")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--note", help="what else the machine did, for the record")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    rows, described = list[dict[str, Any]](), dict[str, Any]()
    for variant, flag in product(args.variants, (False, True)):
        dtype, quantization = ("auto", variant) if variant in WEIGHTS else (variant, "none")
        config = EngineConfig(
            target=args.target or (None if args.draft else "smollm2-135m"), draft=args.draft or "none", dtype=dtype,
            quantization=quantization, prefix_cache=False, max_running_requests=1, adaptive=False, deterministic=flag,
        )  # fmt: skip
        more, about = rows_of(config, args.max_tokens)
        rows += more
        described = described or about
        print(f"{variant}, {'with' if flag else 'without'} deterministic: {len(more)} rows", flush=True)
    columns = ("deterministic", "dtype", "quantization", "schedule", "tokens", "operation", "differs", "share", "first")
    table = Table(*columns)
    for row in rows:
        table.add_row(*(f"{row[key]:.3f}" if key == "share" else str(row[key]) for key in columns))
    Console().print(table)
    settings = {"draft": args.draft, "max_tokens": args.max_tokens}
    command = f"python benchmarks/{command_line()}"
    leave(
        make_record("bit_sources", command, settings, rows, target=described, note=args.note), "bit-sources", args.out
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
