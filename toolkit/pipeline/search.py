"""Search for the fastest draft setting of a head: one load of the models, a record, the winners in its directory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from toolkit.bench.acceptance import describe_draft, describe_target
from toolkit.bench.answers import ADAPTIVE, Sampling
from toolkit.bench.forecast import Surface, forecast_surface
from toolkit.bench.prompts import Prompt, limited
from toolkit.bench.records import command_line, machine_name, make_record, write_record
from toolkit.bench.search import Candidate, Objective, confirm, finalists, most_of, predict, winner
from toolkit.bench.search_table import print_search
from toolkit.bench.step_times import StepTimes, measure_step_times, rounds_of
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.load.load_engine import device_of, load_models
from toolkit.infer.load.search_file import SEARCH
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.pipeline.forecast import checked_head, largest_shapes, prompts_from
from toolkit.pipeline.progress_bar import progress_bar
from toolkit.pipeline.run_target import prompts_and_shapes
from toolkit.plan.engine_settings import settings_text
from toolkit.plan.gpus import Gpu
from toolkit.recipe import BenchSettings
from toolkit.targets.facts import target_facts
from toolkit.targets.target import Target
from toolkit.weights import write_json

FORECAST_BATCH = 8


def search_head(
    config: EngineConfig,
    wanted: BenchSettings,
    seed: int,
    *,
    batches: Sequence[int],
    objective: Objective = "tokens-per-s",
    top_ks: Sequence[int] | None = None,
    num_steps: int | None = None,
    num_draft_tokens: int | None = None,
    out: Path | None = None,
) -> list[Path]:
    """Search the settings of `config.draft` at each batch size, and print them. Returns the paths of what was written:
    the record, and search.json in a draft directory.

    Raises `ConfigError` for n-gram lookup, `DraftShapeError`, `DraftDirError`, `TargetError`, `DataError`.
    """
    largest = largest_shapes(top_ks, num_steps, num_draft_tokens)
    prompts = limited(prompts_and_shapes(wanted)[0], wanted.limit)
    config.check(device_of(config).type)
    target, draft = load_models(config, device_of(config))
    draft = checked_head(draft)
    sampling = Sampling(wanted.max_tokens, wanted.temperature, seed)
    started = time.perf_counter()
    surface, rows, best, known = _search(target, draft, prompts, largest, sampling, config, batches, objective)
    settings = {
        "objective": objective,
        "batches": list(batches),
        "shapes": len(surface.shapes()),
        "prompts": prompts_from(wanted),
        "limit": wanted.limit,
        "max_tokens": wanted.max_tokens,
        "temperature": wanted.temperature,
        "seed": seed,
        "torch_compile": config.torch_compile,
        "draft_quantization": config.draft_quantization,
        "seconds": round(time.perf_counter() - started, 1),
    }
    described = {"target": describe_target(target), "draft": describe_draft(draft)}
    record = make_record("search", command_line(), settings, rows, best=best, **described)
    print_search(record)
    out = out or Path("runs") / f"search-{machine_name(record['hardware'])}.json"
    write_record(out, record)
    if draft.path is None:
        return [out]
    kept = ("date", "commit", "hardware", "versions", "settings", "best", "target")
    write_json(draft.path / SEARCH, {**{key: record[key] for key in kept}, "times": known})
    return [out, draft.path / SEARCH]


def _search(
    target: Target,
    draft: DraftCheckpoint,
    prompts: Sequence[Prompt],
    largest: Sequence[DraftShape],
    sampling: Sampling,
    config: EngineConfig,
    batches: Sequence[int],
    objective: Objective,
) -> tuple[Surface, list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]:
    """Returns the surface, the record's rows, the best setting by batch size, and the times for adaptive drafting."""
    forecasting = replace(config, max_running_requests=FORECAST_BATCH)
    with progress_bar("forecast", "answer") as show:
        surface = forecast_surface(target, draft, prompts, largest, sampling, forecasting, show)
    rows: list[dict[str, Any]] = []
    best: dict[str, Any] = {}
    known: list[dict[str, Any]] = []
    for batch in batches:
        own = replace(config, max_running_requests=batch)
        times = _times(target, draft, surface, own)
        candidates = predict(surface, times)
        chosen = finalists(candidates, objective)
        with progress_bar(f"batch {batch}", "answer") as show:
            measured = confirm(target, draft, chosen, times, prompts, sampling, own, show)
        first = winner(measured, objective)
        by_name = {one.name: one for one in measured}
        rows += [_row(batch, by_name.get(one.name, one), one) for one in candidates]
        rows.append(_row(batch, by_name[ADAPTIVE], by_name[ADAPTIVE]))
        fixed = winner([by_name[one.name] for one in chosen], objective)
        best[str(batch)] = {"setting": first.name, "shape": fixed.name, "adaptive_shape": most_of(chosen).as_text()}
        known.append(times.to_json())
    return surface, rows, best, known


