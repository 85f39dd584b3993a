"""Flags of SGLang and vLLM for options of ours, so that a start script written for them needs no change.

`translate` replaces them by our options. TABLE has every flag that is known here; one without an equivalent is refused
by name, with what to use instead.
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


_ONE_ATTENTION = "the engine has one attention per device: leave it out"
_REPLICAS = "start one server per replica behind a load balancer"
# By their name: the flag as it is read here, or what to do without it.
TABLE: dict[str, Alias | str] = {
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
    "num_speculative_tokens": "use --shape S,1,N, a chain of S drafted tokens with N = S + 1",
    "attention_backend": _ONE_ATTENTION,
    "kv_cache_dtype": "the cache has the number format of the target (--dtype): leave it out",
    "gpu_memory_utilization": "it counts the weights too; use --mem-fraction-static, the cache's share of what is free",
    "max_num_batched_tokens": "use --chunked-prefill-size",
    "enable_prefix_caching": "it is on: leave it out (--no-prefix-cache switches it off)",
    "no_enable_prefix_caching": "use --no-prefix-cache",
    "data_parallel_size": _REPLICAS,
    "dp_size": _REPLICAS,
    "pipeline_parallel_size": "use --tensor-parallel-size",
    "pp_size": "use --tensor-parallel-size",
    "enable_metrics": "metrics are always at /metrics: leave it out",
    "decode_log_interval": "it counts steps; use --log-interval, in seconds",
    "log_level": "set TOOLKIT_LOG in the environment",
    "enable_lora": "adapters are not supported: merge the adapter into the target",
    "lora_paths": "adapters are not supported: merge the adapter into the target",
}
ALIASES = {name: known for name, known in TABLE.items() if isinstance(known, Alias)}
OTHER_SPECULATIVE = "drafting is set by --draft, --shape, --adaptive, --lookup, --verify and --draft-confidence"
# SGLang's algorithms and vLLM's methods -> kinds of heads
METHODS = {
    "eagle": ("eagle2", "mtp"), "eagle3": ("eagle3",), "nextn": ("mtp",), "mtp": ("mtp",), "dflash": ("dspark",),
    "dspark": ("dspark",), "ngram": (),
}  # fmt: skip
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
        known = TABLE.get(name.replace("-", "_"), OTHER_SPECULATIVE if name.startswith("speculative-") else None)
        if isinstance(known, str):
            raise ConfigError(f"--{name} has no equivalent here: {known}")


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
    told += _of_config(settings, _only(told, "target"))
    args.draft_kinds = {}
    for where, name in _methods(given, settings):
        kinds = METHODS.get(_family(name))
        if kinds is None:
            raise ConfigError(
                f"{where} is not supported; {', '.join(METHODS)} are. Beside a head, --lookup drafts what followed the "
                "same words earlier"
            )
        if not kinds:
            told.append((where, "draft", NGRAM))
            continue
        args.draft_kinds[where] = kinds
        if _only(told, "draft") is None:
            if "mtp" not in kinds:
                raise ConfigError(f"{where} needs a head; give its directory by --draft")
            told.append((where, "draft", NATIVE))
    if settings and _only(told, "draft") is None:
        raise ConfigError("--speculative-config names no draft; give model, or the method ngram or mtp")
    for option, value in _agreed(told):
        setattr(args, option, value)


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
        near = difflib.get_close_matches(key, KEYS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(KEYS)}"
        raise ConfigError(f"--speculative-config: unknown key {key}; {hint}")
    return settings


def _of_config(settings: Mapping[str, Any], target: Any) -> Iterator[Told]:
    """Our options for the keys of --speculative-config, but for the method."""
    where = "--speculative-config"
    method, model, revision = (settings.get(key) for key in ("method", "model", "revision"))
    if model is not None and not _is_lookup(settings) and not (_family(method) == "mtp" and model == target):
        yield where, "draft", model if revision is None else f"{model}@{revision}"
    count = settings.get("num_speculative_tokens")
    if count is not None:
        if type(count) is not int or count < 1:
            raise ConfigError(f"{where}: num_speculative_tokens is {count!r}; a number of tokens from 1 is needed")
        yield where, "shape", f"{count},1,{count + 1}"
    if "draft_token_map" in settings:
        yield where, "token_map", settings["draft_token_map"]


def _is_lookup(settings: Mapping[str, Any]) -> bool:
    return "ngram" in (settings.get("method"), str(settings.get("model", "")).strip("[]"))


def _family(method: Any) -> str:
    """vLLM's families of MTP modules (deepseek_mtp, ...) are one method."""
    return "mtp" if str(method).endswith("_mtp") else str(method).lower()


def _methods(given: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Where a method of drafting is named, and its name."""
    if "speculative_algorithm" in given:
        yield f"--speculative-algorithm {given['speculative_algorithm']}", given["speculative_algorithm"]
    if _is_lookup(settings):
        yield "--speculative-config: method ngram", "ngram"
    elif "method" in settings:
        yield f"--speculative-config: method {settings['method']}", settings["method"]
