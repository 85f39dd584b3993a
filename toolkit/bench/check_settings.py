"""Checks of what a draft directory states: its weights, target, chat template, rope and token map."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from toolkit.bench.checked_head import FAILED, OK, SKIPPED, CheckedHead, Finding
from toolkit.checkpoint.draft_dir import rope_difference
from toolkit.heads.head_config import full_attention_rope
from toolkit.targets.load import full_name
from toolkit.tokenmap.build import forced_ids_for

LEAST_COVERAGE = 0.5  # of the answers' tokens; maps of N of V random ids cover N/V of them


def weights_check(head: CheckedHead) -> Finding:
    """They were loaded strictly; every value is finite."""
    bad = [name for name, finite in head.finite.items() if not finite]
    if bad:
        return Finding(FAILED, f"values of {', '.join(bad)} are not finite", {"not_finite": bad})
    return Finding(OK, f"{len(head.finite)} tensors fit the head's shapes, all values are finite")


def target_check(head: CheckedHead) -> Finding:
    """The head was trained for this target, by name, revision and configuration. The target's weights have no hash."""
    target, stated = head.target, head.draft.meta.get("target") or {}
    given = _with_revision(target.name, target.revision)
    if head.fit_error:
        return Finding(FAILED, head.fit_error)
    if head.native:
        return Finding(OK, f"the module is part of {given}")
    if not stated.get("name"):
        return Finding(SKIPPED, f"the head names no target; its sizes are those of {given}")
    named, fingerprint = _with_revision(stated["name"], stated.get("revision")), stated.get("fingerprint")
    local = any(Path(one).expanduser().exists() for one in (stated["name"], target.name))
    same_name = full_name(stated["name"]) == full_name(target.name)
    same_revision = None in (stated.get("revision"), target.revision) or stated["revision"] == target.revision
    if fingerprint is None and not same_name and local:
        return Finding(
            SKIPPED, f"the head names {named}, and the target is {given}; no fingerprint tells if they are one"
        )
    if fingerprint is not None and fingerprint != target.fingerprint_as(stated["name"], stated.get("revision")):
        return Finding(FAILED, f"the head was trained for {named} with another configuration than that of {given}")
    if same_name and same_revision:
        return Finding(OK, f"{given}, as recorded")
    if same_name or not local:
        return Finding(FAILED, f"the head was trained for {named}, and the target is {given}")
    return Finding(OK, f"{given} has the configuration of {named}, for which the head was trained")


def _with_revision(name: str, revision: str | None) -> str:
    return name if revision is None else f"{name}@{revision}"


def template_check(head: CheckedHead) -> Finding:
    """The chat template is the one of the training's texts, by its hash."""
    recorded, mine = (head.draft.meta.get("target") or {}).get("template_sha256"), head.target.template_sha256
    numbers = {"recorded": recorded, "target": mine}
    if recorded is None:
        return Finding(SKIPPED, "the head records no hash of a template", numbers)
    shown = [f"sha256 {one[:12]}" if one else "none" for one in (recorded, mine)]
    if recorded != mine:
        return Finding(
            FAILED, f"the head was trained with the template {shown[0]}, the target's is {shown[1]}", numbers
        )
    return Finding(OK, f"{shown[0]}, as recorded", numbers)


def rope_check(head: CheckedHead) -> Finding:
    """The head rotates as the target does. Every kind of ours copies the target's settings; others may differ."""
    config = head.draft.head.config
    difference = rope_difference(config, full_attention_rope(head.target.config))
    numbers: dict[str, Any] = {"head": config.rope_parameters, "target": full_attention_rope(head.target.config)}
    if difference is None:
        return Finding(OK, ", ".join(f"{key} {value}" for key, value in config.rope_parameters.items()), numbers)
    return Finding(SKIPPED if head.from_other_project else FAILED, difference, numbers)


