"""Which engines benchmarks/engine_cpu.py starts, by its arguments, and why others have no row.

Ours, with  -compiled  the layers compiled (--torch-compile),  -int8  the target quantised (--quantization). The
head has the bytes that a user gets who says nothing: int8 beside such a target, and where our own products multiply it.

    plain   eagle3-chain   eagle3-tree   eagle3-adaptive (what a user gets who says nothing)   ngram   null

Hugging Face's, with  -compiled  a static cache and torch.compile,  -fp32  where this CPU multiplies float32 faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine_folders import eagle_target, exported, gguf_heads, gguf_targets
from engine_process import first_cores, vllm_environment
from engine_rows import NULL, REFERENCE

from toolkit.bench.side_by_side import BenchError
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.gguf_head import MODEL_FILE
from toolkit.errors import is_for_users
from toolkit.infer.drafters.ngram_drafter import NgramLookup
from toolkit.infer.engine.cpu_door import QUANTIZATIONS
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.targets.cpu_dtype import fastest_cpu_dtype
from toolkit.targets.load import load_config, stated_dtype

# llama.cpp ends a draft before a token of a smaller probability; the fastest of 0, 0.3, 0.5, 0.6 with the demo's head.
SURE = 0.6
# Plain row -> quantisation of its target.
REFERENCES: dict[str, str | None] = {
    f"{REFERENCE}{weights}{compiled}": quantization
    for weights, quantization in (("", None), *((f"-{name}", name) for name in QUANTIZATIONS))
    for compiled in ("", "-compiled")
}


@dataclass(frozen=True)
class Plan:
    """One engine to start. settings: the worker's, beside those that all share.

    equals: the row of REFERENCES with the same weights, whose tokens it has to write; None: weights of its own. over:
    our plain row of the same settings. environment: more variables of its process.
    """

    name: str
    settings: Mapping[str, Any]
    shape: str | None = None
    python: str | None = None
    equals: str | None = REFERENCE
    over: str = REFERENCE
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Plans:
    """Plans so far, and why others are none of them."""

    plans: list[Plan]
    absent: dict[str, str]

    def add(self, name: str, settings: Mapping[str, Any], **more: Any) -> None:
        self.plans.append(Plan(name, settings, **more))

    def prepared(self, name: str, prepare: Callable[[], dict[str, Any]], **more: Any) -> None:
        """With settings that need files written first."""
        try:
            self.add(name, prepare(), **more)
        except Exception as error:
            if not is_for_users(error):
                raise
            self.absent[name] = str(error)


def plans_for(
    args: argparse.Namespace, head: DraftCheckpoint | None, shared: Mapping[str, Any], folder: Path
) -> tuple[list[Plan], dict[str, str]]:
    """The engines of these arguments, and why others have no row. Files that they read are written into `folder`.

    Raises BenchError for a name in --only that is no row of these arguments.
    """
    found = _Plans([], {})
    _add_ours(found, args, head)
    _add_hugging_face(found, args, shared)
    _add_vllm(found, args, head, shared, folder)
    _add_eagle(found, args, head, shared, folder)
    _add_llama_cpp(found, args, head, shared, folder)
    if args.only:
        found.absent["all others"] = f"--only {' '.join(args.only)}"
    return _only(found.plans, args.only), found.absent


def _add_ours(found: _Plans, args: argparse.Namespace, head: DraftCheckpoint | None) -> None:
    chain, tree, lookup = DraftShape.chain(args.chain), DraftShape.parse(args.tree), DraftShape.chain(args.lookup)
    kinds: list[tuple[str, str | None]] = [("chain", chain.as_text()), ("tree", tree.as_text()), ("adaptive", None)]
    if head is None:
        found.absent["ours with a head"] = "no --draft was given"
    for what, option, given in (
        ("-compiled", "--torch-compile", args.torch_compile),
        *((f"-{name}", f"--quantization {name}", name in args.quantization) for name in QUANTIZATIONS),
    ):
        if not given:
            found.absent[f"{REFERENCE}{what} and others {what}"] = f"no {option} was given"
    for quantization in (None, *args.quantization):
        for compiled in sorted({False, args.torch_compile}):
            weights = "" if quantization is None else f"-{quantization}"
            suffix = weights + ("-compiled" if compiled else "")
            settings = {"engine": "ours", "quantization": quantization, "torch_compile": compiled}
            over = REFERENCE + suffix
            found.add(over, settings, equals=REFERENCE + weights, over=over)
            for kind, shape in kinds if head is not None else ():
                drafting = {**settings, "draft": str(args.draft), "shape": shape}
                found.add(f"ours-{head.kind}-{kind}{suffix}", drafting, shape=shape, equals=over, over=over)
            if not suffix:
                null = {"null": True, "draft": "ngram" if head is None else str(args.draft), "shape": chain.as_text()}
                found.add(NULL, {**settings, **null})
                drafting = {**settings, "draft": "ngram", "shape": lookup.as_text()}
                found.add("ours-ngram", drafting, shape=lookup.as_text())


def _add_hugging_face(found: _Plans, args: argparse.Namespace, shared: Mapping[str, Any]) -> None:
    """Eager and compiled; in float32 and with torchao's weights, which have tokens of their own, where there are such.

    float32 has the same weights: its tokens part from ours at near-ties only.
    """
    kinds: list[tuple[str, dict[str, Any], dict[str, Any]]] = [("", {}, {})]
    why_not = _why_no_float32(args.dtype, shared)
    faster = {"dtype": "float32"} if why_not is None else {}
    if faster:
        kinds.append(("-fp32", faster, {}))
    else:
        found.absent["hf-generate-fp32"] = why_not
    if find_spec("torchao") is not None:
        kinds.append(("-torchao-int8", {"torchao": True, **faster}, {"equals": None}))
    else:
        found.absent["hf-generate-torchao-int8"] = "torchao is not installed: pip install torchao"
    for suffix, settings, more in kinds:
        for compiled in sorted({False, args.torch_compile}):
            name = f"hf-generate{suffix}{'-compiled' if compiled else ''}"
            found.add(name, {"engine": "hugging-face", "torch_compile": compiled, **settings}, **more)
        if "torchao" not in settings:
            found.add(f"hf-prompt-lookup{suffix}", {"engine": "hugging-face", "lookup": args.lookup, **settings})
    for name in args.quantization:
        same = {"equals": f"{REFERENCE}-{name}"}
        found.add(f"hf-generate-{name}", {"engine": "hugging-face", "quantization": name}, **same)


def _why_no_float32(dtype: str, shared: Mapping[str, Any]) -> str | None:
    """None: this CPU multiplies float32 faster than the target's bfloat16."""
    if dtype == "auto":
        config, _, _ = load_config(shared["target"], shared["revision"])
        dtype = str(stated_dtype(config)).removeprefix("torch.")
    if dtype == "float32":
        return "all rows are in float32"
    return None if fastest_cpu_dtype().itemsize == 4 else "this CPU multiplies bfloat16 at least as fast as float32"


