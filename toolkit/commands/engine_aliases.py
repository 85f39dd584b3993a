"""Flags of SGLang and vLLM for options of ours, so that a start script written for them needs no change.

`translate` replaces them by our options. A flag without an equivalent is refused by name, with what to use instead.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolkit.commands.model_arguments import OPTIONS, Arguments, flag_of
from toolkit.head_kinds import SHAPE_PRESETS
from toolkit.infer.load.config import NATIVE, NGRAM, ConfigError


class Alias(NamedTuple):
    """A flag of another server. option: ours that takes its value; None: translated with others. metavar None: a
    switch, which sets `option` to `value`."""

    option: str | None
    metavar: str | None
    text: str
    kind: type = str
    value: Any = None


ALIASES = {
    "model_path": Alias("target", "MODEL", "SGLang's --target"),
    "model": Alias("target", "MODEL", "vLLM's --target"),
    "speculative_algorithm": Alias(
        None,
        "NAME",
        "SGLang's: EAGLE, EAGLE3, NEXTN, DFLASH or DSPARK (the head of --draft, which must be of that kind; EAGLE and "
        "NEXTN without --draft: the target's own MTP module), or NGRAM for --draft ngram",
    ),
    "speculative_draft_model_path": Alias("draft", "DIR", "SGLang's --draft"),
    "speculative_draft_model": Alias("draft", "DIR", "SGLang's --draft"),
    "speculative_num_steps": Alias(None, "S", "SGLang's S of --shape", int),
    "speculative_eagle_topk": Alias(None, "K", "SGLang's K of --shape; without it drafts are chains", int),
    "speculative_num_draft_tokens": Alias(None, "N", "SGLang's N of --shape", int),
    "speculative_token_map": Alias("token_map", "FILE", "SGLang's --token-map"),
    "speculative_adaptive": Alias("adaptive", None, "SGLang's --adaptive", value=True),
    "speculative_config": Alias(
        None,
        "JSON",
        'vLLM\'s --draft and --shape: \'{"method": "eagle3", "model": "DIR", "num_speculative_tokens": 4}\'',
    ),
    "tp_size": Alias("tensor_parallel_size", "N", "SGLang's --tensor-parallel-size", int),
    "max_model_len": Alias("context_length", "N", "vLLM's --context-length", int),
    "max_num_seqs": Alias("max_running_requests", "N", "vLLM's --max-running-requests", int),
    "disable_radix_cache": Alias("prefix_cache", None, "SGLang's --no-prefix-cache", value=False),
    "enable_deterministic_inference": Alias("deterministic", None, "SGLang's --deterministic", value=True),
    "enable_torch_compile": Alias("torch_compile", None, "SGLang's --torch-compile", value=True),
    "enforce_eager": Alias("disable_cuda_graph", None, "vLLM's --disable-cuda-graph", value=True),
}
# SGLang's algorithms and vLLM's methods -> kinds of heads
BLOCKS = ("dspark", "block")
ALGORITHMS = {
    "EAGLE": ("eagle2", "mtp"), "EAGLE3": ("eagle3",), "NEXTN": ("mtp",), "DFLASH": ("dspark",), "DSPARK": BLOCKS,
}  # fmt: skip
METHODS = {"eagle": ("eagle2",), "eagle3": ("eagle3",), "mtp": ("mtp",), "dflash": ("dspark",), "dspark": BLOCKS}

_LOSSLESS = "drafts never change the distribution of answers here: leave it out, or choose a rule with --verify"
_HEADS = "the head and its layers are read from its checkpoint: leave it out"
_LOOKUP = "use --lookup, with --lookup-corpus FILE for a corpus; its matches need no settings"
_BY_LOAD = "adaptive drafting measures while it serves, and `toolkit search` finds the shape by running requests"
_ONE_ATTENTION = "the engine has one attention per device: leave it out"
_ONE_FORMAT = "the cache has the number format of the target (--dtype): leave it out"
# Flags without an equivalent -> what to do. "*" at the end: all that begin so.
REFUSED = {
    "speculative-accept-threshold-*": _LOSSLESS,
    "speculative-use-rejection-sampling": "use --verify rejection",
    "speculative-use-block-verification": "use --verify block",
    "speculative-draft-model-revision": "write it after the head's hub id: --draft org/name@revision",
    "speculative-draft-model-quantization": "use --draft-quantization",
    "speculative-draft-window-size": _HEADS,
    "speculative-draft-attention-backend": _ONE_ATTENTION,
    "speculative-draft-*": _HEADS,
    "speculative-attention-mode": _ONE_ATTENTION,
    "speculative-adaptive-config": _BY_LOAD,
    "speculative-ngram-*": _LOOKUP,
    "speculative-dflash-*": "a block is read from its checkpoint; --shape S,1,N drafts fewer tokens of it",
    "speculative-dspark-*": "a block is read from its checkpoint; --draft-confidence ends its chains early",
    "speculative-model": "use --draft",
    "speculative-*": "drafting is set by --draft, --shape, --adaptive, --lookup and --verify",
    "num-speculative-tokens": "use --shape S,1,N, a chain of S drafted tokens with N = S + 1",
    "attention-backend": _ONE_ATTENTION,
    "kv-cache-dtype": _ONE_FORMAT,
    "gpu-memory-utilization": "it counts the weights too; use --mem-fraction-static, the cache's share of what is free",
    "max-num-batched-tokens": "use --chunked-prefill-size",
    "enable-prefix-caching": "it is on: leave it out (--no-prefix-cache switches it off)",
    "no-enable-prefix-caching": "use --no-prefix-cache",
    "data-parallel-size": "start one server per replica behind a load balancer",
    "dp-size": "start one server per replica behind a load balancer",
    "pipeline-parallel-size": "use --tensor-parallel-size",
    "pp-size": "use --tensor-parallel-size",
    "enable-metrics": "metrics are always at /metrics: leave it out",
    "decode-log-interval": "it counts steps; use --log-interval, in seconds",
    "log-level": "set TOOLKIT_LOG in the environment",
    "enable-lora": "adapters are not supported: merge the adapter into the target",
    "lora-paths": "adapters are not supported: merge the adapter into the target",
}
# Keys of --speculative-config without an equivalent -> what to do
REFUSED_KEYS = {
    "prompt_lookup_max": "lookup matches 2 to 4 tokens, the longest first: leave it out",
    "prompt_lookup_min": "lookup matches 2 to 4 tokens, the longest first: leave it out",
    "draft_tensor_parallel_size": "the head is divided as the target is: leave it out",
    "quantization": "use --draft-quantization",
    "max_model_len": "use --context-length, for target and head",
    "enforce_eager": "use --disable-cuda-graph, for target and head",
    "disable_by_batch_size": _BY_LOAD,
    "num_speculative_tokens_per_batch_size": _BY_LOAD,
    "speculative_token_tree": "use --shape S,K,N",
    "rejection_sample_method": "use --verify",
    "draft_sample_method": "use --verify",
    "acceptance_method": "use --verify",
    "posterior_threshold": _LOSSLESS,
    "posterior_alpha": _LOSSLESS,
    "synthetic_acceptance_length": "for benchmarks: toolkit bench acceptance --force-accept-length",
    "synthetic_acceptance_rates": "for benchmarks: toolkit bench acceptance --force-accept-length",
    "attention_backend": _ONE_ATTENTION,
    "code_revision": "code of a model's repository is never run: leave it out",
    "draft_load_config": _HEADS,
    "parallel_drafting": _HEADS,
    **dict.fromkeys(("disable_padded_drafter_batch", "use_local_argmax_reduction"), "leave it out"),
    **{f"suffix_decoding_{end}": _LOOKUP for end in ("max_tree_depth", "max_spec_factor", "min_token_prob")},
}
KEYS = (
    "method", "model", "revision", "num_speculative_tokens", "draft_token_map",
)  # fmt: skip

Told = tuple[str, str, Any]  # where it was given, our option, its value


def add_alias_arguments(group: Arguments) -> None:
    """Add the flags; only those that are given appear in the parsed arguments."""
    for name, alias in ALIASES.items():
        settings: dict[str, Any] = {"dest": name, "help": alias.text, "default": argparse.SUPPRESS}
        if alias.metavar is None:
            settings["action"] = "store_true"
        else:
            settings |= {"metavar": alias.metavar, "type": alias.kind}
        group.add_argument(flag_of(name), **settings)


def refuse_without_equivalent(names: Sequence[str]) -> None:
    """Raise ConfigError for the first flag that has no equivalent here. names: without the leading dashes."""
    for name in names:
        for known, advice in REFUSED.items():
            if name == known or (known[-1] == "*" and name.startswith(known[:-1]) and f"--{name}" not in _FLAGS):
                raise ConfigError(f"--{name} has no equivalent here: {advice}")


_FLAGS = {flag_of(name) for name in ALIASES}


def translate(args: argparse.Namespace) -> None:
    """Replace the flags of other servers in `args` by our options; `args.draft_kinds` says what they ask of the head.

    Raises ConfigError if one is not understood, or contradicts another."""
    given = {name: vars(args).pop(name) for name in ALIASES if name in args}
    told: list[Told] = [(flag_of(name), name, value) for name, value in vars(args).items() if name in OPTIONS]
    for name, value in given.items():
        alias = ALIASES[name]
        if alias.option is not None:
            told.append((flag_of(name), alias.option, value if alias.metavar else alias.value))
    told += _shape(given)
    settings = _speculative_config(given.get("speculative_config"))
    told += _of_vllm(settings, _only(told, "target"))
    drafts = _only(told, "draft") is not None
    told += _of_algorithm(given.get("speculative_algorithm"), drafts=drafts)
    for option, value in _agreed(told):
        setattr(args, option, value)
    args.draft_kinds = dict(_kinds(given, settings))


def check_draft_kind(args: argparse.Namespace, kind: str | None) -> None:
    """Raise ConfigError if the loaded head is of another kind than a flag says. kind: None if nothing is drafted."""
    for where, kinds in args.draft_kinds.items():
        if kind is not None and kind not in kinds:
            raise ConfigError(
                f"{where} is for heads of the kind {' or '.join(kinds)}, and the draft is of the kind {kind}; leave it "
                "out (a draft states its kind), or give another draft"
            )


def _only(told: Sequence[Told], option: str) -> Any:
    return next((value for _, name, value in told if name == option), None)


def _agreed(told: Sequence[Told]) -> Iterator[tuple[str, Any]]:
    """Each option with its value. Raises ConfigError if two flags give it different ones."""
    first: dict[str, tuple[str, Any]] = {}
    for where, option, value in told:
        earlier, same = first.setdefault(option, (where, value))
        if _plain(option, same) != _plain(option, value):
            raise ConfigError(f"{earlier} ({_text(same)}) and {where} ({_text(value)}) contradict each other; give one")
    for option, (_, value) in first.items():
        yield option, value


def _plain(option: str, value: Any) -> Any:
    """A value in the form in which equal ones are equal."""
    return SHAPE_PRESETS.get(value, value).replace(" ", "") if option == "shape" else value


def _text(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _shape(given: Mapping[str, Any]) -> list[Told]:
    """SGLang's three numbers as a shape. What is left out is that of a chain."""
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    numbers: list[Any] = [given.get(name) for name in names]
    steps, k, nodes = numbers
    where = " ".join(f"{flag_of(name)} {given[name]}" for name in names if name in given)
    if not where:
        return []
    chain = k in (None, 1) and (steps is None or nodes is None or k == 1 or nodes == steps + 1)
    lacking = [name for name in names if name not in given]
    if steps is None and nodes is None or lacking and not chain:
        raise ConfigError(f"{where} needs {' and '.join(map(flag_of, lacking))} too; in short: --shape S,K,N")
    steps = nodes - 1 if steps is None else steps
    nodes = steps + 1 if nodes is None else nodes
    return [(where, "shape", f"{steps},{k or 1},{nodes}")]


