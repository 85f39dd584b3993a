"""Flags of SGLang and vLLM for options of ours, so that a start script written for them needs no change.

TABLE has every flag that is known here: the option of ours that it is, or what to do without it. `translate` replaces
the flags by our options.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolkit.commands.model_arguments import OPTIONS, Arguments, flag_of
from toolkit.head_kinds import SHAPE_PRESETS
from toolkit.infer.engine.config import NATIVE, NGRAM, ConfigError


class Alias(NamedTuple):
    """A flag of another server. option: ours, or `method`; "": it is translated with others. metavar: of its value;
    None: a switch, which sets the option to `value`."""

    option: str
    metavar: str | None = None
    kind: type = str
    value: Any = True
    text: str = ""


NUMBERS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")  # S,K,N of a shape
_REPLICAS = "start one server per replica behind a load balancer"
TABLE: dict[str, Alias | str] = {
    "model_path": Alias("target", "MODEL"),
    "model": Alias("target", "MODEL"),
    "speculative_algorithm": Alias("method", "NAME", text="the kind of the head of --draft; without --draft EAGLE and "
                                   "NEXTN are --draft native, NGRAM is --draft ngram"),
    "speculative_draft_model_path": Alias("draft", "DIR"),
    "speculative_draft_model": Alias("draft", "DIR"),
    **{name: Alias("", letter, int, text=f"the {letter} of --shape S,K,N")
       for name, letter in zip(NUMBERS, "SKN", strict=True)},
    "speculative_token_map": Alias("token_map", "FILE"),
    "speculative_adaptive": Alias("adaptive"),
    "speculative_config": Alias("", "JSON", text='vLLM\'s --draft and --shape: \'{"method": "eagle3", "model": "DIR", '
                                '"num_speculative_tokens": 4}\''),
    "tp_size": Alias("tensor_parallel_size", "N", int),
    "max_model_len": Alias("context_length", "N", int),
    "max_num_seqs": Alias("max_running_requests", "N", int),
    "disable_radix_cache": Alias("prefix_cache", value=False),
    "enable_deterministic_inference": Alias("deterministic"),
    "enable_torch_compile": Alias("torch_compile"),
    "enforce_eager": Alias("disable_cuda_graph"),
    "num_speculative_tokens": "use --shape S,1,N, a chain of S drafted tokens with N = S + 1",
    "attention_backend": "the engine has one attention per device: leave it out",
    "kv_cache_dtype": "the cache has the number format of the target (--dtype): leave it out",
    "gpu_memory_utilization": "it counts the weights too; use --mem-fraction-static, the cache's share of what is free",
    "max_num_batched_tokens": "use --chunked-prefill-size",
    "enable_prefix_caching": "it is on: leave it out (--no-prefix-cache switches it off)",
    "no_enable_prefix_caching": "use --no-prefix-cache",
    "data_parallel_size": _REPLICAS,
    "dp_size": _REPLICAS,
    "pipeline_parallel_size": "use --tensor-parallel-size",
    "pp_size": "use --tensor-parallel-size",
    "api_key": "every user of this machine would see the key; use --api-key-file, or the variable TOOLKIT_API_KEY",
    "enable_metrics": "metrics are always at /metrics: leave it out",
    "decode_log_interval": "it counts steps; use --log-interval, in seconds",
    "log_level": "set TOOLKIT_LOG in the environment",
    "enable_lora": "adapters are not supported: merge the adapter into the target",
    "lora_paths": "adapters are not supported: merge the adapter into the target",
}  # fmt: skip
ALIASES = {name: known for name, known in TABLE.items() if isinstance(known, Alias)}
OTHER_SPECULATIVE = "drafting is set by --draft, --shape, --adaptive, --lookup, --verify and --draft-confidence"
# Keys of --speculative-config -> our options, and `method`; `revision` belongs to the model.
KEYS = {"method": "method", "model": "draft", "revision": "", "num_speculative_tokens": "shape",
        "draft_token_map": "token_map"}  # fmt: skip
# SGLang's algorithms and vLLM's methods -> kinds of heads
METHODS = {
    "eagle": ("eagle2", "mtp"), "eagle3": ("eagle3",), "nextn": ("mtp",), "mtp": ("mtp",), "dflash": ("dspark",),
    "dspark": ("dspark",), "ngram": (),
}  # fmt: skip

Told = tuple[str, str, Any]  # where it was given, an option of ours or `method`, its value


def add_alias_arguments(group: Arguments) -> None:
    """Add the flags; only those that are given appear in the parsed arguments."""
    for name, alias in ALIASES.items():
        text = alias.text or f"{flag_of(alias.option)}{'' if alias.value else ' off'}"
        kind: Any = {"metavar": alias.metavar, "type": alias.kind} if alias.metavar else {"action": "store_true"}
        group.add_argument(flag_of(name), dest=name, help=text, default=argparse.SUPPRESS, **kind)


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
        if ALIASES[name].option:
            told.append((flag_of(name), ALIASES[name].option, value if ALIASES[name].metavar else ALIASES[name].value))
    told += [*_of_config(given.get("speculative_config")), *_shape(given)]
    methods = [(f"{where} {value}", str(value)) for where, name, value in told if name == "method"]
    told = [one for one in told if one[1] != "method"]
    args.draft_kinds = {}
    target = next((value for _, option, value in told if option == "target"), None)
    for where, value in methods:
        method = "mtp" if value.endswith("_mtp") else value.lower()  # vLLM's families of MTP modules are one
        kinds = METHODS.get(method)
        if kinds is None:
            raise ConfigError(f"{where} is not supported; {', '.join(METHODS)} are")
        if not kinds:
            told.append((where, "draft", NGRAM))
            continue
        args.draft_kinds[where] = kinds
        drafts = [one for one in told if one[1] == "draft"]
        if method == "mtp" and all(draft == target for _, _, draft in drafts):  # vLLM's name for the own module
            told = [one for one in told if one not in drafts]
            drafts = []
        if not drafts and "mtp" not in kinds:
            raise ConfigError(f"{where} needs a head; give its directory by --draft")
        told += [] if drafts else [(where, "draft", NATIVE)]
    if "speculative_config" in given and not any(option == "draft" for _, option, _ in told):
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


def _of_config(text: str | None) -> Iterator[Told]:
    """The keys of --speculative-config as our options. Raises ConfigError."""
    try:
        settings = {} if text is None else json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--speculative-config is not valid JSON: {error}; quote it as a whole") from error
    if not isinstance(settings, dict) or settings.keys() - KEYS.keys():
        raise ConfigError(f"--speculative-config is {text}; an object with the keys {', '.join(KEYS)} is needed")
    if "ngram" in str(settings.get("model")):  # vLLM's "[ngram]"
        settings["method"] = settings.pop("model").strip("[]")
    if settings.get("model") is not None and settings.get("revision") is not None:
        settings["model"] = f"{settings['model']}@{settings['revision']}"
    count = settings.get("num_speculative_tokens")
    if count is not None:
        if type(count) is not int or count < 1:
            raise ConfigError(f"--speculative-config: num_speculative_tokens is {count!r}; a number from 1 is needed")
        settings["num_speculative_tokens"] = f"{count},1,{count + 1}"
    for key, value in settings.items():
        if value is not None and KEYS[key]:
            yield f"--speculative-config: {key}", KEYS[key], value


def _shape(given: Mapping[str, Any]) -> Iterator[Told]:
    """SGLang's three numbers as a shape; what is left out is a chain's. Raises ConfigError."""
    numbers: list[Any] = [given.get(name) for name in NUMBERS]
    steps, k, nodes = numbers
    where = " ".join(f"{flag_of(name)} {given[name]}" for name in NUMBERS if name in given)
    if not where:
        return
    chain = k in (None, 1) and (steps is None or nodes is None or k == 1 or nodes == steps + 1)
    lacking = [flag_of(name) for name in NUMBERS if name not in given]
    if (steps is None and nodes is None) or (lacking and not chain):
        raise ConfigError(f"{where} needs {' and '.join(lacking)} too; in short: --shape S,K,N")
    steps = nodes - 1 if steps is None else steps
    yield where, "shape", f"{steps},{k or 1},{steps + 1 if nodes is None else nodes}"


def _agreed(told: Sequence[Told]) -> Iterator[tuple[str, Any]]:
    """Each option with its value. Raises ConfigError if two flags give it different ones."""
    first: dict[str, tuple[str, Any]] = {}
    for where, option, value in told:
        earlier, same = first.setdefault(option, (where, value))
        plain = [SHAPE_PRESETS.get(one, str(one)).replace(" ", "") for one in (same, value)]
        if plain[0] != plain[1]:
            raise ConfigError(f"{earlier} ({same}) and {where} ({value}) contradict each other; give one")
    yield from ((option, value) for option, (_, value) in first.items())
