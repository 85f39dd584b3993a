"""One run of a recipe: its folder, the names of the files there, and the target that its stages share.

Importing this file loads no torch: a run that is up to date, and the parsers of the commands, do not need it.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.pipeline.launch import check_packages, training_processes
from toolkit.recipe import BenchSettings, Recipe, RecipeError
from toolkit.train_settings import TrainSettings

if TYPE_CHECKING:
    from toolkit.bench.prompts import Prompt
    from toolkit.infer.engine.cpu_door import Use
    from toolkit.infer.request.draft_tree import DraftShape
    from toolkit.targets.facts import ServedTarget, TargetFacts
    from toolkit.targets.target import Target

PROMPTS = "prompts/prompts.jsonl"
ROLLOUTS, ROLLOUTS_STATS = "rollouts/rollouts.jsonl", "rollouts/rollouts_stats.json"
TOKEN_MAP, COVERAGE = "token_map/token_map.safetensors", "token_map/coverage.json"
FEATURES = "features"  # the rollouts' hidden states, where the recipe stores them
METRICS, CKPT_WEIGHTS, CKPT_CONFIG = "train/metrics.jsonl", "ckpt/model.safetensors", "ckpt/config.json"
MEASURED = "ckpt/measured.json"
ACCEPTANCE, ROUNDS = "bench/acceptance.json", "bench/rounds.jsonl"
REPORT, REPORT_PAGE = "report.json", "report.html"


@dataclass
class Run:
    """A run of one recipe. overrides: those already in `recipe`, for child processes."""

    recipe: Recipe
    recipe_path: Path
    overrides: Sequence[str] = ()
    processes: int | None = None  # of training; None: one a GPU, else one
    accelerate_config: Path | None = None
    trains: bool = False  # this command also trains, so the number of training processes is checked first

    @property
    def folder(self) -> Path:
        return Path(self.recipe.run_dir)

    @cached_property
    def target(self) -> Target:
        """The target that writes prompts and rollouts, loaded once for both.

        Mistakes in the recipe that only later stages would find are found here, before hours of work:
        raises `DataError`, `DraftShapeError`, `RecipeError`, `TargetError`.
        """
        self.check_bench()
        self.check_processes()
        # Stored features are in the dtype of the training's target; training would discard those of another dtype.
        target = self.load_target("training" if self.recipe.rollouts.keep_features else "rollouts")
        check_head_fits(target, self.recipe.train)
        return target

    @property
    def writing_target(self) -> Target | ServedTarget:
        """The target that writes prompts and rollouts: without weights where servers run it. Raises as `target`."""
        rollouts = self.recipe.rollouts
        if not rollouts.server:
            return self.target
        from toolkit.targets.facts import served_target

        self.check_bench()
        self.check_processes()
        chosen = self.recipe.target
        target = served_target(
            chosen.model, chosen.revision, rollouts.server, rollouts.server_model, chosen.chat_template
        )
        check_head_fits(target.facts, self.recipe.train)
        return target

    def check_bench(self) -> None:
        """Raise `DataError` or `DraftShapeError` for prompts and shapes that cannot be measured."""
        prompts_and_shapes(self.recipe.bench)

    def check_processes(self) -> None:
        """Raise `RecipeError` or `LaunchError` when this command trains in processes that cannot share a batch, and
        `MissingPackageError` when it trains without the packages that training needs."""
        if self.trains:
            check_packages(self.recipe.train)
            self.recipe.train.check_processes(training_processes(self.processes, self.recipe.train))

    def load_target(self, use: Use) -> Target:
        """The target, on a GPU if there is one, packed for decoding. use: see `cpu_door.load_target`."""
        from toolkit.infer.engine.cpu_door import load_target, pack

        chosen = self.recipe.target
        target = load_target(
            chosen.model,
            dtype=chosen.dtype,
            revision=chosen.revision,
            device=best_device(),
            quantization=chosen.quantization,
            chat_template=chosen.chat_template,
            use=use,
        )
        pack(target)
        return target

    def release_target(self) -> None:
        """Free the target's memory before training loads its own."""
        if self.__dict__.pop("target", None) is not None:
            import torch  # is loaded already: the target was

            gc.collect()
            torch.cuda.empty_cache()  # nothing happens without a GPU


def of_temperature(name: str, temperature: float) -> str:
    """The file of a further temperature, beside that of the first: bench/acceptance-T1.json."""
    path = Path(name)
    return str(path.with_name(f"{path.stem}-T{temperature:g}{path.suffix}"))


def best_device() -> str:
    """A GPU where there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_head_fits(target: Target | TargetFacts, settings: TrainSettings) -> None:
    """Raises `TargetError` or `RecipeError` when no draft head can be built for this target by these settings."""
    from toolkit.heads.decoder_layer import Rope
    from toolkit.tokenmap.token_map import TokenMap
    from toolkit.train.draft_head import plan_head

    config = plan_head(settings, target, TokenMap.identity(target.vocab_size)).config
    try:
        Rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)
    except ValueError as error:
        raise RecipeError(f"target {target.name}: {error}; take another target") from error


def prompts_and_shapes(wanted: BenchSettings) -> tuple[list[Prompt], list[DraftShape]]:
    """The prompts of a measurement, and the shapes that are drafted in every step; `wanted.adaptive` is one more mode.

    Raises `DataError` and `DraftShapeError`.
    """
    from toolkit.bench.prompts import builtin_prompts, read_prompt_files
    from toolkit.infer.request.draft_tree import DraftShape

    shapes = [DraftShape.parse(one) for one in wanted.shapes if one != "adaptive"]
    return builtin_prompts() if wanted.prompts is None else read_prompt_files(wanted.prompts), shapes
