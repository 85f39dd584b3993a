"""Forecasts of any head: loads the models, and writes the record and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toolkit.bench.acceptance import describe_token_map
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
from toolkit.bench.prompts import BUILTIN, limited
from toolkit.bench.records import command_line, machine_name, write_record
from toolkit.bench.side_by_side import Sampling, Trial
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.drafters.ngram_drafter import NgramLookup
from toolkit.infer.load.config import NGRAM, NONE, ConfigError, EngineConfig
from toolkit.infer.load.load_engine import device_of, load_models
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.pipeline.progress_bar import progress_bar
from toolkit.pipeline.run_target import prompts_and_shapes
from toolkit.recipe import BenchSettings
from toolkit.targets.target import Target


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
        answers = {"prompts": prompts_from(wanted), **asdict(trial.sampling)}
    else:
        references, temperature = rollout_answers(rollouts, trial.target, wanted.limit)
        with progress_bar("forecast", "answer") as show:
            surface = replay_answers(trial, references, largest, show)
        longest = max(len(one.output_ids) for one in references)
        answers = {"rollouts": rollouts.name, "max_tokens": longest, "temperature": temperature}
    settings = {
        **answers,
        "limit": wanted.limit,
        "token_map": describe_token_map(config),
        "batch": config.max_running_requests,
        "deterministic": config.deterministic,
        "torch_compile": config.torch_compile,
    }
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
    prompts = limited(prompts_and_shapes(wanted)[0], wanted.limit)
    target, draft = load_head(config)
    sampling = Sampling(wanted.max_tokens, wanted.temperature, seed)
    return Trial(target, draft, prompts, sampling, config), supported_shapes(target, draft, largest)


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
    if str(config.draft) in (NGRAM, NONE):
        checked_head(NgramLookup() if str(config.draft) == NGRAM else None)  # before the target is loaded
    target, draft = load_models(config, device_of(config))
    return target, checked_head(draft)


def checked_head(draft: Draft | None) -> DraftCheckpoint:
    """Raises `ConfigError` unless it is a head."""
    if not isinstance(draft, DraftCheckpoint):
        what = "nothing is drafted" if draft is None else "n-gram lookup has no head"
        raise ConfigError(f"`draft` names no head ({what}); give a draft directory, or measure with `toolkit bench`")
    return draft


def prompts_from(wanted: BenchSettings) -> str:
    """Where the prompts come from, as records have it."""
    return BUILTIN if wanted.prompts is None else ", ".join(Path(one).name for one in wanted.prompts)
