"""The measure stage, measurements and forecasts of any head: load the models, write record and page or picture."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from toolkit.bench.acceptance import (
    ONE_BY_ONE,
    adaptive_limit,
    check_forced,
    measure_acceptance,
    measured_summary,
)
from toolkit.bench.check import open_checked
from toolkit.bench.forecast import (
    NUM_DRAFT_TOKENS,
    NUM_STEPS,
    TOP_KS,
    forecast_record,
    forecast_surface,
    largest_shape,
    print_surface,
    replay_answers,
    rollout_answers,
    supported_shapes,
)
from toolkit.bench.prompts import BUILTIN, Prompt, limited
from toolkit.bench.records import command_line, machine_name, write_record
from toolkit.bench.report import RunData, write_page
from toolkit.bench.rows import headline_row, is_slower, lookup_row
from toolkit.bench.side_by_side import Sampling, Trial
from toolkit.bench.table import (
    count_of,
    length_text,
    outcome_line,
    print_acceptance,
    shape_name,
    share_text,
    times,
)
from toolkit.checkpoint.draft_dir import DraftCheckpoint, load_draft
from toolkit.infer.drafters.choose_drafter import Draft, default_shape, drafted_shapes, shape_for
from toolkit.infer.engine.config import NGRAM, NONE, ConfigError, EngineConfig
from toolkit.infer.engine.cpu_door import pack
from toolkit.infer.engine.engine import out_of_memory
from toolkit.infer.load.load_engine import device_of, load_models
from toolkit.infer.load.search_file import GREEDY, SAMPLED, SEARCH, search_of
from toolkit.infer.request.draft_tree import ADAPTIVE, DraftShape
from toolkit.infer.verify.verifiers import ForcedAcceptance
from toolkit.pipeline.run import ACCEPTANCE, CKPT_CONFIG, ROUNDS, Run, of_temperature, prompts_and_shapes
from toolkit.pipeline.stages import progress_bar, say
from toolkit.recipe import BenchSettings
from toolkit.targets.target import Target
from toolkit.weights import write_json


def forecast_head(
    config: EngineConfig,
    wanted: BenchSettings,
    seed: int,
    largest: Sequence[DraftShape],
    *,
    rollouts: Path | None = None,
    out: Path | None = None,
) -> Path:
    """Forecast `config.draft`, and print the surface. Returns the path of the record.

    largest: by top_k, see `largest_shapes`. rollouts: a file whose answers are replayed; of `wanted` only `limit` is
    read then, and `seed` is not.
    Raises `ConfigError` for n-gram lookup, `DraftShapeError`, `DraftDirError`, `TargetError`, `DataError`.
    """
    trial, largest = open_trial(config, wanted, seed, largest)
    answers: dict[str, Any]
    if rollouts is None:
        with progress_bar("forecast", "answer") as show:
            surface = forecast_surface(trial, largest, show)
        answers = {}
    else:
        references, temperature = rollout_answers(rollouts, trial.target, wanted.limit)
        with progress_bar("forecast", "answer") as show:
            surface = replay_answers(trial, references, largest, show)
        longest = max(len(one.output_ids) for one in references)
        answers = {"rollouts": rollouts.name, "prompts": None, "max_tokens": longest, "temperature": temperature}
    settings = {**trial.settings(), **answers, "limit": wanted.limit}
    record = forecast_record(surface, trial, settings, command_line())
    print_surface(record)
    out = out or Path("runs") / f"forecast-{machine_name(record['hardware'])}.json"
    write_record(out, record)
    return out


def open_trial(
    config: EngineConfig, wanted: BenchSettings, seed: int, largest: Sequence[DraftShape]
) -> tuple[Trial, list[DraftShape]]:
    """What is measured, with the models loaded, and the shapes of `largest` that these support.

    Raises `DataError` and `DraftShapeError`, and as `load_head` does."""
    prompts = prompts_and_shapes(wanted)[0]  # a mistake in these is found before the target is loaded
    target, draft = load_head(config)
    return _trial(target, draft, prompts, wanted, config, seed), supported_shapes(target, draft, largest)


def _trial(
    target: Target, draft: Draft, prompts: list[Prompt], wanted: BenchSettings, config: EngineConfig, seed: int
) -> Trial:
    sampling = Sampling(wanted.max_tokens, wanted.temperature, seed)
    source = BUILTIN if wanted.prompts is None else ", ".join(Path(one).name for one in wanted.prompts)
    return Trial(target, draft, limited(prompts, wanted.limit), sampling, config, source)


def largest_shapes(
    top_ks: Sequence[int] | None, num_steps: int | None, num_draft_tokens: int | None
) -> list[DraftShape]:
    """The largest shape of each top_k; None: the default. Raises `DraftShapeError`."""
    steps = NUM_STEPS if num_steps is None else num_steps
    nodes = NUM_DRAFT_TOKENS if num_draft_tokens is None else num_draft_tokens
    return [largest_shape(one, steps, nodes) for one in dict.fromkeys(top_ks or TOP_KS)]


def load_head(config: EngineConfig) -> tuple[Target, DraftCheckpoint]:
    """Load the target and the head. Raises `ConfigError` unless `config.draft` names a head, and the errors of
    `load_models`."""
    config.check(device_of(config).type)
    target, draft = (None, None) if str(config.draft) in (NGRAM, NONE) else load_models(config, device_of(config))
    if target is None or not isinstance(draft, DraftCheckpoint):
        raise ConfigError("`draft` names no head; give a draft directory, or measure with `toolkit bench`")
    return target, draft


def measure_stage(run: Run) -> str:
    """Measure the head of a run: bench/acceptance.json, ckpt/measured.json, and a record of each further temperature.

    Prints the tables. Returns a headline.
    """
    run.release_target()
    ckpt, target = (run.folder / CKPT_CONFIG).parent, run.load_target("serving")
    draft = load_draft(ckpt, dtype=target.dtype, device=str(target.device))
    pack(target, draft)
    engine, seed = replace(ONE_BY_ONE, deterministic=run.recipe.rollouts.deterministic), run.recipe.seed
    record = _measure(target, draft, run.recipe.bench, engine, seed, keep=run.folder / ROUNDS)
    init = {"init": draft.meta["init"]} if "init" in draft.meta else {}  # with accept_length before and after
    measured = measured_summary(record) | {"outcome": outcome_line(record)} | init
    write_json(ckpt / "measured.json", measured)
    write_record(run.folder / ACCEPTANCE, record)
    if run.recipe.prompts.sources and run.recipe.bench.prompts is None:
        say("Measured on the built-in prompts, not on prompts.sources; bench.prompts names your own.")
    print_acceptance(record)
    for earlier in (run.folder / ACCEPTANCE).parent.glob("acceptance-T*.json"):
        earlier.unlink()  # it may be of another head, and the report shows every record of the folder
    for temperature in run.recipe.bench.further_temperatures:
        wanted = replace(run.recipe.bench, temperature=temperature, further_temperatures=())
        rounds, out = (run.folder / of_temperature(name, temperature) for name in (ROUNDS, ACCEPTANCE))
        other = _measure(target, draft, wanted, engine, seed, keep=rounds)
        write_record(out, other)
        print_acceptance(other)
    del target, draft
    gc.collect()
    torch.cuda.empty_cache()
    try:
        write_json(ckpt / "measured.json", measured | {"check": open_checked(EngineConfig(draft=ckpt)).reference})
    except (RuntimeError, MemoryError, ValueError) as error:  # no memory for float32; prompts longer than the context
        if not isinstance(error, ValueError) and not out_of_memory(error):
            raise
        say(f"`toolkit check` has nothing to compare this head with: {error}")
    return headline(record)


def headline(record: dict[str, Any]) -> str:
    """The measurement in one line: the head alone, and what lookup adds to it."""
    row, beside = headline_row(record), lookup_row(record)
    speed = "" if row["speedup"] is None else f", {row['speedup']:.2f}x plain decoding"
    slower = " (slower)" if is_slower(row) else ""
    if beside is not None:
        slower += f"; with lookup {length_text(beside)}, {times(beside['speedup'])}"
    share = f"{share_text(row['drafted_share'])} of the steps drafted, " if row["shape"] == ADAPTIVE else ""
    name = shape_name(row) if beside is None else "the head alone"
    return (
        f"{name}: accept_length {length_text(row)}{speed}{slower} ({share}temperature "
        f"{row['temperature']:g}, {count_of(row['verify_steps'], 'verify step')})"
    )


def measure_head(
    config: EngineConfig,
    wanted: BenchSettings,
    *,
    seed: int = 0,
    check_tokens: bool = True,
    force_accept_length: str | None = None,
    searched: bool = False,
    out: Path | None = None,
) -> tuple[Path, Path]:
    """Measure any head, `config.draft`, and print the table. Returns the paths of record and page.

    searched: in place of `wanted.shapes` take what search.json of the draft directory found, if that holds here.
    force_accept_length: see `ForcedAcceptance.parse`.
    out: the record's file; None: runs/acceptance-<hardware>.json. The draft directory is left as it is.
    Raises `ConfigError`, `DraftDirError`, `TargetError`, `DraftShapeError`, `DataError`, `EngineError`.
    """
    forced = None if force_accept_length is None else ForcedAcceptance.parse(force_accept_length)
    shapes = prompts_and_shapes(wanted)[1]  # a mistake in these is found before the target is loaded
    check_forced(forced, shapes, wanted.adaptive)
    device = device_of(config)
    for shape in [*shapes, *([adaptive_limit(shapes)] if wanted.adaptive else [])]:
        replace(config, shape=shape.as_text()).check(device.type)
    target, draft = load_models(config, device)
    assert draft is not None and config.draft is not None, "a draft is measured"
    adaptive = None
    found = search_of(draft, config, target) if searched and isinstance(draft, DraftCheckpoint) else None
    kind = SAMPLED if wanted.temperature else GREEDY
    if found is not None and kind in found.best:
        best, adaptive = found.shape(config.max_running_requests, kind), found.largest
        say(f"The shapes are those of {config.draft}/{SEARCH} for batch {config.max_running_requests}:")
        say(f"adaptive up to {adaptive.as_text()}, and {best.as_text()} in every step.")
        wanted = replace(wanted, shapes=(ADAPTIVE, best.as_text()))
    record = _measure(target, draft, wanted, config, seed, adaptive=adaptive, check_tokens=check_tokens, forced=forced)
    print_acceptance(record)
    return _write(record, str(config.draft), out)


def _measure(
    target: Target,
    draft: Draft,
    wanted: BenchSettings,
    config: EngineConfig,
    seed: int,
    *,
    adaptive: DraftShape | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """adaptive: the largest shape of adaptive drafting; None: that of the shapes. settings: of `measure_acceptance`."""
    prompts, asked = prompts_and_shapes(wanted)
    given = list(dict.fromkeys(shape_for(draft, one) for one in asked))
    shapes = drafted_shapes(draft, given)
    if shapes != given:
        shapes = list(dict.fromkeys([*shapes, default_shape(draft)]))  # all tokens of a block, too
        left_out = [one.as_text() for one in given if one not in shapes]
        named = f"{' and '.join(left_out)} {'is' if len(left_out) == 1 else 'are'} left out"
        say(f"This {draft.kind} head drafts at most {default_shape(draft).num_steps} levels: {named}.")
    if adaptive is None and wanted.adaptive:
        adaptive = adaptive_limit(shapes, draft)
    trial = _trial(target, draft, prompts, wanted, config, seed)
    with progress_bar("measure", "answer") as show:
        return measure_acceptance(trial, shapes, adaptive=adaptive, warmup=wanted.warmup, on_progress=show, **settings)


def _write(record: dict[str, Any], draft: str, out: Path | None) -> tuple[Path, Path]:
    """Write the record and its page; by default runs/acceptance-<hardware>."""
    out = out or Path("runs") / f"acceptance-{machine_name(record['hardware'])}.json"
    write_record(out, record)
    # n-gram lookup has no run folder: its page is named after it, not after the working directory.
    run = Path(draft) if draft == "ngram" else Path(draft).resolve().parent
    write_page(out.with_suffix(".html"), RunData(run, acceptance=record))
    return out, out.with_suffix(".html")
