"""From what a user types (a draft directory, perhaps a target and a shape) to an engine that is ready."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint, DraftDirError
from toolkit.infer.cache.cache_manager import DEFAULT_MEMORY, MemorySettings
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.drafters.choose_verifier import choose_verifier
from toolkit.infer.engine.engine import DEFAULT_SHAPE, Engine
from toolkit.infer.graphs.compiled_rounds import DEFAULT_ROWS, CompileSettings
from toolkit.infer.graphs.recordings import GraphSettings
from toolkit.infer.load.load_draft import (
    OpenError,
    check_draft_quantization,
    check_token_map_goes_with,
    fit_draft,
    open_draft,
    pack,
)
from toolkit.infer.parallel.rank_engine import engine_of
from toolkit.infer.parallel.ranks import Ranks
from toolkit.infer.parallel.sharded_models import load_sharded_target, shard_output_and_head
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.errors import CompileError, DraftShapeError
from toolkit.log import get_logger
from toolkit.targets.load import Target, load_target

logger = get_logger(__name__)


__all__ = ["OpenError", "Opened", "open_engine"]


@dataclass(frozen=True)
class Opened:
    """An engine with what it was made of. `draft` and `shape` are None where nothing is drafted."""

    engine: Engine
    target: Target
    draft: Draft | None
    shape: DraftShape | None
    adaptive: bool = False

    @property
    def shape_name(self) -> str | None:
        """The shape in words, with its three numbers; of an adaptive engine the largest."""
        if self.shape is None:
            return None
        return f"{'adaptive up to ' if self.adaptive else ''}{self.shape.name} ({self.shape.as_text()})"


def open_engine(
    *,
    draft: str | Path | None = None,
    target: str | None = None,
    revision: str | None = None,
    shape: DraftShape | str | None = None,
    token_map: str | Path | None = None,
    verify: str = "auto",
    use_draft: bool = True,
    dtype: str = "auto",
    device: str = "auto",
    max_batch: int = 16,
    max_context: int | None = None,
    adaptive: bool | None = None,
    memory: MemorySettings = DEFAULT_MEMORY,
    quantization: str = "auto",
    draft_quantization: str = "auto",
    torch_compile: bool = False,
    torch_compile_max_bs: int | None = None,
    cuda_graph_max_bs: int | None = None,
    overlap_schedule: bool = True,
    ranks: Ranks | None = None,
) -> Opened:
    """Loads target and draft head and builds the engine.

    draft: a draft directory or a hub id, which may name its own target, or "ngram". target: needed without one, else
    overrides its choice; revision: of a target on a hub. shape: a DraftShape or "num_steps,top_k,num_draft_tokens";
    None takes the best measured one, else a chain of 4. token_map: a freq_N.pt; heads that share the target's output
    matrix use only its rows. verify: how drafts are accepted at a temperature above 0 (see Engine). use_draft False
    keeps only the draft directory's choice of target. device "auto" is a GPU if there is one. max_context in tokens,
    None: the target's. adaptive: draft less than the shape, or nothing, where that is faster; None: unless a shape was
    given. quantization: "int8" or "int4" for a target of a byte or half of one a weight (CPU), "none", or "auto": as
    the draft directory states it, else none. draft_quantization: "int8" for a head of a byte a weight (CPU), "none", or
    "auto": see open_draft.pack. memory: the cache's size. cuda_graph_max_bs, overlap_schedule: see
    GraphSettings. torch_compile: see compile_settings. ranks: this process is one of several that open and run the
    engine together (see open_parallel). Raises ValueError: OpenError and those of what it opens.
    """
    if draft is None and target is None:
        raise OpenError(
            "neither a draft nor a target was given; give the draft directory (--draft runs/NAME/ckpt) or a target"
        )
    if target is None and revision is not None:
        raise OpenError(f"revision {revision!r} came without a target; the draft directory states target and revision")
    if max_batch < 1:
        raise OpenError(f"max_batch is {max_batch}; at least one request must fit")
    wanted = parse_shape(shape, "shape") if isinstance(shape, str) else shape
    where = parse_device(device)
    recorded = compile_settings(torch_compile, torch_compile_max_bs, cuda_graph_max_bs, where)
    graphs = graphs_for(cuda_graph_max_bs, adaptive, where, recorded, overlap=overlap_schedule)
    torch_compile = torch_compile and recorded is None
    # The head first: it is small, so a broken directory is found before the target is loaded.
    head = open_draft(draft, target, revision) if draft is not None else None
    name, revision = (target, revision) if target is not None else target_of(head)
    quantized = quantization_of(head, quantization)
    if ranks is not None:
        where = ranks.place(where, quantization=quantized, torch_compile=torch_compile, graphs=graphs is not None)
        memory = ranks.memory(memory)
    head = head if use_draft else None
    check_draft_quantization(draft_quantization, head, where, divided=ranks is not None)
    check_draft_settings(head, wanted, adaptive, token_map)
    verify = verify_for(verify, head, wanted, drawing=graphs is None)
    adaptive = head is not None and (wanted is None and graphs is None if adaptive is None else adaptive)
    loading: Any = {"revision": revision, "dtype": dtype, "device": where, "quantization": quantized}
    loaded, head = load_both(name, head, token_map, ranks, draft_quantization, **loading)
    if head is not None:
        wanted = wanted or best_shape(head)
    options: Any = {"max_batch": max_batch, "max_context": max_context, "verify": verify, "memory": memory}
    options |= {"adaptive": adaptive, "torch_compile": torch_compile, "graphs": graphs}
    engine = (Engine if ranks is None else engine_of(ranks))(loaded, head, wanted, **options)
    return Opened(engine, loaded, head, wanted, adaptive)


def verify_for(name: str, draft: Draft | None, shape: DraftShape | None, *, drawing: bool) -> str:
    """The verifier's name. drawing: "auto" may draw drafts; graphs do not record that. What does not go together is
    said here, before the target is loaded."""
    name = "target" if name == "auto" and not drawing else name
    choose_verifier(name, draft, shape)
    return name


def check_draft_settings(
    draft: Draft | None, shape: DraftShape | None, adaptive: bool | None, token_map: str | Path | None
) -> None:
    """Raise OpenError where settings of drafting came without a draft, or a token map with a draft that takes none."""
    if draft is None and shape is not None:
        raise OpenError(
            f"shape {shape.as_text()} came without a draft head to use it; give a draft, or leave the shape out"
        )
    if draft is None and adaptive:
        raise OpenError("--adaptive came without a draft head to use it; give --draft, or leave --adaptive out")
    if token_map is not None:
        check_token_map_goes_with(draft, token_map)


def load_both(
    name: str,
    draft: Draft | None,
    token_map: str | Path | None,
    ranks: Ranks | None,
    draft_quantization: str,
    **loading: Any,
) -> tuple[Target, Draft | None]:
    """The target, and the draft fitted to it: packed to decode with, or this rank's parts of both."""
    logger.info("loading the target %s", name)
    target = load_target(name, **loading) if ranks is None else load_sharded_target(ranks, name, **loading)
    if draft is not None:
        draft = fit_draft(draft, target, token_map)
    if ranks is None:
        pack(target, draft, draft_quantization)
    else:
        shard_output_and_head(ranks, target, draft)
    return target, draft


