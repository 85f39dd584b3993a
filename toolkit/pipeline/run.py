"""One run of a recipe: its folder, the names of the files there, the target that its stages share, and its six stages:
what decides each one's result, which files it reads and writes, and who does the work.

prompts -> rollouts -> token_map -> train -> measure -> report. The files that do the work load torch, which takes
seconds. They are imported when a stage works: a run that is up to date, and the parsers of the commands, do without.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.pipeline.launch import (
    check_packages,
    run_training,
    set_threads,
    training_line,
    training_processes,
    zero_stage,
)
from toolkit.pipeline.stages import FILE_NAME, PipelineError, Stage, run_stages, say
from toolkit.recipe import BenchSettings, Recipe, RecipeError, result_settings
from toolkit.train_settings import TrainSettings
from toolkit.weights import read_json

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
_TARGET_FILES = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.bin")
_HEAD_FILES = ("config.json", "*.safetensors", "*.bin", "*.gguf")  # without its measurements


@dataclass
class Run:
    """A run of one recipe. overrides: those already in `recipe`, for child processes."""

    recipe: Recipe
    recipe_path: Path
    overrides: Sequence[str] = ()
    processes: int | None = None  # of training; None: see `training_processes`
    accelerate_config: Path | None = None
    trains: bool = False  # this command also trains, so the number of training processes is checked first

    @property
    def folder(self) -> Path:
        return Path(self.recipe.run_dir)

    @cached_property
    def target(self) -> Target | ServedTarget:
        """The target that writes prompts and rollouts, loaded once for both; without weights where servers run it.

        Mistakes in the recipe that only later stages would find are found here, before hours of work:
        raises `DataError`, `DraftShapeError`, `RecipeError`, `TargetError`.
        """
        from toolkit.targets.facts import served_target

        self.check_bench()
        self.check_training()
        chosen, rollouts, template = self.recipe.target, self.recipe.rollouts, self.recipe.target.chat_template
        if rollouts.server:
            served = served_target(chosen.model, chosen.revision, rollouts.server, rollouts.server_model, template)
            check_head_fits(served.facts, self.recipe.train)
            return served
        # Stored features are in the dtype of the training's target; training would discard those of another dtype.
        target = self.load_target("training" if rollouts.keep_features else "rollouts")
        check_head_fits(target, self.recipe.train)
        return target

    def check_bench(self) -> None:
        """Raise `DataError` or `DraftShapeError` for prompts and shapes that cannot be measured."""
        prompts_and_shapes(self.recipe.bench)

    def check_training(self) -> None:
        """Raise `RecipeError` or `LaunchError` when this command trains in processes that cannot share a batch or need
        too much memory, and `MissingPackageError` when it trains without the packages that training needs."""
        if self.trains:
            check_packages(self.recipe.train)
            processes = training_processes(self.processes, self.recipe.train)
            self.recipe.train.check_processes(processes)
            from toolkit.train.needed_memory import check_memory

            check_memory(self.recipe, processes, zero_stage(self.accelerate_config))

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


def put_by_hand(folder: Path) -> bool:
    """Whether rollouts and token map lie in a run folder without a manifest: they are taken as they are."""
    return all((folder / name).is_file() for name in (ROLLOUTS, TOKEN_MAP)) and not (
        (folder / ROLLOUTS).with_name(FILE_NAME).is_file()
    )


def run_recipe(run: Run, *, force: str | None = None, until: str | None = None) -> None:
    """Bring the stages of a run up to date, up to and with `until`; `force` redoes from one on. Prints what is done.

    Raises `RecipeError` for a recipe that names no prompts, `PipelineError` as `run_stages` does.
    """
    stages = recipe_stages(run)
    threads = set_threads()
    say(f"{run.recipe.name}: {run.recipe_path} -> {run.folder} ({threads} threads; OMP_NUM_THREADS changes it)")
    run_stages(run.folder, stages, force=force, until=until)


def recipe_stages(run: Run) -> list[Stage]:
    """The stages of a run, in order. Raises `RecipeError` for a recipe that names no prompts."""
    recipe = run.recipe
    if not recipe.prompts.sources and not recipe.prompts.synthesize:
        raise RecipeError("the recipe names no prompts: set prompts.sources, prompts.synthesize, or both")
    target = {"seed": recipe.seed, "target": result_settings(recipe.target)}
    bits = {"deterministic": True} if recipe.rollouts.deterministic else {}
    measured = (ACCEPTANCE, *(of_temperature(ACCEPTANCE, one) for one in recipe.bench.further_temperatures))
    return [
        Stage(
            name="prompts",
            folder="prompts",
            outputs=(PROMPTS,),
            settings={**target, "prompts": result_settings(recipe.prompts)},
            inputs=lambda: _inputs(run, own=recipe.prompts.sources),
            work=partial(_work, "prompts", run),
            self_checking=True,
        ),
        Stage(
            name="rollouts",
            folder="rollouts",
            outputs=(ROLLOUTS,),
            settings={**target, "rollouts": result_settings(recipe.rollouts)},
            inputs=lambda: _inputs(run, PROMPTS),
            work=partial(_work, "rollouts", run),
            makes=(FEATURES,),
            self_checking=True,
        ),
        Stage(
            name="token_map",
            folder="token_map",
            outputs=(TOKEN_MAP, COVERAGE),
            settings={"target": target["target"], "token_map": result_settings(recipe.token_map)},
            inputs=lambda: _inputs(run, ROLLOUTS),
            work=partial(_work, "token_map", run),
        ),
        Stage(
            name="train",
            folder="train",
            outputs=(METRICS, CKPT_WEIGHTS, CKPT_CONFIG),
            settings={**target, **bits, "train": result_settings(recipe.train)},
            inputs=lambda: {**_inputs(run, ROLLOUTS, TOKEN_MAP), **local_files(recipe.train.init, "init", _HEAD_FILES)},
            work=partial(train_stage, run),
            check=run.check_training,
            makes=("ckpt",),
            self_checking=True,
        ),
        Stage(
            name="measure",
            folder="bench",
            outputs=(*measured, MEASURED),
            settings={**target, **bits, "bench": result_settings(recipe.bench)},
            inputs=lambda: _inputs(run, CKPT_WEIGHTS, CKPT_CONFIG, own=_files_of(recipe.bench.prompts)),
            work=partial(_work, "measure", run),
            check=run.check_bench,
        ),
        Stage(
            name="report",
            folder="report",
            outputs=(REPORT, REPORT_PAGE),
            settings={"name": recipe.name},
            inputs=lambda: _inputs(run, COVERAGE, METRICS, *measured, CKPT_CONFIG, target_too=False),
            work=partial(_work, "report", run),
            makes=(REPORT, REPORT_PAGE),
        ),
    ]


def _work(name: str, run: Run) -> str:
    """Do the work of a stage and return its headline. A run that is up to date imports none of these files."""
    from toolkit.bench.report import write_report
    from toolkit.pipeline.measure import measure_stage
    from toolkit.pipeline.rollouts import prompts_stage, rollouts_stage
    from toolkit.pipeline.token_map import token_map_stage

    if name == "report":
        return ", ".join(path.name for path in write_report(run.folder))
    stages = {"prompts": prompts_stage, "rollouts": rollouts_stage, "token_map": token_map_stage}
    return {**stages, "measure": measure_stage}[name](run)


def train_stage(run: Run) -> str:
    """Run the training processes; they continue from their newest state. Returns a headline.

    Raises `PipelineError` with their exit status when they fail.
    """
    run.release_target()
    processes = training_processes(run.processes, run.recipe.train)
    run.recipe.train.check_processes(processes)
    threads = set_threads(processes)
    line = training_line(run.recipe_path, run.overrides, processes, run.accelerate_config, run.recipe.train.head.kind)
    say(f"      {processes} process(es), {threads} threads each")
    status = run_training(line)
    if status:
        kept = f"; states in {states} are kept" if any((states := run.folder / "train").glob("state-*")) else ""
        raise PipelineError(f"training ended with status {status}; its message is above{kept}", status)
    return training_headline(run.folder)


def training_headline(folder: Path) -> str:
    """What the draft directory of a finished training says of it."""
    block = read_json(folder / CKPT_CONFIG)["toolkit"]
    training, before = block.get("training", {}), block.get("init", {}).get("accept_length_before")
    forecast, real = training.get("forecast_accept_length"), training.get("real_accept_length")
    best = "" if forecast is None else f", forecast accept_length {forecast:.2f} on held-out rollouts"
    if real is not None:
        best = f", real accept_length {real:.2f} on held-out prompts (mean over draft shapes and temperatures)"
    return f"{training.get('steps', '?')} steps{best}{'' if before is None else f', {before:.2f} before training'}"


def _inputs(run: Run, *made: str, own: Sequence[str] = (), target_too: bool = True) -> Mapping[str, Path]:
    """Files of earlier stages, the user's own files, and a target that lies on this disk."""
    files = {name: run.folder / name for name in made}
    # Directories and hub datasets count by their name. A file that does not exist counts: its absence is an error.
    files.update({name: Path(name) for name in own if not name.startswith("hub:") and not Path(name).is_dir()})
    target = run.recipe.target
    template = local_files(target.chat_template, "template", ())
    return {**files, **local_files(target.model, "target", _TARGET_FILES), **template} if target_too else files


def _files_of(prompts: Sequence[str] | None) -> list[str]:
    """The prompts that are files; benchmarks count by their name, without a suffix."""
    return [one for one in prompts or () if Path(one).suffix or Path(one).exists()]


def local_files(name: str | None, what: str, patterns: Sequence[str]) -> dict[str, Path]:
    """Files of a model on this disk, so that a retrained one counts as another; none for hub and demo names."""
    path = None if name is None else Path(name).expanduser()
    if path is not None and path.is_file():
        return {one.name: one for one in (path, path.with_suffix(".jinja")) if one.is_file()}
    if path is None or not path.is_dir():
        return {}
    found = {file.name: file for pattern in patterns for file in sorted(path.glob(pattern))}
    return {f"{what} {key}": file for key, file in sorted(found.items())}
