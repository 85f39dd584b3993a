"""Checks by decoding: the auxiliary layers, greedy equality with plain decoding, and the recorded accept_length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from toolkit.bench.bootstrap import ratio_interval
from toolkit.bench.checked_head import FAILED, OK, SKIPPED, CheckedHead, Finding, FirstDrafts
from toolkit.bench.forecast import ForecastAnswer, recorded
from toolkit.bench.near_tie import Divergence, find_divergence, plain_logits
from toolkit.bench.rows import number
from toolkit.bench.sampled_distribution import BATCH, CHAIN, DRAWS, SAMPLING_ALARM, TREE, TRIED, WIDTH, WRITTEN, g_test
from toolkit.infer.request.acceptance import summarise
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request

AUX_ALARM = 1e-3  # chance that ids are called wrong when no neighbour is better than they are
ENUMERATED = 16  # prompts up to which every choice of signs is tried
DRAWN_SIGNS = 100_000
FORECAST_SLACK = 0.02  # of accept_length: rounding in another batch may turn a near-tie between two drafts


# -- auxiliary layers --------------------------------------------------------------------------------------------------


def aux_layers_check(head: CheckedHead) -> Finding:
    """Neither all ids minus one nor all ids plus one suit the head better than its recorded ids.

    Projects count layers by their inputs or outputs, so a wrong convention moves all ids by one. What the head's first
    drafts give to the target's token is compared at the same positions of plain decoding's answers. Each prompt counts
    once, since its positions are correlated. If a shift were no better, the sign of each prompt's difference would be
    a coin's: the share of all choices of signs with a sum as large as the observed one is its p-value.
    """
    ids = head.draft.head.config.features.aux_layer_ids
    if ids is None:
        return Finding(SKIPPED, "the head reads the last hidden state only")
    if head.layer_error:
        return Finding(FAILED, head.layer_error)
    if head.cannot_draft:
        return Finding(SKIPPED, f"not tried, as {head.cannot_draft}")
    if not head.first_drafts[0]:
        return Finding(SKIPPED, "no answer has two tokens or more")
    recorded, others = head.first_drafts[0], [shift for shift in head.first_drafts if shift]
    alarm = AUX_ALARM / 2
    rows: dict[int, dict[str, Any]] = {0: {"ids": list(ids), "first_draft_right": _share_right(recorded)}}
    for shift in others:
        gains = _gains(head.first_drafts[shift], recorded)
        rows[shift] = {
            "ids": list(head.shifted(shift)),
            "first_draft_right": _share_right(head.first_drafts[shift]),
            "gain": float(gains.mean()),
            "better_prompts": int((gains > 0).sum()),
            "p": sign_flip_p(gains),
        }
    units = len(recorded)
    numbers = {"rows": list(rows.values()), "alarm": alarm, "prompts": units}
    better = [shift for shift in others if rows[shift]["p"] < alarm]
    if better:
        best = rows[max(better, key=lambda shift: rows[shift]["gain"])]
        return Finding(
            FAILED,
            f"{list(ids)} are off: {best['ids']} suit the head better at {best['better_prompts']} of {units} prompts "
            f"(p = {best['p']:.1e}, alarm below {alarm:g}); the first draft is right at "
            f"{best['first_draft_right']:.1%} of the positions instead of {rows[0]['first_draft_right']:.1%}",
            numbers,
        )
    if others and 0.5**units >= alarm:
        return Finding(SKIPPED, f"{units} prompts cannot tell at a false-alarm probability of {AUX_ALARM:g}", numbers)
    shown = ", ".join(f"{rows[shift]['first_draft_right']:.1%} with {rows[shift]['ids']}" for shift in others)
    return Finding(
        OK,
        f"{list(ids)}: first draft right at {rows[0]['first_draft_right']:.1%} of the positions; {shown} (false-alarm "
        f"probability {AUX_ALARM:g})",
        numbers,
    )


def _share_right(drafts: Sequence[FirstDrafts]) -> float:
    right = [flag for one in drafts for flag in one.right.tolist()]
    return sum(right) / len(right)


def _gains(drafts: Sequence[FirstDrafts], recorded: Sequence[FirstDrafts]) -> np.ndarray:
    """By prompt, the mean gain of log-probability over `recorded`; 0 if the draft vocabulary has none of its tokens."""
    gains = [
        float((one.log_probability - other.log_probability).nanmean())
        for one, other in zip(drafts, recorded, strict=True)
    ]
    return np.nan_to_num(np.array(gains))


def sign_flip_p(values: np.ndarray) -> float:
    """The one-sided p-value of a mean above 0, if each value's sign is a fair coin's (Fisher, 1935).

    Up to ENUMERATED values every choice of signs is tried; of more, DRAWN_SIGNS choices are drawn, and the observed one
    is added to them.
    """
    count = len(values)
    if count <= ENUMERATED:
        signs = 1 - 2 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
    else:
        drawn = np.random.default_rng(0).choice((-1, 1), size=(DRAWN_SIGNS, count))
        signs = np.concatenate([np.ones((1, count), dtype=drawn.dtype), drawn])
    # The slack absorbs rounding: the observed choice must count itself.
    return float((signs @ values >= values.sum() - 1e-9 * np.abs(values).sum()).mean())


# -- greedy equality ---------------------------------------------------------------------------------------------------


def greedy_check(head: CheckedHead) -> Finding:
    """In float32, speculative decoding writes the tokens of plain decoding: chain and tree, alone and in a batch."""
    parted: list[tuple[str, Divergence]] = []
    answers = 0
    for group in head.greedy:
        for prompt, shape, request in zip(group.prompts, group.shapes, group.requests, strict=True):
            answers += 1
            found = _divergence(head, prompt, request)
            if found is not None:
                name = "plain" if shape is None else shape.name
                parted.append((f"prompt {prompt}, {name}, {'alone' if group.batch == 1 else 'in a batch'}", found))
    wrong = [one for one in parted if not one[1].near_tie]
    chain, tree = head.shapes
    shapes = f"{chain.name} (target or head take no tree)" if tree is None else f"{chain.name} and {tree.name}"
    numbers: dict[str, Any] = {"answers": answers, "near_ties": len(parted) - len(wrong), "unequal": len(wrong)}
    if wrong:
        where, first = wrong[0]
        says = f"{len(wrong)} of {answers} answers differ from plain decoding's; first: {where}: {_describe(first)}"
        return Finding(FAILED, says, numbers)
    ties = f", {len(parted)} first part at a near-tie of float32" if parted else ""
    tokens = sum(map(len, head.plain))
    says = f"{answers - len(parted)} of {answers} answers equal plain decoding's{ties}: {shapes}, alone and in a batch"
    return Finding(OK, f"{says}; {tokens} tokens", numbers)


def _divergence(head: CheckedHead, prompt: int, request: Request) -> Divergence | None:
    ids = head.prompts[prompt]
    return find_divergence(
        head.plain[prompt],
        request.output_ids,
        lambda written: plain_logits(head.target, [*ids, *written]),
        head.target.dtype,
    )


def _describe(found: Divergence) -> str:
    if found.plain_logit is None or found.speculative_logit is None:
        return f"one answer ends at token {found.position}, the other goes on"
    return (
        f"token {found.position} is {found.speculative_token} (logit {found.speculative_logit:.4f}), plain decoding's "
        f"is {found.plain_token} (logit {found.plain_logit:.4f})"
    )


# -- sampling ----------------------------------------------------------------------------------------------------------


def sampling_check(head: CheckedHead, verify: str) -> Finding:
    """Sampled continuations of one prompt follow the target's distribution when drafts are accepted by `verify`."""
    exact = head.continuations
    if exact is None:
        return Finding(SKIPPED, f"after {TRIED} prompts rounding decides which {WIDTH} tokens are the most probable")
    shape = TREE if verify == "target" and head.shapes[1] is not None else CHAIN
    engine = head.engine(shape, BATCH, verify)
    params = [
        SamplingParams(temperature=1.0, top_k=WIDTH, seed=seed, max_tokens=WRITTEN, ignore_eos=True)
        for seed in range(DRAWS)
    ]
    requests = engine.generate([exact.prompt] * DRAWS, params)
    engine.close()
    drawn = Counter(tuple(request.output_ids) for request in requests)
    counts = torch.tensor([drawn[path] for path in exact.probabilities], dtype=torch.float64)
    outside = DRAWS - int(counts.sum())
    kept = sum(event.accepted for request in requests for event in request.events)
    g, freedom, p = g_test(counts, DRAWS * torch.tensor(list(exact.probabilities.values()), dtype=torch.float64))
    numbers = {"verify": verify, "shape": shape.as_text(), "draws": DRAWS, "accepted": kept, "outside": outside}
    numbers |= {"g": g, "degrees_of_freedom": freedom, "p": p, "alarm": SAMPLING_ALARM, "entropy": exact.entropy}
    says = f"{DRAWS} draws of {WRITTEN} tokens, {shape.name}, {kept} drafts accepted: G = {g:.1f} at {freedom} degrees"
    if outside:
        return Finding(FAILED, f"{outside} of {says}; by the target they cannot occur", numbers)
    return Finding(
        FAILED if p < SAMPLING_ALARM else OK,
        f"{says} of freedom, p = {p:.2g} (false-alarm probability {SAMPLING_ALARM:g})",
        numbers,
    )


