"""Forecast accept_length of any draft shape, without drafting in it.

The target answers the prompts plainly, or has answered them before (`rollout_answers`). For each top_k another pass
is forced to write the same answers, in every dtype. It drafts the largest tree after every token and keeps what each
smaller tree would have accepted there. Replaying the jumps root -> root + accepted + 1 then
gives the verify steps, shape by shape:

    answer        A0  A1  A2  A3  A4      A0 comes from the prefill
    root          A0 --accepts 1--> A2 --accepts 0--> A3 ...       each step commits accepted + 1 tokens

In float32 the replay is what the engine does. With 16 bits the engine's verify steps may write other answers, at
near-ties. Above temperature 0 it holds with `verify` target, whose draws depend on seed and position only: one draw of
each answer is replayed, and the interval is over prompts with their draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolkit.bench.acceptance import describe_draft, measured_target
from toolkit.bench.bootstrap import Forecast, summarise_replays
from toolkit.bench.prompts import Prompt
from toolkit.bench.records import make_record
from toolkit.bench.rows import shape_keys, shape_text
from toolkit.bench.side_by_side import (
    BenchError,
    LoggedAnswer,
    Mode,
    Progress,
    Question,
    SideBySide,
    Trial,
    run_side_by_side,
    with_eager_rounds,
)
from toolkit.bench.table import decimal, new_table, wide_console
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.attention.linear_layers import linear_layers
from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.drafter import WrappedDrafter
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape, DraftTree, candidate_count, root_only
from toolkit.infer.request.params import DraftShapeError, SamplingParams
from toolkit.infer.request.request import Request
from toolkit.jsonl import DataError, read_rows
from toolkit.log import get_logger
from toolkit.targets.load import full_name
from toolkit.targets.target import Target

logger = get_logger(__name__)

TOP_KS, NUM_STEPS, NUM_DRAFT_TOKENS = (1, 2, 4, 8), 8, 64  # the surface by default
NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)  # num_draft_tokens of the trees in tables and searches


@dataclass(frozen=True)
class ForecastAnswer:
    """What trees of one top_k would have accepted in one answer.

    prompt: its question_id; turns of one conversation share it. output_ids: the answer. needed [P, S, S]: see
    `nodes_needed`.
    """

    prompt: str
    output_ids: tuple[int, ...]
    needed: Array

    def accepted(self, shape: DraftShape) -> list[int]:
        """Returns the accepted drafts of each complete verify step with this shape; one that the end of the answer cuts
        short is left out."""
        depths = (self.needed[:, : shape.num_steps, shape.num_steps - 1] <= shape.num_draft_tokens).sum(axis=1).tolist()
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
        """shape: at most the largest of its top_k."""
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
    config = with_eager_rounds(replace(trial.config, verify="target"))  # the host reads all candidates
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


Array = npt.NDArray[np.int64]
NEVER = 1 << 30  # more nodes than any tree has


class CandidateRecorder(WrappedDrafter):
    """Proposes roots only. `needed` tells what the trees of the drafter's shape would have accepted."""

    inner: HeadDrafter

    def __init__(self, inner: HeadDrafter) -> None:
        super().__init__(inner)
        self._found: dict[Request, list[tuple[Array, Array, npt.NDArray[np.float32]]]] = {}

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        if not any(self.inner.shape_of(request) for request in requests):
            return self.inner.skip(requests, rows)
        tokens, parents, scores = (part.cpu().numpy() for part in self.inner.candidates(requests, rows))
        for row, request in enumerate(requests):
            if self.inner.shape_of(request) is not None:
                found = self._found.setdefault(request, [])
                del found[len(request.output_ids) - 1 :]  # a failed round runs again
                found.append((tokens[row], parents[row], scores[row]))
        return root_only(rows.roots)

    def needed(self, request: Request) -> Array:
        """Returns `nodes_needed` after each token but the last of an answer, [P, S, S]; P is 0 if nothing drafts."""
        steps = self.inner.shape.num_steps
        found = self._found.pop(request, [])
        each = [nodes_needed(*one, request.output_ids[at + 1 : at + 1 + steps], steps) for at, one in enumerate(found)]
        return np.stack(each) if each else np.zeros((0, steps, steps), dtype=np.int64)


def nodes_needed(
    tokens: Array,
    parents: Array,
    scores: npt.NDArray[np.floating],
    following: Sequence[int],
    steps: int,
) -> Array:
    """Returns [S, S]: entry [d-1, s-1] is the least num_draft_tokens with which a tree of s levels accepts d drafts.

    tokens, parents (-1: the root), scores [C]: as of `draft_beams`, of `steps` levels. following: the tokens that come
    next. NEVER where no tree accepts so many. The order is that of `rank_candidates`: by score, on a tie by number.
    """
    needed, levels = np.full((steps, steps), NEVER, dtype=np.int64), np.ones_like(parents)
    for _ in range(1, steps):
        levels = np.where(parents < 0, 1, levels[parents] + 1)
    parent = -1
    for depth, token in enumerate(following[:steps], start=1):
        hit = np.flatnonzero((tokens == token) & (parents == parent))
        if not len(hit):
            break
        parent = int(hit[0])
        before = scores > scores[parent]
        before[:parent] |= scores[:parent] == scores[parent]
        for deepest in range(depth, steps + 1):
            needed[depth - 1, deepest - 1] = 2 + int((before & (levels <= deepest)).sum())
    return np.maximum.accumulate(needed, axis=0)


FIELDS = ("id", "messages", "input_ids", "response_spans", "provenance")


