"""The six stages of a run: what decides each one's result, which files it reads and writes, and who does the work.

prompts -> rollouts -> token_map -> train -> measure -> report. Building the list imports nothing heavy; the work does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.commands.launch import training_processes
from toolkit.commands.stages import PipelineError, Stage
from toolkit.recipe import Recipe, RecipeError, result_settings
from toolkit.train_settings import TrainSettings
from toolkit.weights import read_json

if TYPE_CHECKING:
    from toolkit.commands.feature_capture import OnEnd
    from toolkit.data.conversations import Conversation
    from toolkit.infer.engine.engine import Engine
    from toolkit.targets.load import Target, Use

PROMPTS = "prompts/prompts.jsonl"
ROLLOUTS, ROLLOUTS_STATS = "rollouts/rollouts.jsonl", "rollouts/rollouts_stats.json"
TOKEN_MAP, COVERAGE = "token_map/token_map.safetensors", "token_map/coverage.json"
FEATURES = "features"  # the rollouts' hidden states, where the recipe stores them
METRICS, CKPT_WEIGHTS, CKPT_CONFIG = "train/metrics.jsonl", "ckpt/model.safetensors", "ckpt/config.json"
ACCEPTANCE, ROUNDS = "bench/acceptance.json", "bench/rounds.jsonl"
REPORT, REPORT_PAGE = "report.json", "report.html"
_TARGET_FILES = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.bin")


@dataclass
class Run:
    """One recipe on its way through the stages. `overrides` are those already in `recipe`, for child processes."""

    recipe: Recipe
    recipe_path: Path
    overrides: Sequence[str] = ()
    processes: int | None = None  # of training; None: one a GPU, else one
    accelerate_config: Path | None = None
    trains: bool = False  # training follows in this command, so the number of its processes is a matter from the start

    @property
    def folder(self) -> Path:
        return Path(self.recipe.run_dir)

    @cached_property
    def target(self) -> Target:
        """The target that writes prompts and rollouts, loaded once for both."""
        from toolkit.commands.bench import prompts_and_shapes

        # Found by the last stages, a mistake here or below would cost the minutes of all before.
        prompts_and_shapes(self.recipe.bench)
        if self.trains:
            self.recipe.train.check_processes(training_processes(self.processes, self.recipe.train))
        # Features that are kept for the training are in its target's dtype: it would make others anew.
        target = self.load_target("training" if self.recipe.rollouts.keep_features else "rollouts")
        check_head_fits(target, self.recipe.train)
        return target

    def load_target(self, use: Use) -> Target:
        """The target, packed for decoding. `use` decides its dtype, see `toolkit.targets.load.load_target`."""
        from toolkit.targets.load import load_target

        chosen = self.recipe.target
        target = load_target(
            chosen.model,
            dtype=chosen.dtype,
            revision=chosen.revision,
            device=best_device(),
            quantization=chosen.quantization,
            use=use,
        )
        target.pack()
        return target

    def release_target(self) -> None:
        """Give the target's memory back before training loads its own."""
        if self.__dict__.pop("target", None) is not None:
            import torch

            gc.collect()
            torch.cuda.empty_cache()  # nothing happens without a GPU

    def stages(self) -> list[Stage]:
        """Raises `RecipeError` for a recipe that names no prompts."""
        recipe = self.recipe
        if not recipe.prompts.sources and not recipe.prompts.synthesize:
            raise RecipeError("the recipe names no prompts: set prompts.sources, prompts.synthesize, or both")
        target = {"seed": recipe.seed, "target": result_settings(recipe.target)}
        heats = recipe.bench.further_temperatures
        measured = (ACCEPTANCE, *(of_temperature(ACCEPTANCE, heat) for heat in heats))
        return [
            Stage(
                name="prompts",
                folder="prompts",
                outputs=(PROMPTS,),
                settings={**target, "prompts": result_settings(recipe.prompts)},
                inputs=lambda: self._inputs(own=recipe.prompts.sources),
                work=self._write_prompts,
                self_checking=True,
            ),
            Stage(
                name="rollouts",
                folder="rollouts",
                outputs=(ROLLOUTS,),
                settings={**target, "rollouts": result_settings(recipe.rollouts)},
                inputs=lambda: self._inputs(PROMPTS),
                work=self._write_rollouts,
                makes=(FEATURES,),
                self_checking=True,
            ),
            Stage(
                name="token_map",
                folder="token_map",
                outputs=(TOKEN_MAP, COVERAGE),
                settings={"target": target["target"], "token_map": result_settings(recipe.token_map)},
                inputs=lambda: self._inputs(ROLLOUTS),
                work=self._build_token_map,
            ),
            Stage(
                name="train",
                folder="train",
                outputs=(METRICS, CKPT_WEIGHTS, CKPT_CONFIG),
                settings={**target, "train": result_settings(recipe.train)},
                inputs=lambda: self._inputs(ROLLOUTS, TOKEN_MAP),
                work=self._train,
                makes=("ckpt",),
                self_checking=True,
            ),
            Stage(
                name="measure",
                folder="bench",
                outputs=measured,
                settings={**target, "bench": result_settings(recipe.bench)},
                inputs=lambda: self._inputs(CKPT_WEIGHTS, CKPT_CONFIG, own=recipe.bench.prompts or ()),
                work=self._measure,
            ),
            Stage(
                name="report",
                folder="report",
                outputs=(REPORT, REPORT_PAGE),
                settings={"name": recipe.name},
                inputs=lambda: self._inputs(COVERAGE, METRICS, *measured, CKPT_CONFIG, target_too=False),
                work=self._report,
                makes=(REPORT, REPORT_PAGE),
            ),
        ]

    def _inputs(self, *made: str, own: Sequence[str | None] = (), target_too: bool = True) -> Mapping[str, Path]:
        """Files of earlier stages, the user's own files, and a target that lies on this disk."""
        files = {name: self.folder / name for name in made}
        files.update({name: Path(name) for name in own if name is not None and _is_local_file(name)})
        return {**files, **local_target_files(self.recipe.target.model)} if target_too else files

    def _write_prompts(self) -> str:
        from toolkit.commands.synthesize import write_prompts

        return write_prompts(self.target, self.recipe.prompts, self.recipe.seed, self.folder / PROMPTS)

    def _write_rollouts(self) -> str:
        from toolkit.commands.rollouts import answer_prompts

        told = answer_prompts(
            self.target,
            self.recipe.rollouts,
            self.recipe.seed,
            self.folder / PROMPTS,
            self.folder / ROLLOUTS,
            capture=self._capture() if self.recipe.rollouts.keep_features else None,
        )
        splits = read_json(self.folder / ROLLOUTS_STATS)["splits"]
        absent = [name for name, count in splits.items() if not count]
        if absent:
            raise PipelineError(
                f"no rollout is in the split {' or '.join(absent)} (held_out={self.recipe.rollouts.held_out}), "
                "and training needs both; give more prompts, or another share"
            )
        return told

    def _capture(self) -> Callable[[Engine, Sequence[Conversation]], AbstractContextManager[OnEnd]]:
        from toolkit.commands.feature_capture import captured_features

        longest_answer = self.recipe.rollouts.max_tokens
        folder = self.folder / FEATURES
        return partial(captured_features, settings=self.recipe.train, max_tokens=longest_answer, folder=folder)

    def _build_token_map(self) -> str:
        from toolkit.commands.build_token_map import map_rollouts

        wanted = self.recipe.token_map
        return map_rollouts(
            self.target, self.folder / ROLLOUTS, self.folder / "token_map", wanted.size, wanted.coverage
        )

    def _train(self) -> str:
        from toolkit.commands.train import train_head

        self.release_target()
        return train_head(self)

    def _measure(self) -> str:
        from toolkit.commands.bench import measure_run

        return measure_run(self)

    def _report(self) -> str:
        from toolkit.commands.report import report_run

        return report_run(self.folder)


