"""Measure accept_length, the speed relative to plain decoding, and whether both write the same tokens.

All values of a row come from one run: acceptance from the engine's event log (`infer.request.request`), speed from
timing each engine step, equality from a comparison with the tokens of plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from toolkit.bench.records import command_line, hardware, make_record, versions
from toolkit.bench.rows import ALL, HEAD_ALONE, best_row, ceiling_of, recommended_row, shape_text, tabulate
from toolkit.bench.side_by_side import Mode, Progress, ResumeLog, SideBySide, Trial, run_side_by_side
from toolkit.checkpoint.draft_dir import DraftCheckpoint, check_draft_matches
from toolkit.infer.drafters.choose_drafter import Draft, default_shape
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.request.draft_tree import ADAPTIVE, DraftShape
from toolkit.infer.request.params import DraftShapeError
from toolkit.infer.verify.verifiers import ForcedAcceptance
from toolkit.targets.fixed_linear import quantization_of
from toolkit.targets.target import Target, describe_target
from toolkit.weights import sha256_json

ONE_BY_ONE = EngineConfig(verify="target", max_running_requests=1)


def measure_acceptance(
    trial: Trial,
    shapes: Sequence[DraftShape],
    *,
    adaptive: DraftShape | None = None,
    warmup: int = 1,
    check_tokens: bool = True,
    forced: ForcedAcceptance | None = None,
    keep: Path | None = None,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure every shape against plain decoding, and adaptive drafting up to `adaptive`: with lookup and by the head
    alone. Returns a record of kind "acceptance": for each of them one row over all prompts (task "all") and one row per
    task.

    Load the target in float32 for an exact comparison. `keep`: a file of finished prompts, from which a killed
    measurement resumes. `on_progress(done, total)` counts answers. `forced` accepts drafts by chance, so tokens are not
    compared; it needs fixed shapes: see `check_forced`.

    Of the options: max_running_requests: prompts decoded at once. torch_compile: in all modes. lookup: None: with
    adaptive drafting only. verify: tokens of others than "target" are compared at temperature 0 alone.

    Raises `BenchError`, `ChatTemplateError`, `DraftDirError`, `SamplingError`, `CompileError`, and `EngineError` or
    `DraftShapeError` for a verifier that does not support the draft or a shape.
    """
    target, draft, config = trial.target, trial.draft, trial.config
    if config.deterministic and config.verify == "auto":
        config = config.with_options(verify="target")
        trial = replace(trial, config=config)
    check_tokens = check_tokens and forced is None and (config.verify == "target" or trial.sampling.temperature == 0)
    if isinstance(draft, DraftCheckpoint):
        check_draft_matches(draft, target)
    recorded = config.why_eager(target.device.type) is None
    settings = {
        "tasks": list(dict.fromkeys(prompt.task for prompt in trial.prompts)),
        "shapes": [
            *(_adaptive_modes(draft, config) if adaptive is not None else ()),
            *(shape.as_text() for shape in shapes),
        ],
        **trial.settings(),
        "prompts_sha256": sha256_json([asdict(prompt) for prompt in trial.prompts]),
        "warmup": warmup,
        "check_tokens": check_tokens,
        "lookup": config.lookup,
        "verify": config.verify,
        "forced_accept_length": None if forced is None else forced.accept_length,
        "forced_accept_rate": None if forced is None else list(forced.rates),
        **({"draft_confidence": config.draft_confidence} if config.draft_confidence else {}),
        **({"cuda_graph_max_bs": config.with_graph_sizes().cuda_graph_max_bs} if recorded else {}),
    }
    perfect = None if forced is not None else (adaptive or adaptive_limit(shapes, draft)).num_steps
    kept = None if keep is None else _resume_log(keep, target, draft, {**settings, "perfect": perfect})
    with _modes(trial.with_room(), shapes, adaptive, forced, perfect) as modes:
        rounds = run_side_by_side(
            modes, target.tokenizer, trial.prompts, trial.sampling,
            batch=trial.batch, warmup=trial.first(warmup), keep=kept, on_progress=on_progress,
        )  # fmt: skip
    return make_record(
        "acceptance", command_line(), settings, **tabulate(rounds, trial, shapes, check_tokens, adaptive, forced),
        ceiling=None if perfect is None else ceiling_of(rounds, perfect),
        target=measured_target(target),
        draft=describe_draft(draft),
    )  # fmt: skip


def adaptive_limit(shapes: Sequence[DraftShape], draft: Draft | None = None) -> DraftShape:
    """The largest shape of adaptive drafting beside these shapes; without any, the engine's default."""
    return DraftShape.covering(shapes) if shapes else default_shape(draft)


