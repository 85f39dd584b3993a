"""Compute the rows of an acceptance record from finished rounds."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from toolkit.bench.bootstrap import ratio_interval
from toolkit.bench.near_tie import Divergence, find_divergence, plain_logits
from toolkit.bench.records import RecordError
from toolkit.bench.side_by_side import PERFECT, LoggedAnswer, Round, Trial
from toolkit.infer.request.draft_tree import ADAPTIVE, PLAIN, DraftShape
from toolkit.infer.request.request import VerifyEvent, summarise
from toolkit.infer.verify.token_distribution import uniform
from toolkit.infer.verify.verifiers import ForcedAcceptance
from toolkit.targets.target import Target

ALL = "all"
HEAD_ALONE = f"{ADAPTIVE}, no lookup"  # the mode of adaptive drafting without lookup; its rows have "lookup": False
Key = tuple[str, int]  # question_id, turn
CONTEXTS = tuple(512 << n for n in range(12))  # bounds in tokens of `by_context`


def tabulate(
    rounds: Sequence[Round],
    trial: Trial,
    shapes: Sequence[DraftShape],
    check_tokens: bool = True,
    adaptive: DraftShape | None = None,
    forced: ForcedAcceptance | None = None,
) -> dict[str, Any]:
    """Return the rows, one entry per answer, the times of each group of prompts, and all divergences.

    adaptive: the largest shape of adaptive drafting, whose rows come first; None: it was not measured. Where it has
    lookup and there are rounds of HEAD_ALONE, these come before it. Under `deterministic` no answer may differ, by
    rounding either.
    """
    temperature, plain = trial.sampling.temperature, {_key(answer): answer for answer in _answers(rounds, PLAIN)}
    modes = {} if adaptive is None else {ADAPTIVE: shape_keys(adaptive) | {"shape": ADAPTIVE}}
    if any(done.mode == HEAD_ALONE for done in rounds):
        modes = {HEAD_ALONE: modes[ADAPTIVE] | {"lookup": False}, ADAPTIVE: modes[ADAPTIVE] | {"lookup": True}}
    modes |= {shape.name: shape_keys(shape) for shape in shapes}
    rows, answers, divergences = [], [], []
    for mode, keys in modes.items():
        judged: dict[Key, Divergence | None] = {}
        for answer in _answers(rounds, mode):
            if check_tokens:
                found = _judge(trial.target, plain[_key(answer)], answer, temperature)
                if found is not None and trial.config.deterministic:
                    found = replace(found, near_tie=False)
                judged[_key(answer)] = found
            answers.append(_answer_entry(mode, answer))
        divergences += [
            {"shape": mode, "question_id": key[0], "turn": key[1], **asdict(found)}
            for key, found in judged.items()
            if found is not None
        ]
        tasks = list(dict.fromkeys(answer.question.prompt.task for answer in plain.values()))
        for task in (ALL, *tasks):
            row = {"method": trial.draft.kind, **keys, "temperature": temperature, "verify": trial.config.verify}
            row["task"] = task
            row |= _row(rounds, mode, task, judged if check_tokens else None)
            if task == ALL:
                row["by_context"] = by_context(_answers(rounds, mode))
            rows.append(row if forced is None else {**row, **_forced(rounds, mode, task, forced)})
    return {"rows": rows, "answers": answers, "times": _times(rounds), "divergences": divergences}


def ceiling_of(rounds: Sequence[Round], depth: int) -> dict[str, Any]:
    """Return what perfect drafts of `depth` tokens gain: accept_length, speed and speedup over all prompts."""
    stats = summarise(event for answer in _answers(rounds, PERFECT) for event in answer.events)
    speed = _speed(rounds, PERFECT, ALL)
    return {"drafts": depth, "accept_length": number(stats.accept_length), **speed}


def _forced(rounds: Sequence[Round], mode: str, task: str, forced: ForcedAcceptance) -> dict[str, Any]:
    """Return the keys that mark a row: the accept_length asked for, and the steps whose drafts were too shallow."""
    events = [event for answer in _answers(rounds, mode, task) for event in answer.events if not event.truncated]
    shallow = sum(0 < event.depth_offered < len(forced.rates) for event in events)
    return {"forced_accept_length": forced.accept_length, "shallow_steps": shallow}


def _judge(target: Target, plain: LoggedAnswer, speculative: LoggedAnswer, temperature: float) -> Divergence | None:
    question = plain.question
    prompt_ids, seed = list(question.prompt_ids), question.params.seed
    assert temperature == 0 or seed is not None, "sampled answers can be compared only with a seed"
    return find_divergence(
        plain.output_ids,
        speculative.output_ids,
        lambda written: plain_logits(target, [*prompt_ids, *written]),
        target.dtype,
        temperature,
        # The random number in [0, 1) with which the engine draws the token at this index of the sequence.
        lambda position: uniform(torch.tensor(seed or 0), torch.tensor(len(prompt_ids) + position)).item(),
    )


def _row(rounds: Sequence[Round], mode: str, task: str, judged: dict[Key, Divergence | None] | None) -> dict[str, Any]:
    answers = _answers(rounds, mode, task)
    events = [event for answer in answers for event in answer.events]
    stats = summarise(events)
    of_task = [judged[_key(answer)] for answer in answers] if judged is not None else []
    parted = [found for found in of_task if found is not None]
    return {
        "prompts": len({answer.question.prompt.question_id for answer in answers}),
        "answers": len(answers),
        "tokens": sum(len(answer.output_ids) for answer in answers),
        "verify_steps": stats.verify_steps,
        "truncated_steps": stats.truncated_steps,
        "drafted_share": sum(event.offered > 0 for event in events) / len(events) if events else None,
        "accept_length": number(stats.accept_length),
        "interval": _interval((_key(answer)[0], answer.events) for answer in answers),
        "accept_rate": [number(rate) for rate in stats.accept_rate],
        "accept_rate_unconditional": [number(rate) for rate in stats.accept_rate_unconditional],
        **_speed(rounds, mode, task),
        **_equality(None if judged is None else len(answers), [found.near_tie for found in parted]),
    }


def _equality(answers: int | None, near: Sequence[bool | None]) -> dict[str, Any]:
    """Return how many answers are plain decoding's. near: of each that parts; answers: None if none was compared."""
    if answers is None:
        return dict.fromkeys(("tokens_equal", "near_ties", "unequal", "not_judged"))
    unequal, not_judged = near.count(False), near.count(None)
    return {
        "tokens_equal": None if not_judged and not unequal else not unequal,
        "near_ties": near.count(True),
        "unequal": unequal,
        "not_judged": not_judged,
    }


