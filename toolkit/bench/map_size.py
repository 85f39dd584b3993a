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
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.bench.answers import Round
from toolkit.bench.engine_context import SideBySide, Trial
from toolkit.bench.forecast import forecast_surface
from toolkit.bench.replay import summarise_replays
from toolkit.bench.search import accept_length_of, measured_figures
from toolkit.bench.side_by_side import BenchError, Mode, run_side_by_side
from toolkit.bench.step_times import measure_draft_times
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.registry import build_head
from toolkit.infer.engine.cpu_door import pack
from toolkit.infer.request.draft_tree import PLAIN, DraftShape
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap

SMALLEST = 1024
FORECAST_BATCH = 8
# A head's own output matrix takes rows of the target's only if it has stayed near them: mean cosine of its rows.
SAME_ROWS = 0.9
COMPARED = 256  # rows
OpenDraft = Callable[[], DraftCheckpoint]  # reads the head again, with weights that are not packed


@dataclass(frozen=True)
class SizeResult:
    """One size. coverage: share of the target's own answers that the map keeps. head_seconds, round_s: median seconds
    of drafting and of a whole round.

    predicted_speedup, speedup: relative to plain decoding. The measured ones are None if it did not run end to end, the
    predicted ones if nothing was predicted.
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


def rows_agree(own: Tensor, target: Target, token_map: TokenMap) -> bool:
    """Whether a head's own output matrix [D, H] has rows like the target's: copied from it, and hardly changed."""
    if own.shape[1] != target.hidden_size:
        return False
    take = torch.linspace(0, token_map.size - 1, min(COMPARED, token_map.size)).long()
    mine, theirs = own[take.to(own.device)].float(), target.lm_head.weight[token_map.ids[take].to(own.device)].float()
    return bool(F.cosine_similarity(mine, theirs, dim=1).mean() > SAME_ROWS)


@dataclass(frozen=True)
class SizeTrials:
    """What all sizes are measured with. Fields as the arguments of `measure_sizes`."""

    trial: Trial
    open_draft: OpenDraft
    shape: DraftShape

    def fitted(self, token_map: TokenMap) -> DraftCheckpoint:
        """The head with this map, ready for an engine."""
        target = self.trial.target
        draft = with_ids(self.open_draft(), target, token_map)
        if any(isinstance(module, nn.Linear) for module in draft.head.modules()):  # it is not packed yet
            draft.head.cast(target.device, target.dtype)
            pack(target, draft, self.trial.config.draft_quantization)
        return draft

    def predicted(self, maps: Sequence[TokenMap]) -> tuple[list[SizeResult], list[tuple[int, ...]]]:
        """Predictions for each map, and the ids of the prompts. The last map keeps all ids."""
        shape, drafts = self.shape, [self.fitted(token_map) for token_map in maps]
        surface = forecast_surface(replace(self.trial, draft=drafts[-1]).at_batch(FORECAST_BATCH), [shape])
        texts = [one.question.prompt_ids for one in surface.references]
        tokens = torch.tensor([token for one in surface.references for token in one.output_ids])
        plain, rounds = measure_draft_times(self.trial, drafts, shape, texts)
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

    def run(self, drafts: Mapping[str, DraftCheckpoint]) -> dict[str, list[Round]]:
        """The rounds of plain decoding and of each draft, end to end in turns."""
        trial = self.trial
        with SideBySide(trial.config, trial.target, 1 + len(drafts)) as engines:
            modes = [Mode(engines.open(), None)]
            modes += [Mode(engines.open(draft, self.shape), self.shape, label=name) for name, draft in drafts.items()]
            rounds = run_side_by_side(modes, trial.target.tokenizer, trial.prompts, trial.sampling, batch=trial.batch)
        return {one.name: [done for done in rounds if done.mode == one.name] for one in modes}


def measure_sizes(
    trial: Trial,
    open_draft: OpenDraft,
    sizes: Sequence[int],
    map_of: Callable[[int], TokenMap],
    shape: DraftShape,
) -> list[SizeResult]:
    """Predict the speed with each map, and run the best and its neighbours end to end beside plain decoding.

    sizes: ascending; the last one keeps all ids. map_of: returns the map of a size. Raises `BenchError` for a head
    whose map cannot change.
    """
    trials = SizeTrials(trial.with_room(), open_draft, shape)
    maps = [map_of(size) for size in sizes]
    results, _ = trials.predicted(maps)
    best = results.index(predicted_size(results))
    run = range(max(0, best - 1), min(len(maps), best + 2))
    return with_figures(results, trials.run({results[at].name: trials.fitted(maps[at]) for at in run}))


def with_figures(results: Sequence[SizeResult], run: Mapping[str, Sequence[Round]]) -> list[SizeResult]:
    """The results with the figures of those that were run (`SizeTrials.run`)."""
    speeds = {name: measured_figures(own).tokens_per_s for name, own in run.items()}
    return [
        replace(
            one,
            accept_length=accept_length_of(run[one.name]),
            tokens_per_s=speeds[one.name],
            speedup=speeds[one.name] / speeds[PLAIN],
        )
        if one.name in run
        else one
        for one in results
    ]


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
