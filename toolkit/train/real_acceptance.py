"""Measures accept_length with the engine during training: the current head drafts for the loaded target.

The prompts are the same at every measurement. So are the answers, also at a temperature, because the target's draws
depend only on the seed and the position (up to near-ties in 16 bits). Only the accepted drafts change.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.bench.bootstrap import ratio_interval
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.data.generation import derived_seed
from toolkit.errors import TrainError
from toolkit.head_kinds import HEAD_KINDS
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.load.load_engine import build_engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import DraftShapeError, SamplingParams
from toolkit.infer.request.request import AcceptanceStats, summarise
from toolkit.targets.target import Target
from toolkit.train.engine_client import with_engine
from toolkit.train.training_data import HeldOutPrompt
from toolkit.train_settings import TrainSettings


@dataclass(frozen=True)
class RealAcceptance:
    """The measurement of one draft shape at one temperature.

    accept_length: None without verify steps. interval: 95 %, bootstrap over prompts; None if fewer than two prompts
    have verify steps. tokens: written by all prompts. by_prompt: tokens committed by the counted verify steps of each
    prompt, and their number. tokens_per_s: output tokens a second, prefill included.
    """

    shape: DraftShape
    temperature: float
    stats: AcceptanceStats
    interval: tuple[float, float] | None
    tokens: int
    by_prompt: list[tuple[int, int]]
    seconds: float

    @property
    def accept_length(self) -> float | None:
        return self.stats.accept_length if self.stats.verify_steps else None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def name(self) -> str:
        return f"{self.shape.name} T={self.temperature:g}"


def mean_accept_length(measured: Sequence[RealAcceptance]) -> float | None:
    """The criterion for the best head: the mean over shapes and temperatures; None without verify steps."""
    lengths = [one.accept_length for one in measured if one.accept_length is not None]
    return sum(lengths) / len(lengths) if lengths else None


def shapes_of(settings: TrainSettings) -> list[DraftShape]:
    """train.evaluation.real_shapes, else a chain and a tree as deep as the unroll.

    Raises `DraftShapeError`, also for shapes that a block drafter cannot draft."""
    chain, block = DraftShape.chain(settings.unroll.ttt_steps), HEAD_KINDS[settings.head.kind].block
    if settings.evaluation.real_shapes is None:
        return [chain, DraftShape(chain.num_steps, 4, 4 * chain.num_steps)]
    shapes = [DraftShape.parse(text) for text in settings.evaluation.real_shapes]
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


class Measurement:
    """The prompts, shapes and temperatures of a training's measurements; `by_engine` measures a head."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[HeldOutPrompt],
        settings: TrainSettings,
        seed: int,
        deterministic: bool = False,
    ) -> None:
        self.target, self.prompts, self.deterministic = target, prompts, deterministic
        self.shapes, self.temperatures = shapes_of(settings), settings.evaluation.real_temperatures
        self.max_tokens = settings.evaluation.real_max_tokens
        self.seeds = [derived_seed(seed, "measured in training", one.id) for one in prompts]

    def by_engine(self, draft: DraftCheckpoint) -> list[RealAcceptance]:
        """Measure every shape at every temperature, with all prompts in one batch and the loaded target."""
        prompts = [one.prompt for one in self.prompts]

        def measure(engine: Engine) -> list[RealAcceptance]:
            return [
                self._measure(engine, prompts, shape, temperature)
                for shape in self.shapes
                for temperature in self.temperatures
            ]

        config = EngineConfig(
            shape=DraftShape.covering(self.shapes).as_text(),
            verify="target",
            max_running_requests=len(prompts),
            context_length=max(map(len, prompts)) + self.max_tokens,
            deterministic=self.deterministic,
            prefix_cache=False,  # all shapes and temperatures have the same prompts
        )
        return with_engine(measure, config, self.target, draft)

    def _measure(
        self, engine: Engine, prompts: list[list[int]], shape: DraftShape, temperature: float
    ) -> RealAcceptance:
        engine.set_shape(shape)
        params = [SamplingParams(temperature, seed=seed, max_tokens=self.max_tokens) for seed in self.seeds]
        started = time.perf_counter()
        requests = engine.generate(prompts, params)
        seconds = time.perf_counter() - started
        each = [summarise(request.events) for request in requests]
        by_prompt = [(stats.verify_steps + stats.accepted, stats.verify_steps) for stats in each]
        return RealAcceptance(
            shape=shape,
            temperature=temperature,
            stats=summarise(event for request in requests for event in request.events),
            interval=ratio_interval(*zip(*by_prompt, strict=True)),
            by_prompt=by_prompt,
            tokens=sum(len(request.output_ids) for request in requests),
            seconds=seconds,
        )