def _add_vllm(
    found: _Plans, args: argparse.Namespace, head: DraftCheckpoint | None, shared: Mapping[str, Any], folder: Path
) -> None:
    names = ("vllm-cpu", "vllm-cpu-ngram", "vllm-cpu-eagle3")
    chain, lookup = DraftShape.chain(args.chain), DraftShape.chain(args.lookup)
    if args.vllm_python is None:
        found.absent |= dict.fromkeys(names, "no --vllm-python was given")
        return
    own: dict[str, Any] = {"python": args.vllm_python}
    own["environment"] = vllm_environment(args.vllm_python, first_cores(shared["threads"]))
    found.add(names[0], {"engine": "vllm"}, **own)
    sizes = [NgramLookup().min_n, 4]  # vLLM's defaults are 5 and 5
    ngram = {"engine": "vllm", "draft": "ngram", "num_steps": args.lookup, "ngram": sizes}
    found.add(names[1], ngram, shape=lookup.as_text(), **own)
    if head is None or head.kind != "eagle3":
        found.absent[names[2]] = _no_head(head, "eagle3")
        return

    def prepare() -> dict[str, Any]:
        draft = exported(head, "vllm", folder / "vllm-head", shared["target"], shared["revision"], chain)
        return {"engine": "vllm", "draft": draft, "num_steps": args.chain}

    found.prepared(names[2], prepare, shape=chain.as_text(), **own)


