"""Fresh on-policy rollouts: training pauses, and the engine answers prompts with the head in training as its drafter.

The rollouts of a step depend only on the recipe and the step, which decide prompts, temperatures and seeds. The tokens
are the target's whatever the head drafts (in 16 bits up to near-ties). So an interrupted run writes only the missing
rollouts when it resumes, and the result is the same. The processes divide the prompts among them; each trains on all:

    <run>/train/fresh/000200.0.jsonl, 000200.1.jsonl   one file for each process, while it appends rows
                     000200.jsonl, 000200_stats.json   the result
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.data.chat_template import template_text
from toolkit.data.conversations import Conversation, Conversations, conversation_from_row, user_turns
from toolkit.data.generation import derived_seed
from toolkit.data.rollouts import RolloutPaths, write_rollouts
from toolkit.heads.head_config import HeadConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.config import EngineConfig
from toolkit.jsonl import DataError, StoredRows, read_rows
from toolkit.log import get_logger
from toolkit.recipe import Recipe
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.engine_client import engine_generate, with_engine
from toolkit.train.head_snapshot import as_draft, gathered_weights, in_dtype
from toolkit.train.real_acceptance import shapes_of
from toolkit.weights import atomic_write, load_tensors, read_json, save_tensors, write_json

log = get_logger(__name__)


class FreshRollouts:
    """Writes and finds the fresh rollouts of a training. Raises `DataError` when the stored rollouts hold no prompts or
    the target has no chat template."""

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        token_map: TokenMap,
        config: HeadConfig,
        rollouts: Path,
        directory: Path,
        accelerator: Accelerator,
    ) -> None:
        self.recipe, self.target, self.token_map, self.config = recipe, target, token_map, config
        self.folder, self.accelerator = directory / "fresh", accelerator
        template_text(target.tokenizer)  # raises now if it has none, not after the first interval
        self.pool = read_pool(rollouts)
        self.shape = shapes_of(recipe.train)[0]

    def path(self, step: int) -> Path:
        return self.folder / f"{step:06d}.jsonl"

    def prompts(self, step: int) -> tuple[list[Conversation], dict[str, float]]:
        """The prompts of a step, and the temperature of each by its id."""
        settings = self.recipe.train
        assert settings.on_policy.every is not None, "fresh rollouts need an interval"
        count = settings.on_policy.prompts or settings.on_policy.every * settings.data.global_batch
        first = (step // settings.on_policy.every - 1) * count
        chosen = take_prompts(self.pool, self.recipe.seed, first, count)
        # Counted over all intervals: one interval may have fewer prompts than temperatures.
        temperatures = settings.on_policy.temperatures
        return chosen, {one.id: temperatures[place % len(temperatures)] for place, one in enumerate(chosen, first)}

    def write(self, step: int, model: torch.nn.Module) -> dict[str, Any]:
        """Write the missing rollouts of `step` with the current head; return their statistics (`_stats`). All processes
        must call this."""
        path, accelerator = self.path(step), self.accelerator
        accelerator.wait_for_everyone()
        if not path.is_file():
            self._write_shares(step, self._share_head(step, model))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                self._gather_shares(step)
            accelerator.wait_for_everyone()
        return read_json(_stats_path(path))

    def _share_head(self, step: int, model: torch.nn.Module) -> DraftCheckpoint:
        """The head as a draft checkpoint on every process. A file carries the weights: under ZeRO-3 only the main
        process gets them gathered."""
        path = self.folder / f"{step:06d}.head.safetensors"
        weights = gathered_weights(self.accelerator, model)
        if self.accelerator.is_main_process:
            save_tensors(path, in_dtype(weights, self.config, self.target.dtype))
        self.accelerator.wait_for_everyone()
        return as_draft(load_tensors(path), self.config, self.token_map, self.target)

    def _write_shares(self, step: int, draft: DraftCheckpoint) -> None:
        settings = replace(self.recipe.rollouts, held_out=0.0)
        chosen, temperatures = self.prompts(step)
        mine = chosen[self.accelerator.process_index :: self.accelerator.num_processes]
        if not mine:
            return
        log.info("step %d: the engine writes %d fresh rollouts, with the current head as drafter", step, len(chosen))

        def write(engine: Engine) -> None:
            write_rollouts(
                mine,
                engine_generate(engine, f"{self.recipe.name}, step {step}"),
                self.target.tokenizer,
                settings,
                self._share_path(step, self.accelerator.process_index),
                target=self.target.name,
                seed=derived_seed(self.recipe.seed, "fresh rollouts", step),
                max_context=engine.context_length,
                temperatures=temperatures,
                more_provenance={"step": step},
                may_be_empty=True,
            )

        config = EngineConfig(
            shape=self.shape.as_text(),
            verify="target",
            deterministic=settings.deterministic,
            max_running_requests=settings.max_running_requests,
        )
        # An eager round of a head that still drafts badly may cost more than it gains; a recorded one costs less.
        config = replace(config, adaptive=config.why_eager(self.target.device.type) is not None)
        with_engine(write, config, self.target, draft)

    def _gather_shares(self, step: int) -> None:
        """Write the statistics and one file of all shares, then delete the shares. A resumed run repeats this after a
        kill at any point.

        Memory: the rows of one step, one for each prompt.
        """
        path = self.path(step)
        shares = [
            RolloutPaths(share)
            for rank in range(self.accelerator.num_processes)
            if (share := self._share_path(step, rank)).is_file()
        ]
        rows = sorted((row for share in shares for _, row in read_rows(share.rows)), key=lambda row: row["id"])
        skipped = [row for share in shares if share.skipped.is_file() for _, row in read_rows(share.skipped)]
        measured = [read_json(share.stats) for share in shares]
        write_json(_stats_path(path), _stats(rows, len(skipped), measured))
        with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as handle:
            for row in rows:
                handle.write(json.dumps(row, ensure_ascii=False) + "\n")
        for one in shares:
            for done in (one.rows, one.skipped, one.stats):
                done.unlink(missing_ok=True)
        (self.folder / f"{step:06d}.head.safetensors").unlink(missing_ok=True)

    def _share_path(self, step: int, rank: int) -> Path:
        return self.folder / f"{step:06d}.{rank}.jsonl"


def _stats_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}_stats.json")


def _stats(rows: Sequence[Mapping[str, Any]], skipped: int, shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """tokens: response tokens. tokens_per_s: of all processes together, prefill included, since the last resume.
    accept_length: over the verify steps with drafts; None without any."""
    steps = sum(row["drafting"]["verify_steps"] for row in rows)
    accepted = sum(row["drafting"]["accepted"] for row in rows)
    seconds = max((share["last_run"]["seconds"] for share in shares), default=0.0)
    return {
        "rollouts": len(rows),
        "skipped": skipped,
        "tokens": sum(end - start for row in rows for start, end in row["response_spans"]),
        "tokens_per_s": sum(share["last_run"]["tokens"] for share in shares) / seconds if seconds > 0 else None,
        "accept_length": 1 + accepted / steps if steps else None,
        "verify_steps": steps,
    }


def read_pool(rollouts: str | Path) -> Conversations:
    """Read the prompts of the training split of a rollouts file, sorted by id; held-out prompts are excluded.

    Memory: the id and about 30 bytes per prompt; messages are read on access.
    Raises `DataError` for rows without messages, and when the split is empty.
    """
    rows = StoredRows(rollouts)
    pool: list[tuple[str, int]] = []  # id, place among the rows
    for at, row in enumerate(rows):
        if row.get("split") != "train":
            continue
        if not row.get("messages"):
            raise DataError(
                f"{rows.where(at)}: the rollout has no messages, so its prompt cannot be answered again; use rollouts "
                "that `toolkit rollouts` wrote, or set train.on_policy.every=null"
            )
        pool.append((conversation_from_row(row, rows.where(at), str(row["id"])).id, at))
    if not pool:
        raise DataError(
            f"{rollouts} has no rollouts of the training split, whose prompts are to be answered again; "
            "write more rollouts, or set train.on_policy.every=null"
        )
    pool.sort(key=itemgetter(0))
    rows.keep([at for _, at in pool])
    return Conversations(
        [name for name, _ in pool], lambda at: user_turns(conversation_from_row(rows[at], rows.where(at), ""))
    )


def take_prompts(pool: Sequence[Conversation], seed: int, start: int, count: int) -> list[Conversation]:
    """Return prompts start .. start+count-1 of the sequence, a pure function of the arguments.

    From the second pass on, the number of the pass is appended to the id (`id@2`): ids stay unique, and draws seeded by
    them differ.
    """
    taken: list[Conversation] = []
    while len(taken) < count:
        number, first = divmod(start + len(taken), len(pool))
        order = list(range(len(pool)))
        random.Random(f"prompt pool {seed} {number}").shuffle(order)
        for index in order[first : first + count - len(taken)]:
            one = pool[index]
            taken.append(one if number == 0 else Conversation(f"{one.id}@{number + 1}", one.messages))
    return taken
