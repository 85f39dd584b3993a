"""Builds an engine from an EngineConfig (check it, load draft and target, fit the draft), and closes it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.drafters.adaptive import AdaptiveDrafter, AdaptiveShape
from toolkit.infer.drafters.choose_drafter import Draft, shape_for
from toolkit.infer.engine.config import NATIVE, NONE, ConfigError, EngineConfig
from toolkit.infer.engine.cpu_door import load_target, pack
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.load_draft import (
    check_takes_token_map,
    find_module,
    fit_draft,
    load_draft,
    measured_shape,
    native_draft,
    read_corpus,
    with_target,
)
from toolkit.infer.load.search_file import SEARCH, Found, Winners, search_of
from toolkit.infer.parallel.rank_engine import DriverEngine, engine_of, run_worker
from toolkit.infer.parallel.ranks import Driver, ParallelError, RankLostError, Ranks, Worker
from toolkit.infer.parallel.sharded_models import load_sharded_target, shard_output_and_head
from toolkit.infer.request.draft_tree import ADAPTIVE, PLAIN, DraftShape
from toolkit.infer.verify.verifiers import ForcedAcceptance
from toolkit.log import get_logger
from toolkit.targets.target import Target

logger = get_logger(__name__)

WORKER = "from toolkit.infer.load.load_engine import work; work()"  # the program of a worker process


@dataclass(frozen=True)
class LoadedEngine:
    """An engine with its models. draft, shape: None for plain decoding. winners: see Winners; empty without."""

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
    return build_engine(config, *load_models(config, device_of(config), ranks), ranks)


def work() -> None:
    """Run a worker process until the driver stops this rank; its messages are on stdin. The exit status is 1 after an
    error."""
    worker = Worker()
    try:
        assert isinstance(worker.config, EngineConfig), f"the driver sent a {type(worker.config).__name__}"
        run_worker(load_rank(worker.config, worker).engine, worker.next_message)
    except BaseException as error:  # process edge: the driver must detect every error
        if not worker.stopping():
            logger.error("rank %d failed: %s: %s", worker.rank, type(error).__name__, error, exc_info=error)
        os._exit(1)  # a normal exit would wait for the other ranks
    dist.destroy_process_group()


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
    engine that records graphs has those of greedy requests, if they were searched, and one setting for all numbers of
    rows where plain or adaptive decoding was the fastest of some. forced, short_lived: see Engine; forced only in a
    single process. The options that choose and load the models are not read. Raises ConfigError for options that cannot
    be combined, and the errors of Engine.
    """
    assert forced is None or ranks is None, "the workers would not force"
    config.check_engine(target.device.type)
    chosen = choose_drafting(config, target, draft)
    settled = replace(config, shape=None, adaptive=chosen.adaptive, lookup=chosen.lookup, lookup_corpus=None)
    engine = (Engine if ranks is None else engine_of(ranks))(
        target,
        chosen.draft,
        chosen.shape,
        settled,
        by_rows=chosen.shapes,
        corpus=read_corpus(config, target) if chosen.lookup else None,
        short_lived=short_lived,
        forced=forced,
    )
    if chosen.search is not None and chosen.shape is not None and isinstance(engine.drafter, AdaptiveDrafter):
        assert ranks is None or not chosen.winners, "a search runs in one process, and holds for no other number"
        known = chosen.search.step_costs(chosen.shape)
        engine.drafter.choose_by(lambda most: AdaptiveShape(most, known, Winners(chosen.winners, most)))
        if chosen.winners:
            logger.info("drafts by running requests, as %s found: %s", SEARCH, by_rows(chosen.winners))
        logger.info("adaptive drafting starts from the times in %s", SEARCH)
    if target.device.type == "cuda" and not short_lived:
        engine.warm_up()
    return LoadedEngine(engine, target, chosen.draft, chosen.shape, chosen.adaptive, chosen.winners)


@dataclass(frozen=True)
class Drafting:
    """What an engine drafts. search: what search.json found, if it holds here. winners: see LoadedEngine. shapes:
    by the largest number of rows that they are for, of recorded rounds; empty: one for all."""

    draft: Draft | None
    shape: DraftShape | None = None
    adaptive: bool = False
    lookup: bool = False
    search: Found | None = None
    winners: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    shapes: Mapping[int, DraftShape] = field(default_factory=dict)


def choose_drafting(config: EngineConfig, target: Target, draft: Draft | None) -> Drafting:
    """Settle what the options leave to the engine: by search.json and measured.json of the draft, else by the device.

    Raises ConfigError for lookup without a head.
    """
    if draft is None:
        return Drafting(None)
    has_head, most = isinstance(draft, DraftCheckpoint), config.max_running_requests
    if config.asks_for_lookup and not has_head:
        name = "lookup" if config.lookup else "lookup_corpus"
        raise ConfigError(f"`{name}` is given, but n-gram lookup has no head beside it; give a head with `draft`")
    recorded, shape = config.why_eager(target.device.type, target, draft) is None, config.draft_shape()
    adaptive = (shape is None and not recorded) if config.adaptive is None else config.adaptive
    search = None
    if isinstance(draft, DraftCheckpoint) and (shape is None or adaptive):
        search = search_of(draft, config, target)
    winners: Mapping[str, Mapping[int, str]] = {}
    if search is not None and search.best and config.adaptive is None and shape is None:
        winners = search.winners(most)
        if recorded and config.cuda_graph_max_bs is not None:
            winners = {}
        elif recorded:  # rounds whose shapes their rows decide need no host
            kind = min(winners)
            best = set(winners[kind].values())
            if best == {PLAIN}:
                logger.info("nothing is drafted: that is the fastest at every batch size in %s", SEARCH)
                return Drafting(None)
            shapes = search.shapes(most)
            if shapes and not config.asks_for_lookup:  # they were measured without it
                of_kind = {kind: {rows: one.as_text() for rows, one in shapes.items()}}
                return Drafting(draft, DraftShape.covering(shapes.values()), winners=of_kind, shapes=shapes)
            winners, adaptive = {}, best == {ADAPTIVE}
        elif config.asks_for_lookup:  # they were measured without it
            winners = {}
    lookup = config.asks_for_lookup or (has_head and adaptive and config.lookup is None)
    shape = measured_shape(draft, adaptive, search, most) if shape is None else shape_for(draft, shape)
    return Drafting(draft, shape, adaptive, lookup, search, winners)


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
    config = with_target(config, draft)
    draft = None if config.no_draft else draft
    if draft is not None and config.token_map is not None:
        check_takes_token_map(draft, config.token_map)
    module = find_module(config) if native and not config.no_draft else None
    logger.info("loading the target %s", config.target)
    if ranks is None:
        load = load_target
    else:
        load = partial(load_sharded_target, ranks)
        device = ranks.place(device, quantization=config.target_options["quantization"])
    target = load(str(config.target), dtype=config.dtype, device=device, **config.target_options)
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


@contextlib.contextmanager
def closing(loaded: LoadedEngine, *, interrupt: bool = False) -> Iterator[None]:
    """Close the engine at the end. Raises ParallelError with the name of a lost rank.

    interrupt: interrupt what runs inside, as Ctrl-C does, when a rank is lost: a server may wait for requests then.
    """
    driver = loaded.engine.driver if isinstance(loaded.engine, DriverEngine) else None
    try:
        if driver is not None and interrupt:
            driver.when_lost(lambda: os.kill(os.getpid(), signal.SIGINT))
        yield
    except RankLostError as error:
        raise ParallelError(str(error)) from error
    finally:
        loaded.engine.close()
    if driver is not None and driver.lost is not None:
        raise ParallelError(driver.lost)