def _of_algorithm(name: str | None, *, drafts: bool) -> list[Told]:
    """drafts: a draft is given, whose kind is checked once it is loaded (check_draft_kind)."""
    if name is None:
        return []
    where = f"--speculative-algorithm {name}"
    if name.upper() == "NGRAM":
        return [(where, "draft", NGRAM)]
    if name.upper() not in ALGORITHMS:
        raise ConfigError(
            f"{where} is not supported; {', '.join(ALGORITHMS)} and NGRAM are. Beside a head, --lookup drafts what "
            "followed the same words earlier"
        )
    if drafts:
        return []
    if "mtp" not in ALGORITHMS[name.upper()]:
        raise ConfigError(f"{where} needs a head; give --speculative-draft-model-path or --draft")
    return [(where, "draft", NATIVE)]


def _speculative_config(text: str | None) -> dict[str, Any]:
    """The object of --speculative-config. Raises ConfigError for text that is none, and for a key to be refused."""
    if text is None:
        return {}
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--speculative-config is not valid JSON: {error}; quote it as a whole") from error
    if not isinstance(settings, dict):
        raise ConfigError(f'--speculative-config is {text}; an object is needed, such as {{"method": "ngram"}}')
    settings = {key: value for key, value in settings.items() if value is not None}
    for key in settings:
        if key in KEYS:
            continue
        if key in REFUSED_KEYS:
            raise ConfigError(f"--speculative-config: {key} has no equivalent here: {REFUSED_KEYS[key]}")
        near = difflib.get_close_matches(key, (*KEYS, *REFUSED_KEYS), n=1)
        hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(KEYS)}"
        raise ConfigError(f"--speculative-config: unknown key {key}; {hint}")
    return settings