def check_forced(forced: ForcedAcceptance | None, shapes: Sequence[DraftShape], adaptive: bool) -> None:
    """Raise DraftShapeError for shapes that cannot reach a forced accept_length, and for adaptive drafting with it."""
    if forced is None:
        return
    if adaptive:
        raise DraftShapeError(
            "forced accept_length and adaptive drafting are both asked for; adaptive drafting chooses its shape by "
            "what is accepted: give fixed shapes alone, such as 4,1,5"
        )
    forced.check_shapes(shapes)


def _adaptive_modes(draft: Draft, config: EngineConfig) -> dict[str, dict[str, Any]]:
    """The modes of adaptive drafting and their options: where it has lookup, the head alone too."""
    if not isinstance(draft, DraftCheckpoint) or config.lookup is False:
        return {ADAPTIVE: {}}
    return {ADAPTIVE: {}, HEAD_ALONE: {"lookup": False, "lookup_corpus": None}}


@contextmanager
def _modes(
    trial: Trial,
    shapes: Sequence[DraftShape],
    most: DraftShape | None,
    forced: ForcedAcceptance | None,
    perfect: int | None,
) -> Iterator[list[Mode]]:
    """Yield plain decoding, adaptive drafting up to `most` (None: without it), every shape, and perfect drafts.

    Plain decoding has its own engine, without the cost of a head, and so have the modes of adaptive drafting.
    """
    draft = trial.draft
    adaptive = {} if most is None else _adaptive_modes(draft, trial.config)
    count = 1 + len(adaptive) + bool(shapes) + (perfect is not None)
    with SideBySide(trial.config, trial.target, count, forced=forced) as engines:
        modes = [Mode(engines.open(verify="target", lookup=None, lookup_corpus=None), None)]
        for name, options in adaptive.items():
            learned = engines.open(draft, most, adaptive=True, **options)
            modes.append(Mode(learned, most, adaptive=True, label=name))
        if shapes:
            speculative = engines.open(draft, shapes[0])
            modes += [Mode(speculative, shape) for shape in shapes]
        if perfect is not None:
            modes.append(engines.open_perfect(perfect))
        yield modes


def measured_summary(record: dict[str, Any]) -> dict[str, Any]:
    """Return the content of measured.json in a draft directory: the best shapes, and the "all" row of every setting.

    best_shape: the fastest one drafted in every step. adaptive_shape: the largest one of adaptive drafting, if that was
    measured. recommended: "adaptive", the shape to draft in every step, or None if none is faster than plain decoding.
    """
    rows = [row for row in record["rows"] if row["task"] == ALL]
    fixed = [row for row in rows if row["shape"] != ADAPTIVE]
    adaptive = next((row for row in rows if row["shape"] == ADAPTIVE), None)
    shapes: dict[str, str | None] = {"best_shape": shape_text(best_row({"rows": fixed or rows}))}
    chosen = recommended_row(record)
    if chosen is None:
        shapes["recommended"] = None
    else:
        shapes["recommended"] = ADAPTIVE if chosen["shape"] == ADAPTIVE else shape_text(chosen)
    if adaptive is not None:
        shapes["adaptive_shape"] = shape_text(adaptive)
    kept = ("date", "commit", "hardware", "versions", "settings", "target")
    return {**shapes, **{key: record[key] for key in kept if key in record}, "rows": rows}


def _resume_log(path: Path, target: Target, draft: Draft, settings: dict[str, Any]) -> ResumeLog:
    """Open the log. Callers must detect changed weights of target or head themselves (by the hashes in a manifest)."""
    made_of = {
        "settings": settings,
        "target": measured_target(target),
        "draft": {**describe_draft(draft), "path": None},  # a run folder may be moved
        "hardware": hardware(),
        "versions": versions(),
    }
    return ResumeLog(path, made_of)


def measured_target(target: Target) -> dict[str, Any]:
    return {**describe_target(target), "weight_bits": target.weight_bits}


def describe_draft(draft: Draft) -> dict[str, Any]:
    if not isinstance(draft, DraftCheckpoint):
        return {"path": None, "head": draft.kind, "min_n": draft.min_n}
    aux_layer_ids = getattr(draft.head.config, "aux_layer_ids", None)
    return {
        "path": None if draft.path is None else str(draft.path),
        "head": draft.kind,
        "draft_vocab_size": draft.token_map.size,
        "aux_layer_ids": None if aux_layer_ids is None else list(aux_layer_ids),
        "dtype": str(next(draft.head.parameters()).dtype).removeprefix("torch."),
        "quantization": quantization_of(draft.head),
    }
