"""Our engine beside what else could be picked on a CPU: same prompts, same number of tokens, one run, greedy.

    python benchmarks/engine_cpu.py --draft runs/smollm2-135m/ckpt --quantization int8 --torch-compile \
        [--vllm-python PATH] [--gguf FILE --llama-server FILE]

Every engine has a process of its own (engine_worker.py), all are loaded before the clock starts, and they take turns
group of prompts by group, the first one rotating, so that whatever the machine does meets all of them alike.

Ours, with  -int8  the target quantised (--quantization):
    plain   eagle3-chain   eagle3-tree   eagle3-adaptive (what a user gets who says nothing)   ngram   null
Hugging Face's, with  -compiled  a static cache and torch.compile (--torch-compile),  -fp32  where this CPU multiplies
    float32 faster,  -torchao-int8  by `pip install torchao`
vLLM's and llama.cpp's: engine_worker.py says what to install.

Their tokens are compared with our plain decoding's, of the same weights. What has no row is named with the reason.
ours-null drafts nothing and has to come out at 1.00. Writes benchmarks/results/engine-<hardware>.json.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import (
    EngineProcess,
    ProgramError,
    Row,
    asked_ids,
    exported,
    first_cores,
    leave,
    parser_of,
    questions,
    ratio,
    set_threads,
    settings_of,
    show,
    target_of,
    vllm_environment,
)

from toolkit.bench.bootstrap import LEAST_GROUPS
from toolkit.bench.near_tie import NOISE_RULE, Divergence, find_divergence, plain_logits
from toolkit.bench.prompts import BUILTIN
from toolkit.bench.side_by_side import BenchError, rotated
from toolkit.checkpoint.draft_dir import DraftCheckpoint, load_draft
from toolkit.checkpoint.gguf_head import MODEL_FILE
from toolkit.errors import exit_status, optional_package
from toolkit.infer.drafters.lookup import NgramLookup
from toolkit.infer.engine.cpu_door import QUANTIZATIONS, load_target
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.log import Progress, get_logger
from toolkit.targets.cache import fastest_cpu_dtype
from toolkit.targets.gguf_file import DEMO_NAME
from toolkit.targets.load import load_config, load_tokenizer, stated_dtype
from toolkit.targets.target import Target

logger = get_logger(__name__)

REFERENCE, NULL = "ours-plain", "ours-null"
WARMUP_TOKENS = 16
SPARE_CONTEXT = 64  # drafts reach behind the last token
# llama.cpp ends a draft before a token of a smaller probability; the fastest of 0, 0.3, 0.5, 0.6 with the demo's head.
SURE = 0.6
NGRAM = (NgramLookup.min_n, 4)  # tokens of the n-grams of vLLM's lookup: with its defaults, 5 and 5, it finds little
TYPES = ("F16", "BF16", "Q8_0", "Q4_0")
BOTH_ENDS = ("token_embd.weight", "output.weight")  # of at least 8 bits, as by llama-quantize
COLUMNS = ("engine", "shape", "batch", "weight_bits", "tokens_per_s", "speedup", "interval", "decode_speedup",
           "accept_length", "host_share", "identical", "near_ties", "unequal")  # fmt: skip
DEFINITIONS = {
    "settings": "what the engine runs with: threads, dtype, compiled or eager, and what else it was told",
    "weight_bits": "bits per weight as the engine holds them, over all parameters of the target",
    "context": "tokens of the longest prompt and its answer",
    "tokens": "tokens written in `seconds`, over all repeats; the same number for every engine of a batch size",
    "seconds": "from the call with token ids to the whole answer: prefill and first token are in it",
    "speedup": "seconds of our plain decoding / seconds, same batch; 95 % bootstrap interval over groups of prompts, "
    f"null below {LEAST_GROUPS} groups; widened by `widened_by`",
    "widened_by": f"{NULL} is plain decoding beside a drafter that no request uses, so its speedup is 1. Where its own "
    "interval lies beside 1, all intervals of its batch are widened on both sides by that factor; null without such an "
    "interval",
    "accept_length": "tokens committed per verify step, bonus included; vllm and llama.cpp count truncated steps too",
    "decode_speedup": "without prefill on both sides, and against `over`, our plain row of the same settings; null for "
    "engines that do not tell prefill apart",
    "decode_speedup_per_accept_length": "the share of what was accepted that became speed",
    "parts": "draft, verify, commit: the rounds' own; prefill: up to the last first token of a group of prompts; "
    "host: the rest of `seconds`",
    "host_share": "(commit + host) / (seconds - prefill); Python work inside draft and verify is not in it",
    "peak_memory_bytes": "largest resident size of the engine's process up to the end of this batch size",
    "tokens_equal": "all answers equal those of `equals`, our plain row of the same weights, or first part from them "
    "at a near-tie; null: no such row",
}
Judge = Callable[[str, int, Sequence[int], Sequence[int]], Divergence | None]
"""(which plain row, number of the prompt, its answer, another one) -> where they part."""


@dataclass(frozen=True)
class Plan:
    """One engine to start. settings: the worker's, beside those that all share.

    equals: our plain row with the same weights, whose tokens it has to write; None: weights of its own. environment:
    more variables of its process.
    """

    name: str
    settings: Mapping[str, Any]
    shape: str | None = None
    equals: str | None = REFERENCE
    python: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def over(self) -> str:
        """Our plain row that its decoding is compared with."""
        return self.equals or REFERENCE


def plans_for(
    args: argparse.Namespace, head: DraftCheckpoint | None, shared: Mapping[str, Any], folder: Path
) -> tuple[list[Plan], dict[str, str]]:
    """The engines of these arguments, and why others have no row. Files that they read are written into `folder`.

    Raises BenchError for a name in --only that is no row of these arguments.
    """
    absent: dict[str, str] = {}
    plans = [*_ours(args, head, absent), *_hugging_face(args, shared, absent)]
    plans += [*_vllm(args, head, shared, folder, absent), *_llama_cpp(args, head, shared, folder, absent)]
    if not args.only:
        return plans, absent
    absent["all others"] = f"--only {' '.join(args.only)}"
    unknown = sorted(set(args.only) - {plan.name for plan in plans})
    if unknown:
        raise BenchError(f"--only {' '.join(unknown)}: of these arguments come {', '.join(p.name for p in plans)}")
    # With the plain rows that they are compared with, and the null control of intervals.
    needed = {REFERENCE, NULL, *args.only, *(plan.equals for plan in plans if plan.name in args.only)}
    return [plan for plan in plans if plan.name in needed], absent


def _ours(args: argparse.Namespace, head: DraftCheckpoint | None, absent: dict[str, str]) -> Iterator[Plan]:
    chain, lookup = DraftShape.chain(args.chain).as_text(), DraftShape.chain(args.lookup).as_text()
    shapes = {"chain": chain, "tree": DraftShape.parse(args.tree).as_text(), "adaptive": None}
    if head is None:
        absent["ours with a head"] = "no --draft was given"
    for name in set(QUANTIZATIONS).difference(args.quantization):
        absent[f"{REFERENCE}-{name} and others -{name}"] = f"no --quantization {name} was given"
    for quantization in (None, *args.quantization):
        suffix = "" if quantization is None else f"-{quantization}"
        settings, plain = {"engine": "ours", "quantization": quantization}, REFERENCE + suffix
        yield Plan(plain, settings, equals=plain)
        for kind, shape in shapes.items() if head is not None else ():
            drafting = {**settings, "draft": str(args.draft), "shape": shape}
            yield Plan(f"ours-{head.kind}-{kind}{suffix}", drafting, shape, plain)
        if not suffix:
            unused = {"null": True, "draft": "ngram" if head is None else str(args.draft), "shape": chain}
            yield Plan(NULL, {**settings, **unused})
            yield Plan("ours-ngram", {**settings, "draft": "ngram", "shape": lookup}, lookup)


def _hugging_face(args: argparse.Namespace, shared: Mapping[str, Any], absent: dict[str, str]) -> Iterator[Plan]:
    """Eager and compiled; in float32 and with torchao's weights, which have tokens of their own, where there are such.

    float32 has the same weights: its tokens part from ours at near-ties only.
    """
    kinds: dict[str, dict[str, Any]] = {"": {}}
    why_not = _why_no_float32(args.dtype, shared)
    faster = {"dtype": "float32"} if why_not is None else {}
    if faster:
        kinds["-fp32"] = faster
    else:
        absent["hf-generate-fp32"] = why_not
    if find_spec("torchao") is not None:
        kinds["-torchao-int8"] = {"torchao": True, **faster}
    else:
        absent["hf-generate-torchao-int8"] = "torchao is not installed: pip install torchao"
    for suffix, more in kinds.items():
        settings, equals = {"engine": "hugging-face", **more}, None if "torchao" in more else REFERENCE
        yield Plan(f"hf-generate{suffix}", settings, equals=equals)
        if args.torch_compile:
            yield Plan(f"hf-generate{suffix}-compiled", {**settings, "torch_compile": True}, equals=equals)
        if "torchao" not in more:
            yield Plan(f"hf-prompt-lookup{suffix}", {**settings, "lookup": args.lookup})
    for name in args.quantization:
        same = f"{REFERENCE}-{name}"
        yield Plan(f"hf-generate-{name}", {"engine": "hugging-face", "quantization": name}, equals=same)


def _why_no_float32(dtype: str, shared: Mapping[str, Any]) -> str | None:
    """None: this CPU multiplies float32 faster than the target's bfloat16."""
    if dtype == "auto":
        config, _, _ = load_config(shared["target"], shared["revision"])
        dtype = str(stated_dtype(config)).removeprefix("torch.")
    if dtype == "float32":
        return "all rows are in float32"
    return None if fastest_cpu_dtype().itemsize == 4 else "this CPU multiplies bfloat16 at least as fast as float32"


