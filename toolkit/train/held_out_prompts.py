"""The held-out prompts of the engine's measurements during training, and the answers in the rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import nsmallest
from pathlib import Path
from typing import Any

from toolkit.data.chat_template import ChatTemplateError, prompt_ids
from toolkit.errors import TrainError
from toolkit.jsonl import read_rows
from toolkit.log import get_logger
from toolkit.targets.target import Target

log = get_logger(__name__)


@dataclass(frozen=True)
class HeldOutPrompt:
    """The ids before the last answer of a held-out rollout (prompt), and the ids of that answer. temperature: the
    rollout's, None if it has none."""

    id: str
    prompt: list[int]
    answer: list[int]
    messages: list[dict[str, str]]
    temperature: float | None


@dataclass(frozen=True)
class HeldOutPrompts:
    """The same prompts at every measurement, so that steps and runs are comparable."""

    prompts: Sequence[HeldOutPrompt]

    @cached_property
    def temperature(self) -> float | None:
        """The temperature of the rollouts; None if they differ or have none."""
        found = {one.temperature for one in self.prompts}
        return found.pop() if len(found) == 1 else None

    def rendered_differently(self, target: Target) -> int:
        """Number of prompts that the target's chat template renders into other ids than those in the rollouts."""
        return sum(_rendered(one, target) not in (None, one.prompt) for one in self.prompts)


def _rendered(one: HeldOutPrompt, target: Target) -> list[int] | None:
    """The prompt's ids by the target's template; None if the rollout has no messages, [] if the target has no usable
    template."""
    asked = one.messages[:-1] if one.messages and one.messages[-1].get("role") == "assistant" else one.messages
    if not asked:
        return None
    try:
        return prompt_ids(target.tokenizer, asked)
    except ChatTemplateError:
        return []


def read_held_out(rollouts: Path, count: int, longest: int) -> HeldOutPrompts:
    """The first `count` held-out rollouts in the order of their ids, without prompts of more than `longest` ids.

    Memory: these rollouts only. Raises `TrainError` when no prompt is left.
    """
    rows = unusable = 0

    def usable() -> Iterator[dict[str, Any]]:
        nonlocal rows, unusable
        for _, row in read_rows(rollouts):
            if row.get("split") != "held_out":
                continue
            rows += 1
            if row["response_spans"] and 0 < row["response_spans"][-1][0] <= longest:
                yield row
            else:
                unusable += 1

    first = nsmallest(count, usable(), key=lambda row: str(row["id"]))
    if unusable:
        log.warning(
            "%d of %d held-out rollouts are not used in measurements: they have no prompt, or one of more than %d ids",
            unusable,
            rows,
            longest,
        )
    if not first:
        raise TrainError(
            f"{rollouts} has no usable held-out prompt ({rows} held-out rows; a prompt needs 1 to {longest} ids); "
            "raise rollouts.held_out, or switch the engine's measurements off with train.evaluation.real_every=null"
        )
    return HeldOutPrompts([_prompt(row) for row in first])


def _prompt(row: dict[str, Any]) -> HeldOutPrompt:
    ids, (start, end) = row["input_ids"], row["response_spans"][-1]
    temperature = row.get("provenance", {}).get("temperature")
    return HeldOutPrompt(str(row["id"]), ids[:start], ids[start:end], row.get("messages", []), temperature)