# -- accept_length -----------------------------------------------------------------------------------------------------


def forecast_check(head: CheckedHead) -> Finding:
    """The replay of plain answers gives the verify steps of the engine, with the chain and with the tree."""
    alone = head.greedy[0]
    texts, numbers, wrong = [], {}, []
    for shape in (one for one in head.shapes if one is not None):
        own = [
            (prompt, request)
            for prompt, asked, request in zip(alone.prompts, alone.shapes, alone.requests, strict=True)
            if asked == shape
        ]
        engine = head.engine(shape, len(own))
        answers = [head.plain[prompt] for prompt, _ in own]
        replayed = recorded(engine, [head.prompts[prompt] for prompt, _ in own], answers)
        engine.close()
        pairs = zip(answers, replayed, strict=True)
        forecast = [ForecastAnswer("", tuple(answer), needed).accepted(shape) for answer, needed in pairs]
        served = [[one.accepted for one in request.events if not one.truncated] for _, request in own]
        lengths = [sum(map(sum, each)) / max(1, sum(map(len, each))) + 1 for each in (forecast, served)]
        numbers[f"{shape.name}_forecast"], numbers[f"{shape.name}_engine"] = lengths
        same = sum(mine == theirs for mine, theirs in zip(forecast, served, strict=True))
        texts.append(f"{shape.name} {lengths[0]:.3f} and {lengths[1]:.3f} ({same} of {len(own)} answers step by step)")
        if abs(lengths[0] - lengths[1]) > FORECAST_SLACK:
            wrong.append(shape.name)
    says = f"accept_length by forecast and by the engine: {'; '.join(texts)}"
    return Finding(FAILED if wrong else OK, says, numbers)