def _vllm(
    args: argparse.Namespace,
    head: DraftCheckpoint | None,
    shared: Mapping[str, Any],
    folder: Path,
    absent: dict[str, str],
) -> Iterator[Plan]:
    names = ("vllm-cpu", "vllm-cpu-ngram", "vllm-cpu-eagle3")
    if args.vllm_python is None:
        absent |= dict.fromkeys(names, "no --vllm-python was given")
        return
    own: dict[str, Any] = {"python": args.vllm_python}
    own["environment"] = vllm_environment(args.vllm_python, first_cores(shared["threads"]))
    yield Plan(names[0], {"engine": "vllm"}, **own)
    ngram = {"engine": "vllm", "draft": "ngram", "num_steps": args.lookup, "ngram": list(NGRAM)}
    yield Plan(names[1], ngram, DraftShape.chain(args.lookup).as_text(), **own)
    chain = DraftShape.chain(args.chain)
    draft = exported(head, "vllm", folder / "vllm-head", shared, chain, names[2], absent)
    if draft is not None:
        yield Plan(names[2], {"engine": "vllm", "draft": draft, "num_steps": args.chain}, chain.as_text(), **own)


def _llama_cpp(
    args: argparse.Namespace,
    head: DraftCheckpoint | None,
    shared: Mapping[str, Any],
    folder: Path,
    absent: dict[str, str],
) -> Iterator[Plan]:
    """Other weights, and other arithmetic even for the same GGUF: its tokens are its own.

    -ngram  its own lookup, of one length (its default, 12, finds nothing in short texts)
    -sure   drafts end where the head is in doubt
    The head is as it is beside BF16, else in 8 bits, as beside our quantised targets.
    """
    if args.gguf is None or args.llama_server is None:
        absent["llama.cpp"] = "no --gguf and --llama-server were given"
        return
    chain, lookup = DraftShape.chain(args.chain), DraftShape.chain(args.lookup).as_text()
    draft = exported(head, "gguf", folder / "llama-head", shared, chain, "llama.cpp with a head", absent)
    whole = None if draft is None else Path(draft) / MODEL_FILE
    packed = None if whole is None else requantised(whole, "Q8_0", folder / "head-Q8_0.gguf")
    for kind, file in gguf_targets(args.gguf, folder).items():
        settings, name = {"engine": "llama.cpp", "binary": args.llama_server, "gguf": str(file)}, f"llama.cpp-{kind}"
        yield Plan(name, settings, equals=None)
        ngram = {"draft": "ngram", "num_steps": args.lookup, "ngram": NGRAM[0]}
        yield Plan(f"{name}-ngram", {**settings, **ngram}, lookup, None)
        for suffix, least in (("", 0.0), ("-sure", SURE)) if whole is not None else ():
            head_file = whole if kind in ("bf16", "f16", "f32") else packed
            drafting = {"draft": str(head_file), "num_steps": args.chain, "least_probability": least}
            yield Plan(f"{name}-eagle3{suffix}", {**settings, **drafting}, chain.as_text(), None)