def of_temperature(name: str, temperature: float) -> str:
    """The file of a further temperature, beside that of the first: bench/acceptance-T1.json."""
    path = Path(name)
    return str(path.with_name(f"{path.stem}-T{temperature:g}{path.suffix}"))


def check_head_fits(target: Target, settings: TrainSettings) -> None:
    """Raises `TargetError` or `RecipeError` when no draft head can be built for this target by these settings."""
    from toolkit.heads.rope import Rope
    from toolkit.tokenmap.token_map import TokenMap
    from toolkit.train.draft_head import plan_head

    config = plan_head(settings, target, TokenMap.identity(target.vocab_size)).config
    try:
        Rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)
    except ValueError as error:
        raise RecipeError(f"target {target.name}: {error}; take another target") from error


def best_device() -> str:
    """A GPU where there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def local_target_files(model: str) -> dict[str, Path]:
    """Files of a target on this disk, so that a retrained one counts as another; none for hub and demo names."""
    path = Path(model).expanduser()
    if path.is_file():
        return {path.name: path}
    if not path.is_dir():
        return {}
    found = {file.name: file for pattern in _TARGET_FILES for file in sorted(path.glob(pattern))}
    return {f"target {name}": file for name, file in sorted(found.items())}


def _is_local_file(source: str) -> bool:
    """Directories and hub datasets count by their name; a file that is absent is kept, so that its absence is told."""
    return not source.startswith("hub:") and not Path(source).is_dir()