def acceptance_check(head: CheckedHead) -> Finding:
    """The chain's accept_length is not below that of measured.json: the two 95 % intervals do not lie apart.

    Compared are the same prompts (here without their follow-up turns) at the same precision and length of answers."""
    chain = head.shapes[0]
    events: list[list[Any]] = [[] for _ in head.prompts]
    for group in head.greedy:
        for prompt, shape, request in zip(group.prompts, group.shapes, group.requests, strict=True):
            if shape == chain:
                events[prompt] += request.events
    each = [summarise(one) for one in events]
    now = number(summarise(event for one in events for event in one).accept_length)
    between = ratio_interval([one.verify_steps + one.accepted for one in each], [one.verify_steps for one in each])
    numbers: dict[str, Any] = {"shape": chain.as_text(), "accept_length": now, "interval": between}
    if now is None:
        return Finding(SKIPPED, "no verify steps: the answers have one token", numbers)
    says = f"{chain.name}: accept_length {now:.2f}" + (f" [{between[0]:.2f}, {between[1]:.2f}]" if between else "")
    row = head.measured_row("chain")
    if row is None or between is None or row["interval"][0] is None:
        return Finding(SKIPPED, f"{says}; no record of greedy built-in prompts to compare with", numbers)
    if differing := head.unlike_record():
        return Finding(SKIPPED, f"{says}; not compared with measured.json, which has {'; '.join(differing)}", numbers)
    low, high = row["interval"]
    numbers |= {"recorded": row["accept_length"], "recorded_interval": row["interval"]}
    says += f", recorded {row['accept_length']:.2f} [{low:.2f}, {high:.2f}]"
    return Finding(FAILED if between[1] < low else OK, says, numbers)