def gguf_targets(file: Path, out: Path) -> dict[str, Path]:
    """Type of the matrices -> file: the given one, and its weights in BF16, Q8_0 and Q4_0."""
    reader = optional_package("gguf", "--gguf").GGUFReader(file)
    types = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    own = types["blk.0.ffn_up.weight"].name
    made = {kind: requantised(file, kind, out / f"{file.stem}-{kind}.gguf") for kind in TYPES if kind != own}
    return {kind.lower(): path for kind, path in (made | {own: file.resolve()}).items()}


def requantised(file: Path, kind: str, out: Path) -> Path:
    """A copy of a GGUF file with its matrices in another type, BOTH_ENDS in Q8_0 beside a type of 4 bits."""
    gguf = optional_package("gguf", "--gguf")
    reader, wanted = gguf.GGUFReader(file), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            nested = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), entry.types[0], sub_type=nested)
    for tensor in reader.tensors:
        data, given = tensor.data, tensor.tensor_type
        if len(tensor.shape) == 2:
            ends = kind == "Q4_0" and tensor.name in BOTH_ENDS
            new = gguf.GGMLQuantizationType.Q8_0 if ends else wanted
            data, given = gguf.quantize(gguf.dequantize(data, given), new), new
        writer.add_tensor(tensor.name, data, raw_dtype=given)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@dataclass(frozen=True)