def parse_device(text: str) -> torch.device:
    """The device of that name, "auto" chosen. Raises OpenError when this machine does not have it."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise OpenError(f"--device {text}: no such kind of device; auto, cpu, cuda or cuda:N is needed") from error
    found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise OpenError(
            f"--device {text}: PyTorch sees {found} GPUs here; use --device cpu, or a CUDA build of PyTorch"
        )
    return device


def compile_settings(
    wanted: bool, max_rows: int | None, graph_rows: int | None, device: torch.device
) -> CompileSettings | None:
    """On a GPU --torch-compile means the layers of recorded rounds of up to `max_rows` requests (None: 32, as far as
    rounds are recorded). None where nothing is compiled, and on a CPU, where all of a target's layers are.

    Raises OpenError, CompileError where that does not go together.
    """
    if not wanted:
        if max_rows is not None:
            raise OpenError(
                f"--torch-compile-max-bs {max_rows} came without --torch-compile; add that, or leave the bound out"
            )
        return None
    if device.type == "cpu":
        if max_rows is not None:
            raise OpenError(
                f"--torch-compile-max-bs {max_rows} came with {device} as device, where two programs serve any number "
                "of requests, so that a bound saves nothing: leave it out"
            )
        return None
    if graph_rows is None:
        raise CompileError(
            f"--torch-compile came with {device} as device and no CUDA graphs; there the layers of recorded rounds are "
            "compiled: add --cuda-graph-max-bs N, leave --torch-compile out, or use --device cpu"
        )
    return CompileSettings(min(graph_rows, DEFAULT_ROWS) if max_rows is None else max_rows)


def graphs_for(
    max_rows: int | None,
    adaptive: bool | None,
    device: torch.device,
    compiled: CompileSettings | None = None,
    *,
    overlap: bool,
) -> GraphSettings | None:
    """Rounds of up to max_rows requests as graphs. Raises OpenError, EngineError where that does not go together."""
    if max_rows is None:
        if not overlap:
            raise OpenError(
                "--disable-overlap-schedule came without --cuda-graph-max-bs; only rounds that run as graphs overlap: "
                "leave it out"
            )
        return None
    if adaptive:
        raise OpenError(
            "adaptive drafting and CUDA graphs came together; a graph is of one draft shape: leave --adaptive or "
            "--cuda-graph-max-bs out"
        )
    settings = GraphSettings(max_rows, compiled=compiled, overlap=overlap)
    settings.check(device)
    return settings


def best_shape(draft: Draft) -> DraftShape:
    """The best shape that was measured with this head (meta["measured"]["best_shape"]), else a chain of 4."""
    if not isinstance(draft, DraftCheckpoint):
        return DEFAULT_SHAPE
    measured: Any = draft.meta.get("measured") or {}
    text = measured.get("best_shape") if isinstance(measured, dict) else None
    return DEFAULT_SHAPE if text is None else parse_shape(str(text), f"{draft.path}/measured.json: best_shape")


def parse_shape(text: str, where: str) -> DraftShape:
    """DraftShape.parse, with an OpenError that says where the text came from."""
    try:
        return DraftShape.parse(text)
    except DraftShapeError as error:
        raise OpenError(f"{where}: {error}") from error


def target_of(draft: Draft | None) -> tuple[str, str | None]:
    """Name and revision of the target that a draft directory states. Raises `DraftDirError`, `OpenError`."""
    if not isinstance(draft, DraftCheckpoint):
        raise OpenError("--draft ngram belongs to no target; name one with --target")
    stated = draft.meta.get("target")
    if not isinstance(stated, dict) or not stated.get("name"):
        raise DraftDirError(
            f"{draft.path}/config.json does not say which target the head was trained for; name it with --target"
        )
    return str(stated["name"]), stated.get("revision")


def quantization_of(draft: Draft | None, wanted: str) -> str | None:
    """What load_target is told: `wanted`, and for "auto" what the target was when the head was trained for it."""
    if wanted == "auto":
        stated = draft.meta.get("target") if isinstance(draft, DraftCheckpoint) else None
        return stated.get("quantization") if isinstance(stated, dict) else None
    return None if wanted == "none" else wanted