def _interval(parts: Iterable[tuple[str, Sequence[VerifyEvent]]]) -> list[float | None]:
    """Bootstrap over prompts: the numerator is a prompt's committed tokens, the denominator its verify steps.

    parts: question_id, and verify steps of that prompt."""
    by_prompt: dict[str, list[VerifyEvent]] = {}
    for question_id, events in parts:
        by_prompt.setdefault(question_id, []).extend(events)
    steps, committed = [], []
    for of_prompt in by_prompt.values():
        stats = summarise(of_prompt)
        steps.append(stats.verify_steps)
        committed.append(stats.verify_steps + stats.accepted)
    found = ratio_interval(committed, steps)
    return [None, None] if found is None else list(found)


def by_context(answers: Iterable[LoggedAnswer]) -> list[dict[str, Any]]:
    """Return accept_length by the tokens before a verify step, those of the prompt too: an entry for each range
    between CONTEXTS that has steps.

    from, below: its bounds; below is None without an upper one."""
    found: dict[int, list[tuple[str, list[VerifyEvent]]]] = {}
    for answer in answers:
        length = len(answer.question.prompt_ids) + 1  # the first token of an answer comes from the prefill
        for event in answer.events:
            found.setdefault(bisect_right(CONTEXTS, length), []).append((_key(answer)[0], [event]))
            length += event.committed
    bounds = (0, *CONTEXTS, None)
    stats = {at: summarise(event for _, events in found[at] for event in events) for at in sorted(found)}
    return [
        {
            "from": bounds[at],
            "below": bounds[at + 1],
            "verify_steps": one.verify_steps,
            "accept_length": number(one.accept_length),
            "interval": _interval(found[at]),
        }
        for at, one in stats.items()
        if one.verify_steps
    ]


def _speed(rounds: Sequence[Round], mode: str, task: str) -> dict[str, float | None]:
    """Return the speeds of one task; None if a batch mixed it with other tasks, whose times are not separable."""
    speed, plain = (_tokens_per_s(rounds, one, task) for one in (mode, PLAIN))
    if speed is None or plain is None:
        return dict.fromkeys(("tokens_per_s", "plain_tokens_per_s", "speedup"))
    return {"tokens_per_s": speed, "plain_tokens_per_s": plain, "speedup": speed / plain}


