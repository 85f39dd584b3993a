"""Choose the size of a token map by measurement: a larger map costs time in every draft, a smaller one loses drafts.

For each size N of a ranking of ids:

    accept_length   the target's answers with the head over the whole vocabulary (forecast.py), where every draft that
                    the map lacks is a miss
    round           measured seconds of a round with a head of N rows; all sizes and plain rounds take turns
    prediction      accept_length * plain round / round: the speed relative to plain decoding

The best prediction and its neighbours then run end to end beside plain decoding.

Shapes: V target vocabulary, N size of a map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from toolkit.bench.answers import Round, Sampling
from toolkit.bench.bootstrap import resampled_interval
from toolkit.bench.compare import paired
from toolkit.bench.engine_context import longest_prompt, with_context
from toolkit.bench.forecast import forecast_surface
from toolkit.bench.prompts import Prompt
from toolkit.bench.replay import summarise_replays
from toolkit.bench.search import accept_length_of, measured_figures
from toolkit.bench.side_by_side import BenchError, Mode, run_side_by_side
from toolkit.bench.step_times import Parts, measure_draft_times
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.registry import build_head
from toolkit.infer.drafters.dynamic_rows import rows_agree
from toolkit.infer.engine.cpu_door import pack
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.load.load_engine import build_engine
from toolkit.infer.request.draft_tree import PLAIN, DraftShape
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap

SMALLEST = 1024
FORECAST_BATCH = 8
STEP = 256  # rows
Counts = dict[str, tuple[float, float]]  # tokens and verify steps by prompt
OpenDraft = Callable[[], DraftCheckpoint]  # reads the head again, with weights that are not packed


@dataclass(frozen=True)
class SizeResult:
    """One size. coverage: share of the target's own answers that the map keeps. head_seconds, round_s: median seconds
    of drafting and of a whole round.

    predicted_speedup, speedup: relative to plain decoding. The measured ones are None if it did not run end to end.
    With dynamic rows, and at equal time, nothing is predicted. over_equal_time: of dynamic rows, their accept_length
    less that of the static map of equal drafting time, with its interval over prompts.
    """

    name: str
    size: int
    coverage: float | None
    head_seconds: float
    round_s: float
    predicted_accept_length: float | None
    predicted_speedup: float | None
    accept_length: float | None = None
    tokens_per_s: float | None = None
    speedup: float | None = None
    over_equal_time: float | None = None
    interval: tuple[float, float] | None = None


def sizes_of(vocab_size: int, least: int) -> list[int]:
    """Returns the sizes to try: powers of two from SMALLEST that hold the `least` forced ids, and the vocabulary."""
    powers = [1 << bits for bits in range(SMALLEST.bit_length() - 1, vocab_size.bit_length())]
    return [size for size in powers if least <= size < vocab_size] + [vocab_size]


def with_ids(draft: DraftCheckpoint, target: Target, token_map: TokenMap) -> DraftCheckpoint:
    """The head with another token map.

    A head with an output matrix of its own moves to the target's device and dtype, keeps its rows and takes the
    target's for other ids. Raises `BenchError` if its rows are not like the target's, which would not fit it then."""
    config = draft.head.config
    if not config.own_vocabulary:
        return replace(draft, token_map=token_map)
    own = draft.head.cast(target.device, target.dtype).lm_head.weight
    if not rows_agree(own, target, draft.token_map):
        raise BenchError(
            f"the {draft.kind} head has an output matrix of its own that is not the target's, so its map cannot change "
            "after training; the size is chosen with a head of train.head.lm_head frozen or target, or an mtp head"
        )
    head = build_head(replace(config, draft_vocab_size=token_map.size))  # type: ignore[call-arg]
    rows = target.lm_head.weight[token_map.ids.to(own.device)]
    mine = draft.token_map.to_draft(token_map.ids).to(own.device)
    rows[mine >= 0] = own[mine[mine >= 0]]
    head.load_state_dict({**draft.head.state_dict(), "lm_head.weight": rows})
    head = head.cast(own.device, own.dtype).eval().requires_grad_(False)
    return replace(draft, head=head, token_map=token_map)


@dataclass(frozen=True)
class SizeTrials:
    """What all sizes are measured with. Fields as the arguments of `measure_sizes`."""

    target: Target
    open_draft: OpenDraft
    shape: DraftShape
    prompts: Sequence[Prompt]
    sampling: Sampling
    config: EngineConfig

    def fitted(self, token_map: TokenMap, dynamic_rows: int = 0) -> DraftCheckpoint:
        """The head with this map, ready for an engine."""
        draft = with_ids(self.open_draft(), self.target, token_map)
        if any(isinstance(module, nn.Linear) for module in draft.head.modules()):  # it is not packed yet
            draft.head.cast(self.target.device, self.target.dtype)
            pack(self.target, draft, self.config.draft_quantization)
        return replace(draft, dynamic_rows=dynamic_rows)

    def times(self, drafts: Sequence[DraftCheckpoint], texts: Sequence[Sequence[int]]) -> tuple[Parts, list[Parts]]:
        """A plain round, and one with each draft, in turns."""
        return measure_draft_times(self.target, drafts, self.shape, texts, self.config, self.sampling)

    def predicted(self, maps: Sequence[TokenMap]) -> tuple[list[SizeResult], list[tuple[int, ...]]]:
        """Predictions for each map, and the ids of the prompts. The last map keeps all ids."""
        shape, forecasting = self.shape, replace(self.config, max_running_requests=FORECAST_BATCH)
        drafts = [self.fitted(token_map) for token_map in maps]
        surface = forecast_surface(self.target, drafts[-1], self.prompts, [shape], self.sampling, forecasting)
        texts = [one.question.prompt_ids for one in surface.references]
        tokens = torch.tensor([token for one in surface.references for token in one.output_ids])
        plain, rounds = self.times(drafts, texts)
        results = []
        for token_map, parts in zip(maps, rounds, strict=True):
            kept = token_map.t2d.tolist()
            steps = [answer.accepted(shape, kept) for answer in surface.answers[shape.top_k]]
            length = summarise_replays(steps, shape.num_steps).accept_length or 1.0
            coverage = float(token_map.t2d[tokens].float().mean())
            speedup = length * plain.round_s / parts.round_s
            name, size = str(token_map.size), token_map.size
            results.append(SizeResult(name, size, coverage, parts.draft_s, parts.round_s, length, speedup))
        return results, texts

    def run(self, drafts: Mapping[str, DraftCheckpoint]) -> dict[str, tuple[float, float, float, Counts]]:
        """accept_length, tokens per second, speed relative to plain decoding and counts of each draft, in turns."""
        with ExitStack() as engines:

            def mode(label: str | None, draft: DraftCheckpoint | None) -> Mode:
                own = replace(self.config, shape=None if draft is None else self.shape.as_text())
                engine = engines.enter_context(closing(build_engine(own, self.target, draft).engine))
                return Mode(engine, None if draft is None else self.shape, label=label)

            modes = [mode(None, None), *(mode(*one) for one in drafts.items())]
            tokenizer, batch = self.target.tokenizer, self.config.max_running_requests
            rounds = run_side_by_side(modes, tokenizer, self.prompts, self.sampling, batch=batch, warmup=1)
        by_mode = {one.name: [done for done in rounds if done.mode == one.name] for one in modes}
        speeds = {name: measured_figures(own).tokens_per_s for name, own in by_mode.items()}
        return {
            name: (accept_length_of(by_mode[name]), speeds[name], speeds[name] / speeds[PLAIN], _counts(by_mode[name]))
            for name in drafts
        }


def _counts(rounds: Sequence[Round]) -> Counts:
    """Tokens and verify steps by prompt, as accept_length counts them."""
    found: Counts = {}
    for answer in (answer for one in rounds for answer in one.answers):
        steps = [event.committed for event in answer.events if event.offered and not event.truncated]
        before = found.get(answer.question.prompt.question_id, (0, 0))
        found[answer.question.prompt.question_id] = (before[0] + sum(steps), before[1] + len(steps))
    return found


def measure_sizes(
    target: Target,
    open_draft: OpenDraft,
    sizes: Sequence[int],
    map_of: Callable[[int], TokenMap],
    shape: DraftShape,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    config: EngineConfig,
    *,
    run_all: bool = False,
    dynamic_rows: int = 0,
) -> list[SizeResult]:
    """Predict the speed with each map, and run the best and its neighbours (or all) end to end beside plain decoding.

    sizes: ascending; the last one keeps all ids. map_of: returns the map of a size. dynamic_rows: two further modes,
    the best map with so many rows, and a static map whose drafting takes as long.
    Raises `BenchError` for a head whose map cannot change.
    """
    config = replace(config, prefix_cache=False, verify="target", adaptive=False, shape=None)
    config = with_context(config, longest_prompt(target, prompts, sampling.max_tokens), sampling.max_tokens)
    trials = SizeTrials(target, open_draft, shape, prompts, sampling, config)
    maps = [map_of(size) for size in sizes]
    results, texts = trials.predicted(maps)
    best = results.index(predicted_size(results))
    run = range(len(maps)) if run_all else range(max(0, best - 1), min(len(maps), best + 2))
    drafts = {results[at].name: trials.fitted(maps[at]) for at in run}
    equal = dynamic = ""
    if dynamic_rows:
        dynamic, block = f"{results[best].name} + {dynamic_rows}", trials.fitted(maps[best], dynamic_rows)
        _, rounds = trials.times([*map(trials.fitted, maps), block], texts)  # of the same moment
        size = size_of_time(sizes, [one.draft_s for one in rounds[:-1]], rounds[-1].draft_s)
        equal, static = f"{size} (equal time)", map_of(size)
        modes = {dynamic: block, equal: trials.fitted(static)}
        _, rounds = trials.times(list(modes.values()), texts)
        for name, count, parts in zip(modes, (maps[best].size, static.size), rounds, strict=True):
            results.append(SizeResult(name, count, None, parts.draft_s, parts.round_s, None, None))
        drafts |= modes
    figures = trials.run(drafts)
    for at, one in enumerate(results):
        if one.name in figures:
            length, speed, speedup, _ = figures[one.name]
            results[at] = replace(one, accept_length=length, tokens_per_s=speed, speedup=speedup)
        if dynamic_rows and one.name == dynamic:
            difference, interval = paired_difference(figures[dynamic][3], figures[equal][3])
            results[at] = replace(results[at], over_equal_time=difference, interval=interval)
    return results


def size_of_time(sizes: Sequence[int], seconds: Sequence[float], wanted: float) -> int:
    """The size whose drafting takes `wanted` seconds, between the measured ones, in steps of STEP rows.

    A size that was measured faster than a smaller one counts as that one."""
    found = float(np.interp(wanted, np.maximum.accumulate(seconds), sizes))
    return int(min(max(round(found / STEP) * STEP, sizes[0]), sizes[-1]))


def paired_difference(ours: Counts, others: Counts) -> tuple[float, tuple[float, float] | None]:
    """How much longer our accept_length is, and its 95 % interval over prompts; None with fewer than two prompts."""

    def difference(*sums: Any) -> Any:
        tokens, steps, other_tokens, other_steps = sums
        return tokens / np.maximum(steps, 1) - other_tokens / np.maximum(other_steps, 1)

    units = paired(ours, others)
    interval = resampled_interval(units, difference) if len(units) > 1 else None
    return float(difference(*np.sum(units, axis=0))) if units else 0.0, interval


def predicted_size(results: Sequence[SizeResult]) -> SizeResult:
    """The size with the best prediction."""
    return max(
        (one for one in results if one.predicted_speedup is not None), key=lambda one: one.predicted_speedup or 0
    )


def best_size(results: Sequence[SizeResult]) -> SizeResult:
    """The size that `--size auto` takes: of the best prediction and its neighbours, the fastest end to end."""
    sizes = [one for one in results if one.predicted_speedup is not None]
    at = sizes.index(predicted_size(results))
    return max(sizes[max(0, at - 1) : at + 2], key=lambda one: one.speedup or 0.0)