def token_map_check(head: CheckedHead) -> Finding:
    """The map is the one that the head was trained with: by its hash, and by what the head's scores are worth with it.

    A map of another target moves the scores to other tokens: those of the target's answers then get less than a uniform
    guess would give them, in the mean of their logarithms. Any trained head gives more. Coverage finds random ids only
    (LEAST_COVERAGE, where no hash is recorded): the map of another tokenizer of the same size covered 0.89 of the demo
    target's tokens, its own 0.93, since common tokens have low ids in all of them. A head that shares the target's
    output matrix has no rows of its own: only the hash can pass its map, and without one the check is skipped.
    """
    token_map, target = head.draft.token_map, head.target
    shared = not head.draft.head.config.own_vocabulary
    if shared and token_map.size == token_map.vocab_size:
        return Finding(
            SKIPPED, f"the head has none: it drafts all {token_map.size:,} ids by the target's output matrix"
        )
    numbers: dict[str, Any] = {"size": token_map.size, "sha256": token_map.sha256}
    recorded = head.draft.meta.get("token_map_sha256")
    if token_map.vocab_size != target.vocab_size:
        return Finding(FAILED, f"is over {token_map.vocab_size:,} ids, the target has {target.vocab_size:,}", numbers)
    if recorded not in (None, token_map.sha256):
        says = f"is {token_map.sha256[:12]}, and the head was trained with {recorded[:12]} (sha256)"
        return Finding(FAILED, says, numbers | {"recorded": recorded})
    if not token_map.t2d[sorted(target.stop_ids)].any():
        return Finding(FAILED, f"holds none of the ids that end an answer ({sorted(target.stop_ids)})", numbers)
    forced = forced_ids_for(target.tokenizer, target.stop_ids, target.vocab_size)
    absent = int((~token_map.t2d[list(forced)]).sum())
    size = f"{token_map.size:,} of {token_map.vocab_size:,} ids"
    size += f", {absent} special ids absent" if absent else ", every special id"
    size += ", sha256 as recorded" if recorded else ""
    if head.cannot_draft:
        return Finding(OK, f"{size}; not tried, as {head.cannot_draft}", numbers)
    return _tried_map(head, size, numbers)


def _tried_map(head: CheckedHead, size: str, numbers: dict[str, Any]) -> Finding:
    """What the map covers of the target's answers, and what the head's scores are worth with it."""
    token_map = head.draft.token_map
    written = torch.tensor([token for answer in head.plain for token in answer])
    covered = float(token_map.t2d[written].float().mean())
    if not head.first_drafts[0]:
        return Finding(SKIPPED, f"{size}; no answer has two tokens or more", numbers)
    given = torch.cat([one.log_probability for one in head.first_drafts[0]])
    mean, uniform = float(given.nanmean()), -math.log(token_map.size)
    numbers |= {"coverage": covered, "mean_log_probability": mean, "uniform": uniform}
    size += f", covers {covered:.1%} of {len(written)} tokens"
    if head.draft.head.config.own_vocabulary and not mean > uniform:
        return Finding(
            FAILED,
            f"{size}; with it the head gives the target's tokens a log-probability of {mean:.2f} in the mean, and a "
            f"uniform guess {uniform:.2f}: it belongs to another target, or the head is not trained",
            numbers,
        )
    recorded = "token_map_sha256" in head.draft.meta
    if not recorded and covered < LEAST_COVERAGE and token_map.size < LEAST_COVERAGE * token_map.vocab_size:
        says = f"the map of a target covers {LEAST_COVERAGE:.0%} at least: it is another's"
        return Finding(FAILED, f"{size}; {says}", numbers)
    if not head.draft.head.config.own_vocabulary and not recorded:
        # Rows of the target's matrix follow the ids of any map, so a wrong map shows in the coverage alone.
        says = "the head shares the target's output matrix and records no hash, so nothing tells whose map it is"
        return Finding(SKIPPED, f"{size}; {says}", numbers)
    return Finding(OK, size, numbers)
