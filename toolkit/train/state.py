"""States of a training on disk, from which a killed run resumes with the same results; and snapshots of its head:
gathered weights, a head or draft checkpoint of them, and their record.
"""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.errors import ResumeError, TrainError
from toolkit.heads.draft_head import DraftHead, build_head, empty_head
from toolkit.heads.head_config import HeadConfig
from toolkit.log import get_logger
from toolkit.targets.target import Target, describe_target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.agreement import from_main, wait_for_files
from toolkit.train_settings import TrainSettings
from toolkit.weights import load_strict, read_json, write_json

if TYPE_CHECKING:  # pipeline stages before training import this file without accelerate
    from accelerate import Accelerator


log = get_logger(__name__)

POSITION_FILE = "position.json"
KEPT_STATES = 2  # the newest may be lost with the machine that wrote it
# As accelerate and DeepSpeed name them.
OF_MODEL, FLAT = "pytorch_model/mp_rank_00_model_states.pt", "single_partition_of_fp32_groups"
Weights = Mapping[str, torch.Tensor]


@dataclass
class Position:
    """The progress of a training: completed optimizer steps (`step`), the next batch (`epoch`, `index`), and totals.

    rollouts_of_step: the step at which the current rollouts were written; 0 for the stored rollouts. best_real: the
    engine's accept_length of the best head, if measured. initial_forecast, initial_real: those of train.init before the
    first step. stale: see `evaluation.update_best`.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    supervised_tokens: int = 0
    seconds: float = 0.0
    best_step: int = 0
    best_forecast: float | None = None
    best_real: float | None = None
    stale: int = 0
    rollouts_of_step: int = 0
    initial_forecast: float | None = None
    initial_real: float | None = None
    fingerprint: str = ""
    processes: int = 1
    zero_stage: int = 2


def save_state(accelerator: Accelerator, directory: Path, position: Position) -> None:
    """Write `state-<step>` atomically and delete all but the newest `KEPT_STATES`. All processes must call this."""
    final = directory / f"state-{position.step:06d}"
    part = final.with_suffix(".part")
    if accelerator.is_main_process:
        shutil.rmtree(part, ignore_errors=True)
    accelerator.wait_for_everyone()
    try:
        accelerator.save_state(str(part))
    except BaseException:  # a full disk: nothing reads an incomplete state
        shutil.rmtree(part, ignore_errors=True)
        raise
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_json(part / POSITION_FILE, asdict(position))
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        for old in stored_states(directory)[:-KEPT_STATES]:
            shutil.rmtree(old)
        drop_unneeded_bests(directory)
    accelerator.wait_for_everyone()


def best_path(directory: Path, step: int) -> Path:
    """The file with the weights of the head of `step`, the best so far."""
    return directory / f"best-{step:06d}.safetensors"


def drop_unneeded_bests(directory: Path) -> None:
    """Delete the heads that are not the best of a stored state. A kill between saving a head and its state loses no
    head that a stored state needs."""
    needed = {read_json(state / POSITION_FILE)["best_step"] for state in stored_states(directory)}
    for path in directory.glob("best-*.safetensors"):
        if path not in {best_path(directory, step) for step in needed}:
            path.unlink()


@contextmanager
def sole_trainer(directory: Path) -> Iterator[None]:
    """Lock a training folder. The kernel releases the lock when the process ends, also after a kill.

    Raises `TrainError` when another process holds the lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainError(f"another training uses {directory}; wait for it, or choose another run_dir") from None
        yield


def stored_states(directory: Path) -> list[Path]:
    """Complete states, oldest first."""
    found = [path for path in directory.glob("state-*") if re.fullmatch(r"state-\d{6,}", path.name)]
    # By number: as text, 1000000 sorts before 999999.
    return sorted(found, key=lambda path: int(path.name.removeprefix("state-")))