def _of_vllm(settings: Mapping[str, Any], target: Any) -> Iterator[Told]:
    """Our options for the keys of --speculative-config."""
    where = "--speculative-config"
    if not settings:
        return
    method, model, revision = (settings.get(key) for key in ("method", "model", "revision"))
    if _is_lookup(settings):
        yield where, "draft", NGRAM
    elif method is not None and _head_method(method) not in METHODS:
        raise ConfigError(f"{where}: method {method} is not supported; {', '.join(METHODS)} and ngram are")
    elif model is not None and not (_head_method(method) == "mtp" and model == target):
        yield where, "draft", model if revision is None else f"{model}@{revision}"
    elif _head_method(method) == "mtp":
        yield where, "draft", NATIVE
    else:
        raise ConfigError(f"{where} names no draft; give model, or the method ngram or mtp")
    count = settings.get("num_speculative_tokens")
    if count is not None:
        if type(count) is not int or count < 1:
            raise ConfigError(f"{where}: num_speculative_tokens is {count!r}; a number of tokens from 1 is needed")
        yield where, "shape", f"{count},1,{count + 1}"
    if "draft_token_map" in settings:
        yield where, "token_map", settings["draft_token_map"]


def _is_lookup(settings: Mapping[str, Any]) -> bool:
    return "ngram" in (settings.get("method"), str(settings.get("model", "")).strip("[]"))


def _head_method(method: str | None) -> str | None:
    """vLLM's families of MTP modules (deepseek_mtp, ...) are one method."""
    return "mtp" if method is not None and str(method).endswith("_mtp") else method


def _kinds(given: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    algorithm, method = given.get("speculative_algorithm", ""), _head_method(settings.get("method"))
    if algorithm.upper() in ALGORITHMS:
        yield f"--speculative-algorithm {algorithm}", ALGORITHMS[algorithm.upper()]
    if method in METHODS and not _is_lookup(settings):
        yield f"--speculative-config: method {settings['method']}", METHODS[method]
