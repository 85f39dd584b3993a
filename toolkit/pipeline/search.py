"""Search for the fastest draft setting of a head: one load of the models, a record, the winners in its directory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.constants import HF_HUB_CACHE

from toolkit.bench.acceptance import describe_draft, measured_target
from toolkit.bench.forecast import Surface, forecast_surface
from toolkit.bench.records import command_line, machine_name, make_record, write_record
from toolkit.bench.search import confirm, finalists, predict, print_search, winner
from toolkit.bench.side_by_side import PERFECT, Trial
from toolkit.bench.step_times import measure_step_times
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.load.search_file import SEARCH, conditions, kind_of_requests, merged
from toolkit.infer.request.draft_tree import ADAPTIVE, DraftShape
from toolkit.infer.request.params import DraftShapeError
from toolkit.infer.server.request_params import default_temperature
from toolkit.log import get_logger
from toolkit.pipeline.measure import open_trial
from toolkit.pipeline.stages import progress_bar
from toolkit.plan.launch import check_servable, settings_text
from toolkit.plan.step_time import Gpu
from toolkit.recipe import BenchSettings
from toolkit.targets.facts import target_facts
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
    draft, target = trial.head, trial.target
    earlier = draft.meta.pop("search", None)  # nothing starts from what an earlier search found
    started = time.perf_counter()
    surface = _forecast(trial, largest)
    rows: list[dict[str, Any]] = []
    best: dict[str, dict[str, Any]] = {}
    known: dict[str, dict[str, Any]] = {}
    for batch in batches:
        found, best[str(batch)], known[str(batch)] = _search_batch(trial.at_batch(batch), surface)
        rows += found
    settings = trial.settings() | {
        "batches": list(batches),
        "shapes": len(surface.shapes()),
        "limit": wanted.limit,
        "seconds": round(time.perf_counter() - started, 1),
    }
    del settings["batch"]
    described = {"target": measured_target(target), "draft": describe_draft(draft)}
    record = make_record("search", command_line(), settings, rows, best=best, **described)
    print_search(record)
    out = out or Path("runs") / f"search-{machine_name(record['hardware'])}.json"
    write_record(out, record)
    why = _no_place(draft)
    if why is not None:
        logger.warning("nothing will start from what was found, since %s; give the best setting with --shape", why)
        return [out]
    assert draft.path is not None, "_no_place has looked"
    kind, made = kind_of_requests(wanted.temperature, config.verify), {key: record[key] for key in ("date", "commit")}
    new = {
        **{key: record[key] for key in ("target", "hardware", "versions")},
        "holds_for": conditions(draft, config, target),
        "found": {
            kind: {one: {**best[one], "times": known[one], **made, "settings": record["settings"]} for one in best}
        },
    }
    write_json(draft.path / SEARCH, merged(earlier, new))
    print(f"serve, chat, LLM and bench start from {SEARCH} on this machine, for {kind} requests")
    usual = default_temperature(target)
    if wanted.temperature == 0 and usual:
        print(f"requests that state no temperature are sampled at {usual:g} here: search with --temperature, too")
    return [out, draft.path / SEARCH]


def _forecast(trial: Trial, largest: Sequence[DraftShape]) -> Surface:
    with progress_bar("forecast", "answer") as show:
        return forecast_surface(trial.at_batch(FORECAST_BATCH), largest, show)


def _search_batch(trial: Trial, surface: Surface) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Returns the rows of one batch size, its best settings, and the times that adaptive drafting starts from."""
    texts = [one.question.prompt_ids for one in surface.references]
    with progress_bar(f"step times at batch {trial.batch}", "turn") as show:
        times = measure_step_times(trial, surface.shapes(), texts, lambda one: finalists(predict(surface, one)), show)
    with progress_bar(f"end to end at batch {trial.batch}", "answer") as show:
        settings = confirm(trial, predict(surface, times), times, show)
    drafting = {one.name: one for one in settings if one.shape is not None and one.name != PERFECT}
    most = drafting.pop(ADAPTIVE).shape
    assert most is not None, "it covers the finalists"
    best = {
        "setting": winner(settings).name,
        "shape": winner(list(drafting.values())).name,
        "adaptive_shape": most.as_text(),
    }
    return [one.row(trial.batch) for one in settings], best, times.to_json()


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
    check_servable(engine, trial.head)
    surface = _forecast(trial, largest)
    lengths = {shape: surface.forecast(shape).accept_length for shape in surface.shapes()}
    texts = [len(one.question.prompt_ids) + len(one.output_ids) / 2 for one in surface.references]
    return settings_text(
        engine,
        gpu,
        target_facts(trial.target.name, trial.target.revision),
        trial.head,
        {(one.num_steps, one.top_k, one.num_draft_tokens): length for one, length in lengths.items() if length},
        sum(texts) / len(texts),
        batches,
        step_s,
    )