def restore_state(
    accelerator: Accelerator, engine: Any, directory: Path, fingerprint: str, is_finished: Callable[[Position], bool]
) -> Position:
    """Load the newest state into the prepared objects and return its position; a new `Position` without a state.

    engine: the DeepSpeed engine of the head. A finished training is not loaded: its best head is in a file. A state of
    ZeRO-1 or 2 of another number of processes is converted. All processes must call this.
    Raises `ResumeError` when the state was written with other settings, or under ZeRO-3 by other processes.
    """
    stage = int(engine.zero_optimization_stage())
    newest, position = from_main(accelerator, lambda: _newest(directory))
    if newest is None or position is None:
        return Position(fingerprint=fingerprint, processes=accelerator.num_processes, zero_stage=stage)
    if position.fingerprint != fingerprint:
        raise ResumeError(
            f"{newest} was written with other settings or data; choose another run_dir, or use the settings of before"
        )
    if is_finished(position):
        return position
    check_layout(newest, position, accelerator.num_processes, stage)
    wait_for_files(newest / POSITION_FILE)  # a state appears whole
    converted = newest
    if position.processes != accelerator.num_processes:
        converted = converted_state(accelerator, engine, newest, position.processes)
    accelerator.load_state(str(converted))
    # States are saved between optimizer steps. accelerate would continue its count of micro-batches from the state;
    # with another micro_batch its optimizer steps would then fall inside our global batches.
    accelerator.step = 0
    accelerator.wait_for_everyone()
    if converted != newest and accelerator.is_main_process:
        shutil.rmtree(converted)
    log.info("resumed from %s", newest)
    # Those that write the next state.
    return replace(position, processes=accelerator.num_processes, zero_stage=stage)


def _newest(directory: Path) -> tuple[Path | None, Position | None]:
    states = stored_states(directory)
    return (states[-1], Position(**read_json(states[-1] / POSITION_FILE))) if states else (None, None)


def check_layout(state: Path, position: Position, processes: int, stage: int) -> None:
    """Raise `ResumeError` if the state cannot be read by so many processes at this ZeRO stage: the parts of ZeRO-3 are
    those of each parameter, and have another layout than the flat ones of ZeRO-1 and 2."""
    before = position.zero_stage
    if (before == 3) == (stage == 3) and (stage != 3 or processes == position.processes):
        return
    raise ResumeError(
        f"{state} was written by {position.processes} processes under ZeRO-{before}, and {processes} run under "
        f"ZeRO-{stage}: launch {position.processes} processes under ZeRO-{before} to resume it (`toolkit train "
        f"--num-processes {position.processes} --config-file recipes/accelerate/zero{max(before, 2)}.yaml`), or choose "
        "another run_dir"
    )


def converted_state(accelerator: Accelerator, engine: Any, state: Path, processes: int) -> Path:
    """Write `state` of so many processes beside itself as the running ones would have written it. All processes must
    call this.

    ZeRO-1 and 2 cut the flat weights and moments of a parameter group into one part for each process. The parts are
    joined by parameter and cut again as the running processes hold them. (DeepSpeed's own `elastic_checkpoint` cannot
    do it under Muon: the groups have other moments.)
    """
    into = state.with_name(f"{state.name}.converted")
    parts = [_load(path) for path in _parts(state)]
    joined = [one["optimizer_state_dict"] for one in parts]
    own = engine.optimizer.state_dict()
    if accelerator.is_main_process:
        log.info("converting %s of %d processes to %d", state, processes, accelerator.num_processes)
        shutil.rmtree(into, ignore_errors=True)
        (into / OF_MODEL).parent.mkdir(parents=True)
        torch.save({**_load(state / OF_MODEL), "dp_world_size": accelerator.num_processes}, into / OF_MODEL)
    accelerator.wait_for_everyone()
    wait_for_files(into / OF_MODEL)
    own["base_optimizer_state"] = dict(joined[0]["base_optimizer_state"])
    places = {name: one._hp_mapping for name, one in engine.module.named_parameters()}
    sizes = {name: one.numel() for name, one in engine.module.named_parameters()}
    flat, moments = [], {}
    for group, cut in enumerate(own["param_slice_mappings"]):
        size = engine.optimizer.single_partition_of_fp32_groups[group].numel()
        flat.append(_cut([one[FLAT][group] for one in joined], joined, group, cut, places, size))
        states = [one["base_optimizer_state"]["state"][group] for one in joined]
        moments[group] = dict(states[0])
        for key, value in states[0].items():
            each = [one[key] for one in states]
            if key == "momentum_buffer":
                moments[group][key] = _cut_momentum(each, joined, group, cut, sizes)
            elif torch.is_tensor(value) and value.dim():
                moments[group][key] = _cut(each, joined, group, cut, places, size)
    own[FLAT], own["base_optimizer_state"]["state"] = flat, moments
    name = _parts(state)[0].name.replace("pp_rank_0", f"pp_rank_{accelerator.process_index}")
    torch.save({**parts[0], "optimizer_state_dict": own}, into / "pytorch_model" / name)
    accelerator.wait_for_everyone()
    return into


