"""How training uses the engine: as the `generate` callable that writes prompts and rollouts, for a short time with
loaded models, and for fresh on-policy rollouts with the head in training as the drafter.

The fresh rollouts of a step depend only on the recipe and the step, which decide prompts, temperatures and seeds. The
tokens are the target's whatever the head drafts (in 16 bits up to near-ties). So an interrupted run writes only the
missing rollouts when it resumes, and the result is the same. The processes divide the prompts; each trains on all:

    <run>/train/fresh/000200.0.jsonl, 000200.1.jsonl   one file for each process, while it appends rows
                     000200.jsonl, 000200_stats.json   the result
"""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.data.chat_template import template_text
from toolkit.data.conversations import Conversation, Conversations, conversation_from_row, user_turns
from toolkit.data.generation import REFUSED, GenerateFn, GenerationRequest, GenerationResult, derived_seed
from toolkit.data.rollouts import RolloutPaths, write_rollouts
from toolkit.errors import TrainError
from toolkit.head_kinds import HEAD_KINDS
from toolkit.heads.head_config import HeadConfig
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.load_engine import build_engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import DraftShapeError, SamplingParams
from toolkit.infer.request.request import Request, summarise
from toolkit.jsonl import DataError, StoredRows, read_rows
from toolkit.log import get_logger
from toolkit.recipe import Recipe
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.agreement import from_main, wait_for_files
from toolkit.train.state import as_draft, gathered_weights, in_dtype
from toolkit.train_settings import TrainSettings
from toolkit.weights import atomic_write, load_tensors, read_json, save_tensors, write_json

if TYPE_CHECKING:  # pipeline stages before training import this file without accelerate
    from accelerate import Accelerator


Result = TypeVar("Result")

log = get_logger(__name__)


def engine_generate(
    engine: Engine,
    draft_used: str | None = None,
    on_end: Callable[[GenerationRequest, Request], None] | None = None,
) -> GenerateFn:
    """A `generate` callable over `engine`. It adds a request as soon as one ends, so that the batch stays full.

    draft_used: goes into every result's provenance. on_end: called with each request before its result is yielded.
    When the caller leaves the loop early (an error, Ctrl-C), running requests are aborted.
    """

    def generate(requests: Iterable[GenerationRequest]) -> Iterator[tuple[int, GenerationResult]]:
        waiting = enumerate(requests)
        running: dict[int, tuple[int, GenerationRequest, Request]] = {}
        try:
            # One more than max_running_requests, so that no step has a free row.
            while _fill(engine, waiting, running, engine.max_running_requests + 1):
                for request in engine.step():
                    if request.finish_reason is not None:
                        index, asked, _ = running.pop(id(request))
                        if on_end is not None:
                            on_end(asked, request)
                        yield index, _result(request, draft_used)
        finally:
            for *_, request in running.values():
                engine.abort(request)

    return generate


def _result(request: Request, draft_used: str | None) -> GenerationResult:
    assert request.finish_reason is not None, "a request has a result only after it has ended"
    stats = summarise(request.events)
    # "abort": its logits were not finite, or its prompt had no room. The other requests go on.
    reason = REFUSED if request.finish_reason == "abort" else request.finish_reason
    return GenerationResult(list(request.output_ids), reason, draft_used, stats.verify_steps, stats.accepted)


def _fill(
    engine: Engine,
    waiting: Iterator[tuple[int, GenerationRequest]],
    running: dict[int, tuple[int, GenerationRequest, Request]],
    limit: int,
) -> bool:
    """Add requests until `limit` run or wait in the engine; False when no request is left."""
    while len(running) < limit:
        upcoming = next(waiting, None)
        if upcoming is None:
            break
        index, asked = upcoming
        params = SamplingParams(
            temperature=asked.temperature, top_p=asked.top_p, max_tokens=asked.max_tokens, seed=asked.seed
        )
        request = engine.add_request(asked.prompt_ids, params)
        running[id(request)] = (index, asked, request)
    return bool(running)


