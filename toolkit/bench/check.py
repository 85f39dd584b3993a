"""`toolkit check`: whether a draft head belongs to its target and its decoding is lossless, as a list of findings.

The order of CHECKS is that of the page. The models are loaded in float32, in which speculative decoding must write the
tokens of plain decoding exactly.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from toolkit.bench.check_decoding import (
    acceptance_check,
    aux_layers_check,
    forecast_check,
    greedy_check,
    sampling_check,
)
from toolkit.bench.check_settings import rope_check, target_check, template_check, token_map_check, weights_check
from toolkit.bench.checked_head import FAILED, SKIPPED, CheckedHead, Finding
from toolkit.bench.prompts import builtin_prompts, limited
from toolkit.bench.records import make_record
from toolkit.checkpoint.draft_dir import DraftCheckpoint, DraftDirError
from toolkit.checkpoint.files import locate
from toolkit.data.chat_template import encode, prompt_ids
from toolkit.infer.engine.cpu_door import load_target, pack
from toolkit.infer.load.config import NATIVE, NGRAM, NONE, ConfigError, EngineConfig
from toolkit.infer.load.load_draft import find_module, load_draft, native_draft, target_source, with_token_map
from toolkit.infer.load.load_engine import device_of
from toolkit.jsonl import DataError
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMapError
from toolkit.weights import WeightsError, sha256_json

Check = Callable[[CheckedHead], Finding]
DRAFTING: dict[str, Check] = {  # of a head that can draft
    "greedy": greedy_check,
    **{f"sampling, {verify}": partial(sampling_check, verify=verify) for verify in ("target", "rejection", "block")},
    "forecast": forecast_check,
    "acceptance": acceptance_check,
}
CHECKS: dict[str, Check] = {
    "weights": weights_check,
    "target": target_check,
    "template": template_check,
    "rope": rope_check,
    "token map": token_map_check,
    "aux layers": aux_layers_check,
    **DRAFTING,
}
NAMES = max(map(len, CHECKS))
PAGE = 120  # columns


@dataclass(frozen=True)
class Unreadable:
    """A draft head that is refused when it is read. check: the name of the check that fails by it."""

    check: str
    cause: str


def open_checked(config: EngineConfig, limit: int, max_tokens: int) -> CheckedHead | Unreadable:
    """Load the head and the target of `config` in float32, and render `limit` built-in prompts that fit its context.

    Raises `ConfigError`, and `DraftDirError` or `TargetError` for a head or target that is not found.
    """
    name, refused = str(config.draft), (DraftDirError, WeightsError, TokenMapError)
    if config.draft is None or name in (NGRAM, NONE):
        given = "not given" if config.draft is None else name
        raise ConfigError(f"`draft` is {given}; a head is needed: a draft directory, a hub id, or native")
    for option, value, least in (("limit", limit, 1), ("max-tokens", max_tokens, 2)):  # a draft follows a token
        if value < least:
            raise ConfigError(f"--{option} is {value}; at least {least} is needed")
    device = device_of(config)
    config.check(device.type)
    draft: Any = None
    if name != NATIVE:
        locate(name)
        try:
            draft = load_draft(name, config.target, config.revision)
        except refused as error:
            return Unreadable("token map" if isinstance(error, TokenMapError) else "weights", str(error))
    source = target_source(config, draft)
    module = find_module(config, source) if draft is None else None
    asked: Any = {
        "revision": source.revision,
        "quantization": source.quantization,
        "chat_template": source.chat_template,
    }
    target = load_target(source.name, dtype="float32", device=device, **asked)
    try:
        draft = draft if module is None else native_draft(config, target, *module)
    except refused as error:
        return Unreadable("weights", str(error))
    assert isinstance(draft, DraftCheckpoint), "a head is checked"
    if config.token_map is not None:
        try:
            draft = with_token_map(draft, target, config.token_map)
        except TokenMapError as error:
            return Unreadable("token map", str(error))
        draft = replace(draft, meta={**draft.meta, "token_map_sha256": None})  # this map is the user's choice
    finite = {name: bool(value.isfinite().all()) for name, value in draft.head.state_dict().items()}
    draft.head.cast(target.device, target.dtype)
    pack(target, draft, draft_quantization="none")
    return CheckedHead(draft, target, *_prompts(target, limit, max_tokens), max_tokens, finite)


def _prompts(target: Target, limit: int, max_tokens: int) -> tuple[list[list[int]], str]:
    """The ids of the first turns of `limit` built-in prompts, evenly over tasks, of those that the context holds; and
    the sha256 of these prompts."""
    fitting = {}
    for prompt in limited(builtin_prompts(), limit):
        text = prompt.turns[0]
        if target.template_sha256:
            ids = prompt_ids(target.tokenizer, [{"role": "user", "content": text}])
        else:
            ids = encode(target.tokenizer, text)
        if len(ids) + max_tokens <= target.max_context:
            fitting[prompt] = ids
    if not fitting:
        raise DataError(
            f"no prompt and {max_tokens} tokens fit into the target's context of {target.max_context}; give fewer "
            "--max-tokens"
        )
    return list(fitting.values()), sha256_json([asdict(prompt) for prompt in fitting])


def findings(head: CheckedHead | Unreadable) -> Iterator[tuple[str, Finding]]:
    """Run the checks in order; yield each finding with the name of its check."""
    for name, check in CHECKS.items():
        if isinstance(head, Unreadable):
            failed = name == head.check
            yield name, Finding(FAILED, head.cause) if failed else Finding(SKIPPED, "the head cannot be read")
        elif name in DRAFTING and head.cannot_draft:
            yield name, Finding(SKIPPED, f"not tried, as {head.cannot_draft}")
        else:
            yield name, check(head)


def title(head: CheckedHead | Unreadable, draft: str) -> str:
    """The first line of the page: what is checked, and on how many prompts."""
    if isinstance(head, Unreadable):
        return draft
    target = head.target
    return (
        f"{draft} ({head.draft.kind}) on {target.name} ({target.precision}; on {target.device}), {len(head.prompts)} "
        f"built-in prompts, at most {head.max_tokens} tokens"
    )


def line(name: str, finding: Finding) -> str:
    """The lines of the page for one check."""
    begin = f"  {name:<{NAMES}}  {finding.status:<7}  "
    return textwrap.fill(finding.detail, PAGE, initial_indent=begin, subsequent_indent=" " * len(begin))


def verdict(found: list[tuple[str, Finding]]) -> tuple[str, bool]:
    """The last line of the page, and whether the head passed."""
    failed = [name for name, finding in found if finding.status == FAILED]
    skipped = sum(finding.status == SKIPPED for _, finding in found)
    if failed:
        return f"FAILED: {', '.join(failed)}", False
    return f"passed: {len(found) - skipped} checks" + (f", {skipped} skipped" if skipped else ""), True


def check_record(
    head: CheckedHead | Unreadable, draft: str, found: list[tuple[str, Finding]], command: str
) -> dict[str, Any]:
    """The record of kind "check": one row for each check."""
    settings: dict[str, Any] = {"draft": draft}
    more: dict[str, Any] = {}
    if isinstance(head, CheckedHead):
        target = head.target
        settings |= {"prompts": len(head.prompts), "max_tokens": head.max_tokens}
        more["target"] = {"name": target.name, "revision": target.revision, "quantization": target.quantization}
        more["draft"] = {"head": head.draft.kind, "draft_vocab_size": head.draft.token_map.size}
    rows = [
        {"check": name, "status": finding.status, "detail": finding.detail, **finding.numbers}
        for name, finding in found
    ]
    return make_record("check", command, settings, rows, passed=verdict(found)[1], **more)