def _add_llama_cpp(
    found: _Plans, args: argparse.Namespace, head: DraftCheckpoint | None, shared: Mapping[str, Any], folder: Path
) -> None:
    """Other weights, and other arithmetic even for the same GGUF: its tokens are its own.

    -ngram  its own lookup, of one length (its default, 12, finds nothing in short texts)
    -sure   drafts end where the head is in doubt
    """
    if args.gguf is None:
        found.absent["llama.cpp"] = "no --gguf was given"
        return
    gguf = {"engine": "llama.cpp", "gguf": str(args.gguf.resolve())}
    if args.llama_server is None:
        found.add("llama.cpp", gguf, python=args.llama_python, equals=None)
        found.absent["llama.cpp with a head, and with lookup"] = "no --llama-server was given"
        return
    files = gguf_targets(args.gguf, folder)
    chain, heads = DraftShape.chain(args.chain), {}
    if head is None or head.kind != "eagle3":
        found.absent["llama.cpp with a head"] = _no_head(head, "eagle3")
    else:
        out = exported(head, "gguf", folder / "llama-head", shared["target"], shared["revision"], chain)
        heads = gguf_heads(Path(out) / MODEL_FILE, folder, files)
    for kind, file in files.items():
        settings = {"engine": "llama.cpp", "binary": args.llama_server, "gguf": str(file)}
        name = f"llama.cpp-{kind}"
        found.add(name, settings, equals=None)
        ngram = {"draft": "ngram", "num_steps": args.lookup, "ngram": NgramLookup().min_n}
        lookup = DraftShape.chain(args.lookup)
        found.add(f"{name}-ngram", {**settings, **ngram}, shape=lookup.as_text(), equals=None)
        for suffix, least in (("", 0.0), ("-sure", SURE)) if kind in heads else ():
            drafting = {**settings, "draft": str(heads[kind]), "num_steps": args.chain, "least_probability": least}
            found.add(f"{name}-eagle3{suffix}", drafting, shape=chain.as_text(), equals=None)


def _add_eagle(
    found: _Plans, args: argparse.Namespace, head: DraftCheckpoint | None, shared: Mapping[str, Any], folder: Path
) -> None:
    name, tree = "eagle-own-tree", DraftShape.parse(args.tree)
    if args.eagle_python is None:
        found.absent[name] = "no --eagle-python was given"
        return
    if head is None or head.kind not in ("eagle3", "eagle2"):
        found.absent[name] = _no_head(head, "eagle3 or eagle2")
        return

    def prepare() -> dict[str, Any]:
        return {
            "engine": "eagle",
            "draft": exported(head, "eagle", folder / "eagle-head", shared["target"], shared["revision"], tree),
            "directory": eagle_target(shared["directory"], folder / "eagle-target"),
            "eagle3": head.kind == "eagle3",
            "torch_dtype": args.dtype,
            "num_steps": tree.num_steps,
            "top_k": tree.top_k,
            "num_draft_tokens": tree.num_draft_tokens,
        }

    found.prepared(name, prepare, shape=tree.as_text(), python=args.eagle_python)


def _no_head(head: DraftCheckpoint | None, needed: str) -> str:
    return "no --draft was given" if head is None else f"it takes a head of kind {needed}; --draft has {head.kind}"


def _only(plans: list[Plan], names: list[str] | None) -> list[Plan]:
    """The plans of those names, with the plain rows that they are compared with and the null control of intervals."""
    if not names:
        return plans
    unknown = sorted(set(names) - {plan.name for plan in plans})
    if unknown:
        raise BenchError(f"--only {' '.join(unknown)}: of these arguments come {', '.join(p.name for p in plans)}")
    wanted = [plan for plan in plans if plan.name in names]
    needed = {REFERENCE, NULL, *names, *(plan.over for plan in wanted), *(plan.equals for plan in wanted)}
    needed |= {plan.equals for plan in plans if plan.name in needed}  # of the compiled plain rows
    return [plan for plan in plans if plan.name in needed]