def _times(target: Target, draft: DraftCheckpoint, surface: Surface, config: EngineConfig) -> StepTimes:
    shapes, texts = surface.shapes(), [one.question.prompt_ids for one in surface.references]
    done, total = 0, rounds_of(shapes)
    with progress_bar(f"batch {config.max_running_requests}", "round", total) as show:

        def one_more() -> None:
            nonlocal done
            done += 1
            show(done, total)

        return measure_step_times(target, draft, shapes, texts, config, one_more)


def _row(batch: int, one: Candidate, forecast: Candidate) -> dict[str, Any]:
    """A row of the record. forecast: the candidate before it was run end to end."""
    figures = {"predicted": one.predicted, "measured": one.measured}
    named = {
        f"{when}_{what}": None if found is None else getattr(found, what)
        for when, found in figures.items()
        for what in ("tokens_per_s", "itl_s", "ttft_s")
    }
    parts = forecast.parts
    return {
        "batch": batch,
        "setting": one.name,
        "accept_length": one.accept_length,
        "forecast_accept_length": None if forecast.predicted is None else forecast.accept_length,
        "draft_s": None if parts is None else parts.draft_s,
        "verify_s": None if parts is None else parts.verify_s,
        "round_s": None if parts is None else parts.round_s,
        **named,
    }


def search_elsewhere(
    config: EngineConfig,
    wanted: BenchSettings,
    seed: int,
    engine: Literal["sglang", "vllm"],
    gpu: Gpu,
    batches: Sequence[int],
    step_s: Mapping[int, float] | None = None,
    *,
    top_ks: Sequence[int] | None = None,
    num_steps: int | None = None,
    num_draft_tokens: int | None = None,
) -> str:
    """The best settings of `config.draft` in another engine on one `gpu`, with its flags.

    Acceptance is forecast here; times come from the model of `toolkit plan`, with step_s (measured seconds of a plain
    step, by requests) in place of its fixed times. vLLM drafts chains only. Raises the errors of `search_head`, and
    `PlanError` for a target that the model does not know.
    """
    widths = [1] if engine == "vllm" else top_ks
    prompts = limited(prompts_and_shapes(wanted)[0], wanted.limit)
    config.check(device_of(config).type)
    target, draft = load_models(config, device_of(config))
    draft = checked_head(draft)
    sampling = Sampling(wanted.max_tokens, wanted.temperature, seed)
    largest = largest_shapes(widths, num_steps, num_draft_tokens)
    with progress_bar("forecast", "answer") as show:
        forecasting = replace(config, max_running_requests=FORECAST_BATCH)
        surface = forecast_surface(target, draft, prompts, largest, sampling, forecasting, show)
    lengths = {shape: surface.forecast(shape).accept_length or 1.0 for shape in surface.shapes()}
    texts = [len(one.question.prompt_ids) + len(one.output_ids) / 2 for one in surface.references]
    return settings_text(
        engine,
        gpu,
        target_facts(target.name, target.revision),
        draft,
        {(one.num_steps, one.top_k, one.num_draft_tokens): length for one, length in lengths.items()},
        sum(texts) / len(texts),
        batches,
        step_s,
    )