def with_engine(
    use: Callable[[Engine], Result], config: EngineConfig, target: Target, draft: Draft | None = None
) -> Result:
    """The result of `use` with an engine of `config` over loaded models. `use` must not keep the engine: its memory is
    freed.

    On a GPU torch caches freed memory. Without `empty_cache` the engine would find little free memory, and the next
    training step, whose tensors have other sizes, might find none.
    """
    torch.cuda.empty_cache()  # does nothing without a GPU
    engine = build_engine(config, target, draft, short_lived=True).engine
    try:
        return use(engine)
    finally:
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()


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
        self.shape = real_shapes(recipe.train)[0]

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
        if not from_main(accelerator, path.is_file):
            self._write_shares(step, self._share_head(step, model))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                self._gather_shares(step)
            accelerator.wait_for_everyone()
        wait_for_files(path)  # the next batches are of it
        return from_main(accelerator, lambda: read_json(_stats_path(path)))

    def _share_head(self, step: int, model: torch.nn.Module) -> DraftCheckpoint:
        """The head as a draft checkpoint on every process. A file carries the weights: under ZeRO-3 only the main
        process gets them gathered."""
        path = self.folder / f"{step:06d}.head.safetensors"
        weights = gathered_weights(self.accelerator, model)
        if self.accelerator.is_main_process:
            save_tensors(path, in_dtype(weights, self.config, self.target.dtype))
        self.accelerator.wait_for_everyone()
        wait_for_files(path)
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
        """Write the statistics and one file of all shares, then delete the shares and the head. A resumed run repeats
        this after a kill at any point.

        Memory: the rows of one step, one for each prompt.
        """
        path = self.path(step)
        writers = min(self.accelerator.num_processes, len(self.prompts(step)[0]))
        shares = [RolloutPaths(self._share_path(step, rank)) for rank in range(writers)]
        wait_for_files(*(share.stats for share in shares))
        measured = [read_json(share.stats) for share in shares]
        wait_for_files(*(share.rows for share, stats in zip(shares, measured, strict=True) if stats["rollouts"]))
        written = [row for share in shares if share.rows.is_file() for _, row in read_rows(share.rows)]
        rows = sorted(written, key=itemgetter("id"))
        write_json(_stats_path(path), _stats(rows, measured))
        with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as handle:
            for row in rows:
                handle.write(json.dumps(row, ensure_ascii=False) + "\n")
        for done in set(self.folder.glob(f"{step:06d}.*")) - {path}:
            done.unlink()

    def _share_path(self, step: int, rank: int) -> Path:
        # Of so many processes: those of a killed run with another number have other prompts in each.
        return self.folder / f"{step:06d}.{rank}-of-{self.accelerator.num_processes}.jsonl"


def _stats_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}_stats.json")


def _stats(rows: Sequence[Mapping[str, Any]], shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """tokens: response tokens. tokens_per_s: of all processes together, prefill included, since the last resume.
    accept_length: over the verify steps with drafts; None without any."""
    steps = sum(row["drafting"]["verify_steps"] for row in rows)
    accepted = sum(row["drafting"]["accepted"] for row in rows)
    seconds = max((share["last_run"]["seconds"] for share in shares), default=0.0)
    return {
        "rollouts": len(rows),
        "skipped": sum(sum(share["skipped"].values()) for share in shares),
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


def real_shapes(settings: TrainSettings) -> list[DraftShape]:
    """train.evaluation.real_shapes, else a chain and a tree as deep as the unroll.

    Raises `DraftShapeError`, also for shapes that a block drafter cannot draft."""
    chain, block = DraftShape.chain(settings.unroll.ttt_steps), HEAD_KINDS[settings.head.kind].block
    if settings.evaluation.real_shapes is None:
        return [chain, DraftShape(chain.num_steps, 4, 4 * chain.num_steps)]
    levels = chain.num_steps if block else 0
    shapes = [DraftShape.parse(text).for_head(levels) for text in settings.evaluation.real_shapes]
    if block and any(one.num_steps > chain.num_steps for one in shapes):
        raise DraftShapeError(
            f"train.evaluation.real_shapes is {settings.evaluation.real_shapes}; a block drafter takes at most "
            f"train.unroll.ttt_steps levels, such as {chain.as_text()}"
        )
    return shapes


def check_engine_runs(
    target: Target, draft_vocabulary: int, shapes: Sequence[DraftShape], deterministic: bool = False
) -> None:
    """Raise `TrainError` if the engine cannot run with this target and these shapes. Training calls this before its
    first step, not hours later at the first measurement. deterministic: it also changes the target's modules, so that
    all steps of a training and of a resumed one have the same."""
    wide = [shape for shape in shapes if shape.top_k > draft_vocabulary]
    if wide:
        raise TrainError(
            f"draft shape {wide[0].name} has more branches than the draft vocabulary has tokens "
            f"({draft_vocabulary}); set train.evaluation.real_shapes to narrower ones"
        )
    try:
        context = min(64, target.max_context)
        config = EngineConfig(max_running_requests=1, context_length=context, disable_cuda_graph=True)
        config = config.with_options(deterministic=deterministic)
        build_engine(config, target).engine.close()
    except ValueError as error:
        raise TrainError(
            f"{error}; to train without the engine, set train.evaluation.real_every=null and train.on_policy.every=null"
        ) from error
