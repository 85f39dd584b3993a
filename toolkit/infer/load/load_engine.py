"""Builds an engine from an EngineConfig (check it, load draft and target, fit the draft), and closes it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.attention.linear_layers import linear_layers
from toolkit.infer.cache.cache_manager import MemorySettings
from toolkit.infer.drafters.adaptive import AdaptiveDrafter, SearchedShape
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.drafters.estimates import ArmTime
from toolkit.infer.drafters.lookup import NgramLookup
from toolkit.infer.engine.cpu_door import load_target, pack
from toolkit.infer.engine.engine import Engine
from toolkit.infer.graphs.compiled_forward import DEFAULT_ROWS, CompileSettings
from toolkit.infer.graphs.recordings import GraphSettings
from toolkit.infer.load.combinations import check_deterministic
from toolkit.infer.load.config import NATIVE, NONE, ConfigError, EngineConfig
from toolkit.infer.load.load_draft import (
    check_takes_token_map,
    depth_warning,
    find_module,
    fit_draft,
    load_draft,
    measured_shape,
    native_draft,
    target_source,
)
from toolkit.infer.load.lookup_file import asked_for_lookup, lookup_of
from toolkit.infer.load.search_file import SEARCH, search_of
from toolkit.infer.parallel.driver import Driver
from toolkit.infer.parallel.rank_engine import DriverEngine, engine_of
from toolkit.infer.parallel.ranks import ParallelError, RankLostError, Ranks
from toolkit.infer.parallel.sharded_models import load_sharded_target, shard_output_and_head
from toolkit.infer.request.draft_tree import ADAPTIVE, PLAIN, DraftShape
from toolkit.infer.verify.verifiers import ForcedAcceptance
from toolkit.log import get_logger
from toolkit.targets.target import Target

logger = get_logger(__name__)

WORKER = "toolkit.infer.load.worker_main"  # a module that imports this one


@dataclass(frozen=True)
class LoadedEngine:
    """An engine with its models. draft, shape: None for plain decoding. winners: see SearchedShape; empty without."""

    engine: Engine
    target: Target
    draft: Draft | None
    shape: DraftShape | None
    adaptive: bool = False
    winners: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @property
    def shape_name(self) -> str | None:
        """Name and numbers of the shape; of the largest shape if the engine is adaptive. None for plain decoding."""
        if self.shape is None:
            return None
        if self.winners:
            return f"by running requests ({by_rows(self.winners)})"
        return f"{'adaptive up to ' if self.adaptive else ''}{self.shape.name} ({self.shape.as_text()})"


def load_engine(config: EngineConfig) -> LoadedEngine:
    """Load target and draft and build the engine, in this process or as rank 0 of `tensor_parallel_size` processes.

    The options are checked before processes start, and all that does not need the target's weights before these load.
    Raises ValueError: ConfigError, DraftDirError, DraftShapeError, TargetError, TokenMapError, EngineError, and
    ParallelError for a model that cannot be sharded or a process that ended during loading.
    """
    config.check(device_of(config).type)
    if config.tensor_parallel_size == 1:
        return load_rank(config)
    driver = Driver(config.tensor_parallel_size, WORKER, config)
    try:
        with driver.working():
            return load_rank(config, driver)
    except BaseException as error:
        driver.close()
        if isinstance(error, RankLostError):
            raise ParallelError(str(error)) from error
        raise


def load_rank(config: EngineConfig, ranks: Ranks | None = None) -> LoadedEngine:
    """Load the engine of one process. config: checked. ranks: its tensor parallel group; None: a single process."""
    loaded = build_engine(config, *load_models(config, device_of(config), ranks), ranks)
    if loaded.draft is not None and loaded.shape is not None and config.shape is not None:
        too_deep = depth_warning(loaded.draft, loaded.shape)
        if too_deep is not None:
            logger.warning("%s", too_deep)
    return loaded


def build_engine(
    config: EngineConfig,
    target: Target,
    draft: Draft | None = None,
    ranks: Ranks | None = None,
    forced: ForcedAcceptance | None = None,
    *,
    short_lived: bool = False,
) -> LoadedEngine:
    """Build the engine of `config` over loaded models: a packed target and a draft that fits it.

    Without `shape` and `adaptive` each request has what search.json found fastest for its kind, if that holds here; an
    engine that records graphs has one setting, that of greedy requests if they were searched. forced: see Engine; only
    in a single process. short_lived: on a GPU record a round, or compile a kernel, at its first use and not at the
    start. The options that choose and load the models are not read. Raises ConfigError for a value out of range, and
    the errors of Engine.
    """
    assert forced is None or ranks is None, "the workers would not force"
    config.check_values()
    check_deterministic(vars(config), target.device.type)
    graphs, memory, shape = graph_settings(config, target, draft), memory_settings(config), config.draft_shape()
    adaptive = draft is not None and (shape is None and graphs is None if config.adaptive is None else config.adaptive)
    search, winners = None, dict[str, dict[int, str]]()
    if isinstance(draft, DraftCheckpoint) and (shape is None or adaptive):
        search = search_of(draft, config, target)
    recorded = graphs is not None and config.cuda_graph_max_bs is None and search is not None and bool(search.best)
    if search is not None and config.adaptive is None and (adaptive or recorded):
        winners = search.winners(config.max_running_requests)
        if recorded:
            best = set(winners[min(winners)].values())  # graphs have one shape: the fastest of the largest batch
            winners = {}
            if best == {ADAPTIVE}:
                adaptive, graphs = True, None
            elif best == {PLAIN} and not asked_for_lookup(config):
                logger.info("nothing is drafted: that is the fastest at every batch size in %s", SEARCH)
                draft = None
    if draft is not None and shape is None:
        shape = measured_shape(draft, adaptive, search, config.max_running_requests)
    engine = (Engine if ranks is None else engine_of(ranks))(
        target,
        draft,
        shape,
        max_running_requests=config.max_running_requests,
        context_length=config.context_length,
        verify="target" if config.deterministic else config.verify,
        adaptive=adaptive,
        lookup=lookup_of(config, target, draft, adaptive=adaptive and graphs is None),
        memory=memory if ranks is None else ranks.memory(memory),
        deterministic=config.deterministic,
        torch_compile=config.torch_compile and graphs is None,
        graphs=None if graphs is None else replace(graphs, at_start=not short_lived),
        forced=forced,
    )
    if search is not None and shape is not None and isinstance(engine.drafter, AdaptiveDrafter):
        assert ranks is None or not winners, "a search runs in one process, and holds for no other number of them"
        _start_from_search(engine.drafter, search.arm_times(shape), winners, lookup=asked_for_lookup(config))
    if target.device.type == "cuda" and not short_lived:
        engine.first_launches.run(engine.drafter, engine.shape)
    return LoadedEngine(engine, target, draft, shape, adaptive, winners)


def _start_from_search(
    drafter: AdaptiveDrafter, known: Sequence[ArmTime], winners: Mapping[str, Mapping[int, str]], *, lookup: bool
) -> None:
    if winners:
        drafter.choose_by(lambda most: SearchedShape(most, known, winners, lookup=lookup))
        logger.info("drafts by running requests, as %s found: %s", SEARCH, by_rows(winners))
    else:
        drafter.start_from(known)
    logger.info("adaptive drafting starts from the times in %s", SEARCH)


def by_rows(winners: Mapping[str, Mapping[int, str]]) -> str:
    """Returns "greedy 1: 2,4,6; up to 4: plain; up to 16: adaptive"."""
    return ", ".join(
        f"{kind} " + "; ".join(f"{'' if rows == 1 else 'up to '}{rows}: {what}" for rows, what in sorted(sizes.items()))
        for kind, sizes in winners.items()
    )


def load_models(config: EngineConfig, device: torch.device, ranks: Ranks | None = None) -> tuple[Target, Draft | None]:
    """Load target and draft (or this rank's shards), fit the draft to the target, pack both for decoding.

    The draft is loaded first: it is small, so an error in it appears before the target is loaded. Raises the errors of
    load_engine.
    """
    native = config.draft is None or str(config.draft) == NATIVE
    named = not native and str(config.draft) != NONE
    draft = load_draft(str(config.draft), config.target, config.revision) if named else None
    source = target_source(config, draft)
    draft = None if config.no_draft else draft
    if draft is not None and config.token_map is not None:
        check_takes_token_map(draft, config.token_map)
    module = find_module(config, source) if native and not config.no_draft else None
    logger.info("loading the target %s", source.name)
    if ranks is None:
        load = load_target
    else:
        load, device = partial(load_sharded_target, ranks), ranks.place(device, quantization=source.quantization)
    asked: Any = {
        "revision": source.revision,
        "quantization": source.quantization,
        "chat_template": source.chat_template,
    }
    target = load(source.name, dtype=config.dtype, device=device, **asked)
    if module is not None:
        draft = native_draft(config, target, *module)
    if draft is not None:
        draft = fit_draft(draft, target, config.token_map, config.draft_confidence)
    if ranks is None:
        pack(target, draft, config.draft_quantization)
    else:
        shard_output_and_head(ranks, target, draft)
    return target, draft


def device_of(config: EngineConfig) -> torch.device:
    """The device of the option `device`; "auto" is a GPU if there is one. Raises ConfigError if it does not exist."""
    name = config.device
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"`device` is {name!r}, which is no kind of device; give auto, cpu, cuda or cuda:N"
        ) from error
    found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise ConfigError(
            f"`device` is {name}, but PyTorch sees {found} GPUs here; give cpu, or install a CUDA build of PyTorch"
        )
    return device


def memory_settings(config: EngineConfig) -> MemorySettings:
    """The size of the KV cache."""
    return MemorySettings(
        config.max_total_tokens,
        config.prefix_cache,
        config.chunked_prefill_size,
        mem_fraction_static=config.mem_fraction_static,
    )


def graph_settings(config: EngineConfig, target: Target, draft: Draft | None) -> GraphSettings | None:
    """The settings of CUDA graphs, which are the default on a GPU; None: all rounds run eagerly, and the log says why.

    The one place that decides it. A round that a graph does not support runs eagerly beside graphs (GraphRounds).
    """
    eager = config.why_eager(target.device.type)
    if eager is None and config.cuda_graph_max_bs is None:  # who asks for graphs gets an error from the engine
        eager = _never_recorded(target, draft)
    if eager is not None:
        if target.device.type == "cuda":
            logger.info("rounds run eagerly, not as CUDA graphs: %s", eager)
        return None
    compiled = None
    if config.torch_compile:
        most = min(config.recorded_rows, DEFAULT_ROWS)
        compiled = CompileSettings(most if config.torch_compile_max_bs is None else config.torch_compile_max_bs)
    return GraphSettings(config.recorded_rows, compiled=compiled, overlap=not config.disable_overlap_schedule)


def _never_recorded(target: Target, draft: Draft | None) -> str | None:
    """Why no graph can run rounds of these models, as far as it is known before the engine is built."""
    if isinstance(draft, NgramLookup):
        return "n-gram lookup drafts on the host"
    if isinstance(draft, DraftCheckpoint) and draft.least_confidence:
        return "`draft_confidence` is set, and the host ends the chains"
    return "the target has linear-attention layers" if linear_layers(target.config) else None


@contextlib.contextmanager
def closing(loaded: LoadedEngine) -> Iterator[None]:
    """Close the engine at the end. Raises ParallelError with the name of a lost rank."""
    try:
        yield
    except RankLostError as error:
        raise ParallelError(str(error)) from error
    finally:
        loaded.engine.close()


@contextlib.contextmanager
def interrupted_by_loss(loaded: LoadedEngine) -> Iterator[None]:
    """Interrupt a server after the loss of a rank, as Ctrl-C does. Close the engine at the end.

    Raises ParallelError with the name of the lost rank.
    """
    driver = loaded.engine.driver if isinstance(loaded.engine, DriverEngine) else None
    try:
        if driver is not None:
            driver.when_lost(lambda: os.kill(os.getpid(), signal.SIGINT))
        yield
    finally:
        loaded.engine.close()
    if driver is not None and driver.lost is not None:
        raise ParallelError(driver.lost)