class Run:
    """One group of prompts answered once. first: number of its first prompt. reply: the worker's."""

    engine: str
    batch: int
    repeat: int
    first: int
    reply: Mapping[str, Any]


@dataclass
class Rivals:
    """Engines that were loaded, and for the others why they were not."""

    plans: list[Plan]
    processes: dict[str, EngineProcess] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def drop(self, name: str, why: object) -> None:
        if name == REFERENCE:
            raise BenchError(f"{REFERENCE}, which all others are compared with, failed: {why}")
        logger.warning("%s is left out: %s", name, why)
        self.left_out[name] = str(why)
        self.processes.pop(name, None)


def start(rivals: Rivals, shared: Mapping[str, Any], threads: int, stack: contextlib.ExitStack) -> None:
    """Load every engine, one after the other: two loads at once would fight for the cores and the memory."""
    for plan in rivals.plans:
        logger.info("loading %s", plan.name)
        process = stack.enter_context(
            EngineProcess({**shared, **plan.settings}, threads, plan.python, plan.environment)
        )
        try:
            process.wait_until_loaded()
        except ProgramError as error:
            rivals.drop(plan.name, error)
        else:
            rivals.processes[plan.name] = process


def race(
    rivals: Rivals, prompts: Sequence[Sequence[int]], batches: Sequence[int], max_tokens: int, repeats: int
) -> list[Run]:
    """Every engine answers every full group of every batch size, `repeats` times; smaller batches first, so that the
    peak memory of each is its own. An engine that fails on the way is left out whole."""
    runs: list[Run] = []
    for batch in sorted(batches):
        groups = range(0, len(prompts) - batch + 1, batch)
        loaded = [plan for plan in rivals.plans if plan.name in rivals.processes]
        names = []
        for plan in loaded:
            most = rivals.processes[plan.name].most
            if most is None or batch <= most:
                names.append(plan.name)
            else:
                rivals.left_out[f"{plan.name}, batch {batch}"] = f"it takes {most} prompt at a time"
        for name in names:
            _ask(rivals, name, prompts[:batch], min(WARMUP_TOKENS, max_tokens))
        with Progress(len(groups) * repeats, f"batch {batch}, {len(names)} engines", "turn") as progress:
            for repeat in range(repeats):
                for place, first in enumerate(groups):
                    for name in rotated(names, place + repeat):
                        reply = _ask(rivals, name, prompts[first : first + batch], max_tokens)
                        if reply is not None:
                            runs.append(Run(name, batch, repeat, first, reply))
                    progress.update()
    return [run for run in runs if run.engine in rivals.processes]


def _ask(rivals: Rivals, name: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any] | None:
    """The reply; None once the engine has failed."""
    if name not in rivals.processes:
        return None
    try:
        reply = rivals.processes[name].answer(prompts, max_tokens)
    except ProgramError as error:
        rivals.drop(name, error)
        return None
    lengths = {len(written) for written in reply["output_ids"]}
    if lengths != {max_tokens}:
        rivals.drop(name, f"answers of {sorted(lengths)} tokens came; {max_tokens} were asked for")
        return None
    return reply