def rollout_answers(path: str | Path, target: Target, limit: int | None = None) -> tuple[list[LoggedAnswer], float]:
    """Read the last answer of each row, at most `limit` rows from the first on. Returns them and their temperature.

    Earlier answers are left out: the template has rendered them again, so their ids may be others than the target
    wrote. Raises `DataError` for a row that is no rollout, for answers of another target or of several temperatures,
    and for a file without rows.
    """
    found: list[LoggedAnswer] = []
    temperature: float | None = None
    trained = 0
    for number, row in islice(read_rows(path), limit):
        where = f"{path}:{number}"
        _check_row(row, where, target)
        own = float(row["provenance"].get("temperature", 0.0))
        temperature = own if temperature is None else temperature
        if own != temperature:
            raise DataError(
                f"{where}: the answer is of temperature {own:g}, those before it of {temperature:g}; give a file "
                "of one temperature"
            )
        trained += row.get("split") == "train"
        ids, (start, end) = row["input_ids"], row["response_spans"][-1]
        turns = tuple(message["content"] for message in row["messages"] if message["role"] == "user")
        prompt, params = Prompt(str(row["id"]), Path(path).stem, turns), SamplingParams(temperature=own)
        question = Question(prompt, len(row["response_spans"]) - 1, tuple(ids[:start]), params)
        found.append(LoggedAnswer(question, tuple(ids[start:end]), ()))
    if temperature is None:
        raise DataError(f"{path} has no rows; at least one rollout is required")
    if trained:
        logger.warning(
            "%s: %d of %d answers are of the split for training; a head that was trained on them accepts more there",
            path, trained, len(found),
        )  # fmt: skip
    return found, temperature


def _check_row(row: Mapping[str, Any], where: str, target: Target) -> None:
    absent = [name for name in FIELDS if not row.get(name)]
    if absent:
        raise DataError(
            f"{where}: {', '.join(absent)} missing or empty; a row of `toolkit rollouts` is needed (prompts without "
            "answers are given with --prompts)"
        )
    writer = row["provenance"].get("target")
    if writer is None or full_name(str(writer)) != full_name(target.name):
        raise DataError(
            f"{where}: the answer was written by {writer or 'an unnamed target'}, and the target is {target.name}; "
            "give rollouts of this target"
        )


Row = Mapping[str, Any]


def forecast_record(surface: Surface, trial: Trial, settings: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Make the record of a forecast: a row for every shape of the surface."""
    prompts = len({one.question.prompt.question_id for one in surface.references})
    rows = []
    for shape in surface.shapes():
        found = surface.forecast(shape)
        rows.append(
            {
                **shape_keys(shape),
                "temperature": settings["temperature"],
                "prompts": prompts,
                "verify_steps": found.verify_steps,
                "accept_length": found.accept_length,
                "interval": found.interval,
                "accept_rate": found.accept_rate,
            }
        )
    return make_record(
        "forecast",
        command,
        settings,
        rows,
        target=measured_target(trial.target),
        draft=describe_draft(trial.draft),
        answers=len(surface.references),
    )


def print_surface(record: Row, console: Console | None = None) -> None:
    """Print a table for each top_k: levels downwards, verified nodes to the right."""
    console = console or wide_console()
    settings, rows = record["settings"], record["rows"]
    console.print(
        Text(
            f"accept_length by forecast: {record['target']['name']} ({record['target']['dtype']}), "
            f"{rows[0]['prompts']} prompts, {record['answers']} answers of at most {settings['max_tokens']} tokens, "
            f"temperature {settings['temperature']:g}",
            style="bold",
        )
    )
    for top_k in dict.fromkeys(row["top_k"] for row in rows):
        of_width = [row for row in rows if row["top_k"] == top_k]
        if top_k == 1:
            console.print(Text("top_k 1: chains, by levels"))
            console.print(_chains(of_width))
        else:
            console.print(Text(f"top_k {top_k}: levels downwards, num_draft_tokens (with the root) to the right"))
            console.print(_trees(of_width))
    if settings["temperature"] > 0:
        console.print(
            "each answer is one draw, by its seed: accept_length is that of these draws under --verify target, not an "
            "expectation over draws; the interval is by prompt, and so over their draws too"
        )
    best = max(rows, key=lambda row: row["accept_length"] or 0)
    if best["interval"] is not None:
        low, high = best["interval"]
        console.print(
            f"largest: {shape_text(best)}, {best['accept_length']:.2f} [{low:.2f}, {high:.2f}], 95 % over prompts; "
            "`toolkit search` measures which shape is the fastest"
        )


def _length(row: Row | None) -> str:
    return "" if row is None else decimal(row["accept_length"])


def _chains(rows: Sequence[Row]) -> Table:
    table = new_table("levels", [str(row["num_steps"]) for row in rows])
    table.add_row("accept_length", *map(_length, rows))
    rates = rows[-1]["accept_rate"]
    cells = ["-" if rate is None else f"{100 * rate:.0f} %" for rate in rates]
    table.add_row("accepted at that level", *cells, *[""] * (len(rows) - len(cells)))
    return table


def _trees(rows: Sequence[Row]) -> Table:
    by_place = {(row["num_steps"], row["num_draft_tokens"]): row for row in rows}
    nodes, steps = sorted({one for _, one in by_place}), sorted({one for one, _ in by_place})
    table = new_table("", map(str, nodes))
    for depth in steps:
        table.add_row(str(depth), *(_length(by_place.get((depth, count))) for count in nodes))
    return table