def _tokens_per_s(rounds: Iterable[Round], mode: str, task: str) -> float | None:
    """Return the decode speed of one mode; None for mixed rounds, and when only first tokens were decoded."""
    seconds, tokens = 0.0, 0
    for done in (done for done in rounds if done.mode == mode):
        tasks = {answer.question.prompt.task for answer in done.answers}
        if task != ALL and task not in tasks:
            continue
        if task != ALL and len(tasks) > 1:
            return None
        seconds += done.decode_s
        tokens += done.decode_tokens
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def _answer_entry(mode: str, answer: LoggedAnswer) -> dict[str, Any]:
    """Return the counts of one answer, which can be compared with another record's prompt by prompt."""
    stats = summarise(answer.events)
    return {
        "shape": mode,
        "question_id": answer.question.prompt.question_id,
        "turn": answer.question.turn,
        "task": answer.question.prompt.task,
        "tokens": len(answer.output_ids),
        "verify_steps": stats.verify_steps,
        "accepted": stats.accepted,
    }


def _times(rounds: Iterable[Round]) -> list[dict[str, Any]]:
    """Return an entry for each mode (plain decoding too) and group of prompts that were decoded together, all turns."""
    first_of: dict[str, str] = {}  # question_id -> the first one of its group; the first turn has the whole group
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    for done in (done for done in rounds if done.mode != PERFECT):
        ids = [answer.question.prompt.question_id for answer in done.answers]
        for one in ids:
            first_of.setdefault(one, ids[0])
        fresh = {"shape": done.mode, "question_ids": ids, "decode_tokens": 0, "decode_s": 0.0}
        entry = entries.setdefault((done.mode, first_of[ids[0]]), fresh)
        entry["decode_tokens"] += done.decode_tokens
        entry["decode_s"] += done.decode_s
    return list(entries.values())


def shape_keys(shape: DraftShape) -> dict[str, Any]:
    """Return the keys that name a shape in a row."""
    return {
        "shape": "chain" if shape.is_chain else "tree",
        "num_steps": shape.num_steps,
        "top_k": shape.top_k,
        "num_draft_tokens": shape.num_draft_tokens,
    }


def shape_text(row: Mapping[str, Any]) -> str:
    """Return the shape of a row as an option has it: "4,4,16"."""
    return f"{row['num_steps']},{row['top_k']},{row['num_draft_tokens']}"


def _answers(rounds: Iterable[Round], mode: str, task: str = ALL) -> list[LoggedAnswer]:
    found = [answer for done in rounds if done.mode == mode for answer in done.answers]
    return [answer for answer in found if task in (ALL, answer.question.prompt.task)]


def _key(answer: LoggedAnswer) -> Key:
    return answer.question.prompt.question_id, answer.question.turn


def best_row(record: dict[str, Any]) -> dict[str, Any]:
    """Return the "all" row with the highest speedup, or with the longest accept_length if no speed was measured.

    Raises `RecordError` for a record without such rows.
    """
    rows = [row for row in record["rows"] if row["task"] == ALL]
    if not rows:
        raise RecordError('the record has no row over all prompts (task "all"); measure again')
    return max(rows, key=lambda row: (row["speedup"] or 0.0, row["accept_length"] or 0.0))


def lookup_row(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the "all" row of adaptive drafting with lookup, as `toolkit serve` starts, if the head alone was measured
    beside it."""
    adaptive = [row for row in record["rows"] if row["task"] == ALL and row["shape"] == ADAPTIVE]
    return next((row for row in adaptive if row.get("lookup") is not False), None) if len(adaptive) == 2 else None


def head_row(record: dict[str, Any]) -> dict[str, Any]:
    """Return the `best_row` of the draft itself: without `lookup_row`."""
    beside = lookup_row(record)
    return best_row({"rows": [row for row in record["rows"] if row is not beside]})


def headline_row(record: dict[str, Any]) -> dict[str, Any]:
    """Return the "all" row of the draft's adaptive drafting, if measured, else `best_row`. What lookup adds to a head
    is not the head's: `lookup_row`.

    Raises `RecordError` as `best_row` does.
    """
    beside = lookup_row(record)
    own = (row for row in record["rows"] if row["task"] == ALL and row["shape"] == ADAPTIVE and row is not beside)
    return next(own, None) or best_row(record)


def is_slower(row: dict[str, Any]) -> bool:
    """Return whether a setting is slower than plain decoding, by the speedup as it is shown. False if not measured."""
    return row["speedup"] is not None and round(row["speedup"], 2) < 1


def is_faster(row: dict[str, Any]) -> bool:
    """Return whether a setting is faster than plain decoding, by the speedup as it is shown. True if not measured.

    One that drafted nothing is plain decoding, and what it seems to gain is noise."""
    return row.get("drafted_share") != 0 and (row["speedup"] is None or round(row["speedup"], 2) > 1)


def recommended_row(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the row of the setting to use: the headline's, else the draft's fastest; None if neither is faster than
    plain decoding."""
    return next((row for row in (headline_row(record), head_row(record)) if is_faster(row)), None)


def number(value: float) -> float | None:
    """Replace nan, the statistic over no steps, by None, since JSON has no nan."""
    return value if math.isfinite(value) else None