def judge_of(target_settings: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> Judge:
    """Compares answers; loads the target, quantised or not, when two of them part for the first time."""

    @cache
    def target(reference: str) -> Target:
        quantization = reference.removeprefix(REFERENCE).removeprefix("-") or None
        settings = {**target_settings, "quantization": quantization}
        return load_target(settings.pop("target"), **settings)

    def judge(reference: str, place: int, plain: Sequence[int], other: Sequence[int]) -> Divergence | None:
        if list(plain) == list(other):
            return None
        exact = target(reference)
        return find_divergence(plain, other, lambda ids: plain_logits(exact, [*prompts[place], *ids]), exact.dtype)

    return judge


def rows_of(
    rivals: Rivals, runs: Sequence[Run], prompts: Sequence[Sequence[int]], max_tokens: int, judge: Judge
) -> list[Row]:
    """One row an engine and batch size, in the order of the plans. Runs of `REFERENCE` must be there."""
    rows = []
    for batch in sorted({run.batch for run in runs}):
        of = {one.name: [run for run in runs if (run.engine, run.batch) == (one.name, batch)] for one in rivals.plans}
        for plan in rivals.plans:
            mine, process = of[plan.name], rivals.processes.get(plan.name)
            if not mine or process is None:
                continue
            rows.append({
                "engine": plan.name, "version": process.version, "settings": process.settings,
                "weight_bits": process.weight_bits, "shape": plan.shape, "batch": batch,
                **_work(mine, prompts, max_tokens), **_speed(mine, of[REFERENCE]),
                **_decoding(mine, of.get(plan.over, [])), "over": plan.over, "equals": plan.equals,
                **_equality(mine, plan.equals, _answers(runs, plan.equals), judge),
            })  # fmt: skip
        _widen([row for row in rows if row["batch"] == batch])
    return rows


def _widen(mine: Sequence[Row]) -> None:
    """The rows of a batch size: their intervals become as wide as the null control asks."""
    low, high = next((row["interval"] for row in mine if row["engine"] == NULL), (None, None))
    factor = None if low is None else max(low, 1 / high, 1.0)
    for row in mine:
        row["widened_by"] = factor
        if factor is not None and row["engine"] != REFERENCE and row["interval"][0] is not None:
            row["interval"] = [row["interval"][0] / factor, row["interval"][1] * factor]


def _answers(runs: Sequence[Run], engine: str | None) -> dict[int, list[int]]:
    """By number of the prompt: what that engine wrote first."""
    answers: dict[int, list[int]] = {}
    for run in runs:
        if run.engine == engine:
            for place, written in enumerate(run.reply["output_ids"], start=run.first):
                answers.setdefault(place, written)
    return answers


def _work(mine: Sequence[Run], prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
    once = [run for run in mine if run.repeat == 0]
    places = [run.first + i for run in once for i in range(len(run.reply["output_ids"]))]
    peaks = [run.reply["peak_memory_bytes"] for run in mine]
    return {
        "prompts": len(places),
        "repeats": 1 + max(run.repeat for run in mine),
        "context": max(len(prompts[place]) for place in places) + max_tokens,
        "tokens": sum(len(written) for run in mine for written in run.reply["output_ids"]),
        "peak_memory_bytes": None if None in peaks else max(peaks),
    }


def _speed(mine: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Tokens a second, over plain decoding's, and seconds by part, which sum up to `seconds`; none for an engine that
    does not tell them."""
    seconds = sum(run.reply["seconds"] for run in mine)
    tokens = sum(len(written) for run in mine for written in run.reply["output_ids"])
    speedup, interval = ratio(_by_group(plain), _by_group(mine))
    row = {"seconds": seconds, "tokens_per_s": tokens / seconds, "speedup": speedup, "interval": interval}
    if "parts" not in mine[0].reply:
        return {**row, "parts": {}, "host_share": None}
    parts = {name: sum(run.reply["parts"][name] for run in mine) for name in mine[0].reply["parts"]}
    parts["host"] = seconds - sum(parts.values())
    return {**row, "parts": parts, "host_share": (parts["commit"] + parts["host"]) / (seconds - parts["prefill"])}


def _decoding(mine: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Without prefill, against plain decoding of the same settings."""
    steps, speedup = sum(run.reply.get("verify_steps", 0) for run in mine), None
    length = 1 + sum(run.reply["accepted"] for run in mine) / steps if steps else None
    if "parts" in mine[0].reply and plain:
        ours, theirs = (sum(one.reply["seconds"] - one.reply["parts"]["prefill"] for one in of) for of in (mine, plain))
        speedup = theirs / ours
    share = None if length is None or speedup is None else speedup / length
    return {"accept_length": length, "decode_speedup": speedup, "decode_speedup_per_accept_length": share}


def _by_group(runs: Sequence[Run]) -> list[float]:
    """Seconds of each group of prompts over its repeats, in the order of the prompts."""
    seconds: dict[int, float] = {}
    for run in runs:
        seconds[run.first] = seconds.get(run.first, 0.0) + run.reply["seconds"]
    return [seconds[first] for first in sorted(seconds)]


def _equality(
    mine: Sequence[Run], reference: str | None, written: Mapping[int, Sequence[int]], judge: Judge
) -> dict[str, Any]:
    if reference is None or not written:
        return dict.fromkeys(("tokens_equal", "identical", "near_ties", "unequal"))
    parted = [
        judge(reference, place, written[place], answer)
        for run in mine
        if run.repeat == 0
        for place, answer in enumerate(run.reply["output_ids"], start=run.first)
    ]
    near = [found.near_tie for found in parted if found is not None]
    found = {"tokens_equal": all(near), "identical": len(parted) - len(near)}
    return {**found, "near_ties": near.count(True), "unequal": near.count(False)}


def arguments() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, limit=16, max_tokens=64, batch=[1, 16], repeats=2)
    parser.add_argument("--draft", type=Path, metavar="DIR", help="draft directory of the head (else none is measured)")
    parser.add_argument("--target", help=f"default: the one that --draft names, else {DEMO_NAME}")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--quantization", nargs="*", choices=QUANTIZATIONS, default=[], help="rows with such a target")
    parser.add_argument("--torch-compile", action="store_true", help="also Hugging Face's compiled")
    parser.add_argument("--chain", type=int, default=3, metavar="STEPS", help="the head's chain (default: 3)")
    parser.add_argument("--tree", default="4,4,16", metavar="S,K,N", help="the head's tree (default: 4,4,16)")
    parser.add_argument("--lookup", type=int, default=4, metavar="N", help="drafts of n-gram lookup (default: 4)")
    parser.add_argument("--prompts", metavar="FILE", help="in MT-bench's field style (default: the 40 built-in ones)")
    parser.add_argument("--only", nargs="+", metavar="ENGINE", help=f"these rows, and {REFERENCE}")
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter of an environment with vLLM's CPU build")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the target in llama.cpp's form")
    parser.add_argument("--llama-server", metavar="FILE", help="llama.cpp's server, for rows of --gguf's weights")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    threads = set_threads()
    head = None if args.draft is None else load_draft(args.draft)
    name, revision = target_of(args, head)
    tokenizer = load_tokenizer(name, revision)
    prompts = asked_ids(tokenizer, questions(args.limit, max(args.batch), args.prompts))
    target = {"target": name, "revision": revision, "dtype": args.dtype}
    longest = max(len(prompt) for prompt in prompts) + args.max_tokens
    shared = {
        **target, "directory": tokenizer.name_or_path, "draft": None, "shape": None, "lookup": None,
        "quantization": None, "torch_compile": False, "threads": threads, "max_running_requests": max(args.batch),
        "context_length": longest + SPARE_CONTEXT,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="engine-cpu-")))
        plans, absent = plans_for(args, head, shared, folder)
        rivals = Rivals(plans, left_out=absent)
        start(rivals, shared, threads, stack)
        runs = race(rivals, prompts, args.batch, args.max_tokens, args.repeats)
    rows = rows_of(rivals, runs, prompts, args.max_tokens, judge_of(target, prompts))
    title = f"{name}, {len(prompts)} prompts, {args.max_tokens} tokens each, greedy, {threads} threads"
    show(rows, COLUMNS, title, rivals.left_out)
    more = {**target, "prompts": args.prompts or BUILTIN, "threads": threads, "temperature": 0.0, "ignore_eos": True}
    definitions = {**DEFINITIONS, "near_ties": NOISE_RULE}
    leave(args, "engine", "engine", settings_of(args, **more), rows, left_out=rivals.left_out, definitions=definitions)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
