"""The six stages of a recipe: what decides each one's result, which files it reads and writes, and who does the work.

prompts -> rollouts -> token_map -> train -> measure -> report. The files that do the work load torch, which takes
seconds. They are imported when a stage works, so that a run that is up to date ends in a moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from toolkit.pipeline.launch import run_training, set_threads, training_line, training_processes
from toolkit.pipeline.run import (
    ACCEPTANCE,
    CKPT_CONFIG,
    CKPT_WEIGHTS,
    COVERAGE,
    FEATURES,
    MEASURED,
    METRICS,
    PROMPTS,
    REPORT,
    REPORT_PAGE,
    ROLLOUTS,
    TOKEN_MAP,
    Run,
    of_temperature,
)  # fmt: skip
from toolkit.pipeline.stages import Outcome, PipelineError, Stage, run_stages, say, summary
from toolkit.recipe import RecipeError, result_settings
from toolkit.weights import read_json

_TARGET_FILES = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.bin")
_HEAD_FILES = ("config.json", "*.safetensors", "*.bin", "*.gguf")  # without its measurements


def run_recipe(run: Run, *, force: str | None = None, until: str | None = None) -> list[Outcome]:
    """Bring the stages of a run up to date, up to and with `until`; `force` redoes from one on. Prints what was done.

    Raises `RecipeError` for a recipe that names no prompts, `PipelineError` as `run_stages` does.
    """
    stages = recipe_stages(run)
    threads = set_threads()
    say(f"{run.recipe.name}: {run.recipe_path} -> {run.folder} ({threads} threads; OMP_NUM_THREADS changes it)")
    outcomes = run_stages(run.folder, stages, force=force, until=until)
    print("\n" + summary(outcomes))
    return outcomes


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
            check=run.check_processes,
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
    """The prompts that are files; benchmarks count by their name."""
    from toolkit.bench.prompts import BENCHMARKS

    return [one for one in prompts or () if one not in BENCHMARKS]


def local_files(name: str | None, what: str, patterns: Sequence[str]) -> dict[str, Path]:
    """Files of a model on this disk, so that a retrained one counts as another; none for hub and demo names."""
    path = None if name is None else Path(name).expanduser()
    if path is not None and path.is_file():
        return {one.name: one for one in (path, path.with_suffix(".jinja")) if one.is_file()}
    if path is None or not path.is_dir():
        return {}
    found = {file.name: file for pattern in patterns for file in sorted(path.glob(pattern))}
    return {f"{what} {key}": file for key, file in sorted(found.items())}