def _cut(parts: Any, states: Any, group: int, cut: Any, places: Any, size: int) -> torch.Tensor:
    """Join the flat parts [P] of a group by parameter, and return the part [size] of this process."""
    pieces: dict[str, list[torch.Tensor]] = {}
    for part, state in zip(parts, states, strict=True):
        for name, at in state["param_slice_mappings"][group].items():
            pieces.setdefault(name, []).append(part[at.start : at.start + at.numel])
    mine = torch.zeros(size, dtype=parts[0].dtype)
    for name, at in cut.items():
        first = places[name].lp_fragment_address.start
        mine[at.start : at.start + at.numel] = torch.cat(pieces[name])[first : first + at.numel]
    return mine


def _cut_momentum(parts: Any, states: Any, group: int, cut: Any, sizes: dict[str, int]) -> torch.Tensor:
    """As `_cut`, of Muon's momentum: a process that has a part of a parameter has the momentum of all of it."""
    pieces: dict[str, torch.Tensor] = {}
    for part, state in zip(parts, states, strict=True):
        names = list(state["param_slice_mappings"][group])
        pieces |= zip(names, part.split([sizes[name] for name in names]), strict=True)
    return torch.cat([pieces[name] for name in cut])


def _parts(state: Path) -> list[Path]:
    """The files of the optimizer, one for each process, in their order."""
    found = list((state / "pytorch_model").glob("*zero_pp_rank_*_optim_states.pt"))
    return sorted(found, key=lambda path: int(path.name.partition("pp_rank_")[2].partition("_")[0]))


def _load(path: Path) -> Any:
    # DeepSpeed stores objects of its own beside the tensors, and loads them so too.
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)


def gathered_weights(accelerator: Accelerator, model: torch.nn.Module) -> Weights:
    """The head's weights, in the dtype of training, by their names in a draft directory. All processes must call this;
    under ZeRO-3 only the main process gets the weights."""
    state = accelerator.get_state_dict(model) or {}
    return {name.removeprefix("head."): value.detach() for name, value in state.items() if name.startswith("head.")}


def in_dtype(weights: Weights, config: HeadConfig, dtype: torch.dtype) -> Weights:
    """The weights in the dtype in which they are saved and served; buffers keep theirs, as in `DraftHead.cast`."""
    with torch.device("meta"):
        cast = {name for name, _ in build_head(config).named_parameters()}
    return {name: value.to(dtype) if name in cast else value for name, value in weights.items()}


def head_of(weights: Weights, config: HeadConfig, device: torch.device, dtype: torch.dtype) -> DraftHead:
    """A frozen copy of the head with these weights."""
    head = empty_head(config)
    load_strict(head, weights, "the head in training")
    return head.cast(device, dtype).eval().requires_grad_(False)


def as_draft(weights: Weights, config: HeadConfig, token_map: TokenMap, target: Target) -> DraftCheckpoint:
    """The head as a draft checkpoint for the engine, in the target's dtype and on its device."""
    return DraftCheckpoint(head_of(weights, config, target.device, target.dtype), token_map)


def training_record(
    settings: TrainSettings, seed: int, target: Target, position: Position, rollouts: int
) -> dict[str, Any]:
    """The draft directory's `toolkit` block for the head of `position.best_step`."""
    return {
        "target": describe_target(target),
        "training": {
            **asdict(settings),
            "seed": seed,
            "steps": position.step,
            "best_step": position.best_step,
            "supervised_tokens": position.supervised_tokens,
            "seconds": round(position.seconds, 1),
            "forecast_accept_length": position.best_forecast,
            "real_accept_length": position.best_real,
            "rollouts": rollouts,
        },
    }
