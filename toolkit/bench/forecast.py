"""Forecast accept_length of any draft shape, without drafting in it.

The target answers the prompts plainly, or has answered them before (`rollout_answers.py`). For each top_k another pass
is forced to write the same answers, in every dtype. It drafts the largest tree after every token and keeps what each
smaller tree would have accepted there (`candidate_recorder.py`). Replaying the jumps root -> root + accepted + 1 then
gives the verify steps, shape by shape:

    answer        A0  A1  A2  A3  A4      A0 comes from the prefill
    root          A0 --accepts 1--> A2 --accepts 0--> A3 ...       each step commits accepted + 1 tokens

In float32 the replay is what the engine does. With 16 bits the engine's verify steps may write other answers, at
near-ties. Above temperature 0 it holds with `verify` target, whose draws depend on seed and position only: one draw of
each answer is replayed, and the interval is over prompts with their draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from toolkit.bench.answers import LoggedAnswer
from toolkit.bench.candidate_recorder import Array, CandidateRecorder
from toolkit.bench.engine_context import SideBySide, Trial, with_eager_rounds
from toolkit.bench.replay import Forecast, summarise_replays
from toolkit.bench.side_by_side import BenchError, Mode, Progress, run_side_by_side
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.attention.linear_layers import linear_layers
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape, candidate_count
from toolkit.infer.request.params import DraftShapeError, SamplingParams
from toolkit.log import get_logger
from toolkit.targets.target import Target

logger = get_logger(__name__)

TOP_KS, NUM_STEPS, NUM_DRAFT_TOKENS = (1, 2, 4, 8), 8, 64  # the surface by default
NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # num_draft_tokens of the trees in tables and searches


@dataclass(frozen=True)
class ForecastAnswer:
    """What trees of one top_k would have accepted in one answer.

    prompt: its question_id; turns of one conversation share it. output_ids: the answer. needed [P, S, S]: see
    `nodes_needed`.
    """

    prompt: str
    output_ids: tuple[int, ...]
    needed: Array

    def accepted(self, shape: DraftShape, kept: Sequence[bool] | None = None) -> list[int]:
        """Returns the accepted drafts of each complete verify step with this shape.

        A step that the end of the answer cuts short is left out. kept: by id, whether a token map keeps it; drafts of
        other ids are misses (None: the map of the forecast)."""
        depths = (self.needed[:, : shape.num_steps, shape.num_steps - 1] <= shape.num_draft_tokens).sum(axis=1).tolist()
        if kept is not None:
            for root, depth in enumerate(depths):
                following = self.output_ids[root + 1 : root + 1 + depth]
                depths[root] = next((at for at, token in enumerate(following) if not kept[token]), depth)
        steps: list[int] = []
        root, last = 0, len(self.output_ids) - 1
        while root < len(depths) and root + depths[root] + 1 <= last:
            steps.append(depths[root])
            root += depths[root] + 1
        return steps


@dataclass(frozen=True)
class Surface:
    """Forecasts of every shape up to `largest`, by top_k.

    references: the answers that every shape is replayed on.
    """

    largest: dict[int, DraftShape]
    answers: dict[int, list[ForecastAnswer]]
    references: list[LoggedAnswer]

    def forecast(self, shape: DraftShape) -> Forecast:
        """Raises KeyError for a top_k without a pass, ValueError for a shape beyond the largest."""
        if not shape.fits_in(self.largest[shape.top_k]):
            raise ValueError(f"shape {shape.as_text()} is beyond {self.largest[shape.top_k].as_text()}, the forecast's")
        by_prompt: dict[str, list[int]] = {}
        for answer in self.answers[shape.top_k]:
            by_prompt.setdefault(answer.prompt, []).extend(answer.accepted(shape))
        return summarise_replays(list(by_prompt.values()), shape.num_steps)

    def shapes(self) -> list[DraftShape]:
        """Returns all chains, and trees of every depth with the node counts NODES that use their depth."""
        return [shape for top_k, largest in self.largest.items() for shape in shapes_of(top_k, largest)]


def shapes_of(top_k: int, largest: DraftShape) -> list[DraftShape]:
    """Returns the shapes of one top_k: chains of every depth, or trees that have more nodes than a chain."""
    depths = range(1, largest.num_steps + 1)
    if top_k == 1:
        return [DraftShape.chain(depth) for depth in depths]
    counts = sorted({*NODES, largest.num_draft_tokens})
    found = []
    for depth in depths:
        most = min(largest.num_draft_tokens, 1 + candidate_count(depth, top_k))
        found += [DraftShape(depth, top_k, nodes) for nodes in counts if depth + 1 < nodes <= most]
    return found


def largest_shape(top_k: int, num_steps: int, num_draft_tokens: int) -> DraftShape:
    """Returns the largest shape of one top_k within these limits. Raises DraftShapeError if they leave none."""
    if num_draft_tokens < (2 if top_k == 1 else 3):
        raise DraftShapeError(
            f"num_draft_tokens is {num_draft_tokens} and top_k {top_k}; a chain has 2 nodes at least, a tree 3, the "
            "root included"
        )
    if top_k == 1:
        return DraftShape.chain(min(num_steps, num_draft_tokens - 1))
    return DraftShape(num_steps, top_k, min(num_draft_tokens, 1 + candidate_count(num_steps, top_k)))


def supported_shapes(target: Target, draft: DraftCheckpoint, largest: Iterable[DraftShape]) -> list[DraftShape]:
    """Returns the shapes that the target can verify and the head can draft; the log names the others.

    Raises DraftShapeError if none is left."""
    found, why = [], ""
    for shape in largest:
        if linear_layers(target.config) and not shape.is_chain:
            why = f"top_k {shape.top_k} is left out: the target has linear-attention layers, and verifies chains only"
        elif shape.top_k > draft.token_map.size:
            why = f"top_k {shape.top_k} is left out: the draft vocabulary has {draft.token_map.size} tokens"
        else:
            at_once = draft.head.config.drafts_at_once
            found.append(shape.up_to(at_once) if at_once else shape)
            continue
        logger.warning("%s", why)
    if not found:
        raise DraftShapeError(f"{why}; give a smaller top_k, such as 1 (chains)")
    return found


def forecast_surface(trial: Trial, largest: Iterable[DraftShape], on_progress: Progress | None = None) -> Surface:
    """Answer the prompts, then draft the largest tree of each top_k at every position.

    largest: a shape for each top_k. on_progress(done, total): counts answers of all passes. Raises BenchError if no
    answer has a complete verify step, and the errors of `build_engine` and `run_side_by_side`.
    """
    largest = list(largest)
    answers = sum(len(one.turns) for one in trial.prompts)

    def tell(done: int) -> None:
        if on_progress is not None:
            on_progress(done, answers * (1 + len(largest)))

    with SideBySide(trial.config, trial.target, 1) as engines:
        rounds = run_side_by_side(
            [Mode(engines.open(), None)], trial.target.tokenizer, trial.prompts, trial.sampling,
            batch=trial.batch, warmup=0, on_progress=lambda done, _: tell(done),
        )  # fmt: skip
    references = [answer for one in rounds for answer in one.answers]
    return replay_answers(trial, references, largest, lambda done, _: tell(answers + done))


def replay_answers(
    trial: Trial, references: list[LoggedAnswer], largest: Iterable[DraftShape], on_progress: Progress | None = None
) -> Surface:
    """Draft the largest tree of each top_k at every position of answers that the target has written before.

    Of the trial prompts and sampling are not read. Arguments and errors: as of `forecast_surface`.
    """
    shapes = {shape.top_k: shape for shape in largest}
    found: dict[int, list[ForecastAnswer]] = {}
    config = with_eager_rounds(replace(trial.config, verify="target"), trial.target)  # the host reads all candidates
    done = 0
    for top_k, shape in shapes.items():
        found[top_k] = []
        with SideBySide(config, trial.target, 1) as engines:
            engine = engines.open(trial.draft, shape)
            for start in range(0, len(references), trial.batch):
                group = references[start : start + trial.batch]
                answers = [one.output_ids for one in group]
                needed = recorded(engine, [one.question.prompt_ids for one in group], answers)
                for one, own in zip(group, needed, strict=True):
                    found[top_k].append(ForecastAnswer(one.question.prompt.question_id, one.output_ids, own))
                done += len(group)
                if on_progress is not None:
                    on_progress(done, len(shapes) * len(references))
    surface = Surface(shapes, found, references)
    if shapes and not any(surface.forecast(one).verify_steps for one in surface.shapes()):
        raise BenchError(
            f"no answer has a complete verify step (the longest has {max(len(one.output_ids) for one in references)} "
            "tokens); raise max_tokens, or give prompts with longer answers"
        )
    return surface


def recorded(engine: Engine, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[Array]:
    """Returns what the trees of the engine's shape would have accepted in each answer to a prompt (`nodes_needed`).

    The engine is forced to write the answers. It has a head, and is used for nothing else afterwards."""
    if isinstance(engine.drafter, HeadDrafter):
        engine.drafter = CandidateRecorder(engine.drafter)
    assert isinstance(engine.drafter, CandidateRecorder), "a head is forecast"
    requests = []
    for prompt, answer in zip(prompts, answers, strict=True):
        request = engine.add_request(prompt, SamplingParams(max_tokens=len(answer), ignore_eos=True))
        request.forced_ids = answer
        requests.append(request)
    while engine.has_work():
        engine.step()
    return [engine.drafter.needed(request) for request in requests]
