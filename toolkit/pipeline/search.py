"""Search for the fastest draft setting of a head: one load of the models, a record, the winners in its directory, and
the command lines that start from them.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.constants import HF_HUB_CACHE

from toolkit.bench.acceptance import describe_draft, describe_token_map, measured_target
from toolkit.bench.forecast import Surface, forecast_surface
from toolkit.bench.records import command_line, machine_name, make_record, write_record
from toolkit.bench.search import (
    Setting,
    confirm,
    covering_shape,
    finalists,
    predict,
    print_search,
    winner,
)
from toolkit.bench.side_by_side import Trial
from toolkit.bench.step_times import StepTimes, measure_step_times
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.load.search_file import SEARCH, conditions, kind_of_requests, merged
from toolkit.infer.request.draft_tree import ADAPTIVE, DraftShape
from toolkit.infer.request.params import DraftShapeError
from toolkit.infer.server.request_params import default_temperature
from toolkit.log import get_logger
from toolkit.pipeline.measure import open_trial, prompts_from
from toolkit.pipeline.stages import progress_bar
from toolkit.plan.launch import check_servable, settings_text
from toolkit.plan.step_time import Gpu
from toolkit.recipe import BenchSettings
from toolkit.targets.facts import target_facts
from toolkit.targets.target import Target
from toolkit.weights import write_json

logger = get_logger(__name__)

FORECAST_BATCH = 8


def search_head(
    config: EngineConfig,
    wanted: BenchSettings,
    seed: int,
    largest: Sequence[DraftShape],
    batches: Sequence[int],
    out: Path | None = None,
) -> list[Path]:
    """Search the settings of `config.draft` at each batch size, and print them. Returns the paths of what was written:
    the record, and search.json in a draft directory.

    Raises `ConfigError` for n-gram lookup, `DraftShapeError`, `DraftDirError`, `TargetError`, `DataError`.
    """
    trial, largest = open_trial(config, wanted, seed, largest)
    draft, target = trial.draft, trial.target
    earlier = draft.meta.pop("search", None)  # nothing starts from what an earlier search found
    started = time.perf_counter()
    surface, rows, best, known = search_settings(trial, largest, batches)
    settings = {
        "batches": list(batches),
        "shapes": len(surface.shapes()),
        "prompts": prompts_from(wanted),
        "limit": wanted.limit,
        "max_tokens": wanted.max_tokens,
        "temperature": wanted.temperature,
        "seed": seed,
        "token_map": describe_token_map(config),
        "deterministic": config.deterministic,
        "torch_compile": config.torch_compile,
        "seconds": round(time.perf_counter() - started, 1),
    }
    described = {"target": measured_target(target), "draft": describe_draft(draft)}
    record = make_record("search", command_line(), settings, rows, best=best, **described)
    print_search(record)
    out = out or Path("runs") / f"search-{machine_name(record['hardware'])}.json"
    write_record(out, record)
    found = _write_search(record, known, draft, config, target, earlier)
    if found is None:
        return [out]
    print(uses_of(config, wanted.temperature, default_temperature(target), max(batches)))
    return [out, found]


def _write_search(
    record: Mapping[str, Any],
    known: Sequence[Mapping[str, Any]],
    draft: DraftCheckpoint,
    config: EngineConfig,
    target: Target,
    earlier: Mapping[str, Any] | None,
) -> Path | None:
    """Write search.json into our own draft directory, merged with `earlier`, its content so far. Returns its path;
    None, and the log says why, if it cannot be."""
    why = _no_place(draft)
    if why is None:
        assert draft.path is not None, "_no_place has looked"
        made = {key: record[key] for key in ("date", "commit", "settings")}
        entries = {str(one["batch"]): {**record["best"][str(one["batch"])], "times": one, **made} for one in known}
        new = {
            **{key: record[key] for key in ("target", "hardware", "versions")},
            "holds_for": conditions(draft, config, target),
            "found": {kind_of_requests(record["settings"]["temperature"], config.verify): entries},
        }
        try:
            write_json(draft.path / SEARCH, merged(earlier, new))
            return draft.path / SEARCH
        except OSError as error:
            why = f"{draft.path / SEARCH} cannot be written ({error.strerror})"
    logger.warning("nothing will start from what was found, since %s; give the best setting with --shape S,K,N", why)
    return None


def _no_place(draft: DraftCheckpoint) -> str | None:
    """Why search.json is not written beside the head; None for a draft directory of the user."""
    if draft.path is None:
        return f"the target's own MTP module has no draft directory for {SEARCH}"
    place, convert = draft.path / SEARCH, f"`toolkit export --draft {draft.path} --to toolkit --out NEW` makes our own"
    if "writer" in draft.meta:
        return f"{place} would change a directory of another project ({convert})"
    if Path(HF_HUB_CACHE).resolve() in draft.path.resolve().parents:
        return f"{place} would change the cache of the hub ({convert})"
    return None


def search_settings(
    trial: Trial, largest: Sequence[DraftShape], batches: Sequence[int]
) -> tuple[Surface, list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]:
    """Search over loaded models, with progress. Returns the surface, the record's rows, the best setting by batch size,
    and the times for adaptive drafting."""
    parts, part = 1 + 2 * len(batches), count(1)
    with progress_bar(f"[{next(part)}/{parts}] forecast", "answer") as show:
        surface = forecast_surface(trial.at_batch(FORECAST_BATCH), largest, show)
    rows: list[dict[str, Any]] = []
    best: dict[str, Any] = {}
    known: list[dict[str, Any]] = []
    texts = [one.question.prompt_ids for one in surface.references]
    for batch in batches:
        own = trial.at_batch(batch)
        with progress_bar(f"[{next(part)}/{parts}] step times at batch {batch}", "round") as show:
            times = measure_step_times(own, surface.shapes(), texts, partial(_finalists, surface), show)
        predictions = predict(surface, times)
        chosen = finalists(predictions)
        with progress_bar(f"[{next(part)}/{parts}] end to end at batch {batch}", "answer") as show:
            measured = confirm(own, chosen, times, show)
        first = winner(measured)
        by_name = {one.name: one for one in measured}
        rows += [_row(batch, by_name.get(one.name, one), one) for one in predictions]
        rows.append(_row(batch, by_name[ADAPTIVE], by_name[ADAPTIVE]))
        fixed = winner([by_name[one.name] for one in chosen])
        best[str(batch)] = {
            "setting": first.name,
            "shape": fixed.name,
            "adaptive_shape": covering_shape(chosen).as_text(),
        }
        known.append(times.to_json())
    return surface, rows, best, known


def _finalists(surface: Surface, times: StepTimes) -> list[DraftShape]:
    return [one.shape for one in finalists(predict(surface, times)) if one.shape is not None]


def _row(batch: int, one: Setting, forecast: Setting) -> dict[str, Any]:
    """A row of the record. forecast: the setting before it was run end to end."""
    parts = forecast.parts
    return {
        "batch": batch,
        "setting": one.name,
        "accept_length": one.accept_length,
        "forecast_accept_length": None if forecast.predicted is None else forecast.accept_length,
        "draft_s": None if parts is None else parts.draft_s,
        "verify_s": None if parts is None else parts.verify_s,
        "round_s": None if parts is None else parts.round_s,
        "predicted_tokens_per_s": one.predicted,
        "measured_tokens_per_s": one.measured,
    }


def search_elsewhere(
    config: EngineConfig,
    wanted: BenchSettings,
    seed: int,
    engine: Literal["sglang", "vllm"],
    gpu: Gpu,
    largest: Sequence[DraftShape],
    batches: Sequence[int],
    step_s: Mapping[int, float] | None = None,
) -> str:
    """The best settings of `config.draft` in another engine on one `gpu`, with its flags.

    Acceptance is forecast here; times come from the model of `toolkit plan`, with step_s (measured seconds of a plain
    step, by requests) in place of its fixed times. vLLM drafts chains only. Raises the errors of `search_head`, and
    `PlanError` for a target that the model does not know.
    """
    if engine == "vllm" and not all(one.is_chain for one in largest):
        top_ks = " ".join(str(one.top_k) for one in largest)
        raise DraftShapeError(f"top_k is {top_ks}, and vLLM drafts chains only; leave it out")
    trial, largest = open_trial(config, wanted, seed, largest)
    check_servable(engine, trial.draft)
    with progress_bar("forecast", "answer") as show:
        surface = forecast_surface(trial.at_batch(FORECAST_BATCH), largest, show)
    lengths = {shape: surface.forecast(shape).accept_length for shape in surface.shapes()}
    texts = [len(one.question.prompt_ids) + len(one.output_ids) / 2 for one in surface.references]
    return settings_text(
        engine,
        gpu,
        target_facts(trial.target.name, trial.target.revision),
        trial.draft,
        {(one.num_steps, one.top_k, one.num_draft_tokens): length for one, length in lengths.items() if length},
        sum(texts) / len(texts),
        batches,
        step_s,
    )


def uses_of(config: EngineConfig, temperature: float, server_temperature: float, largest: int) -> str:
    """Returns the lines that a search prints at its end.

    config: of the search. temperature: of its requests. server_temperature: of a server's requests that state none.
    largest: the largest batch size that was searched.
    """
    flags, asked = _flags(config), f" --temperature {temperature:g}" if temperature else ""
    lines = [
        f"what was found for {kind_of_requests(temperature, config.verify)} requests is used by",
        f"  toolkit serve{flags}",
        f"    (for such requests; adaptive drafting with the measured times while more than {largest} requests run)",
        f"  toolkit chat{flags}{asked}",
        f"  toolkit bench acceptance{flags}{asked} --batch {largest}",
    ]
    if temperature == 0 and server_temperature:
        lines += [
            f"requests that state no temperature are sampled at {server_temperature:g} here, and drafted adaptively; "
            "search for them too:",
            f"  toolkit search{flags} --temperature {server_temperature:g}",
        ]
    return "\n".join(lines)


def _flags(config: EngineConfig) -> str:
    """Returns the options that differ from the default, as a command line has them."""
    found = ""
    for one in fields(config):
        value, name = getattr(config, one.name), one.name.replace("_", "-")
        if isinstance(value, bool) and value != one.default:
            found += f" --{name}" if value else f" --no-{name}"
        elif value != one.default:
            found += f" --{name} {shlex.quote(str(value))}"
    return found
