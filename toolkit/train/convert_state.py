"""Conversion of a training state to another number of processes.

DeepSpeed's ZeRO-1 and ZeRO-2 cut the flat weights and moments of a parameter group into one part for each process. The
parts are joined by parameter and cut again as the running processes hold them. ZeRO-3 has another layout.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from toolkit.errors import ResumeError
from toolkit.log import get_logger

log = get_logger(__name__)

OF_MODEL = "pytorch_model/mp_rank_00_model_states.pt"  # as accelerate and DeepSpeed name them
FLAT = "single_partition_of_fp32_groups"


def is_of_other_layout(accelerator: Accelerator, engine: Any, state: Path, processes: int) -> bool:
    """Whether a state was written by another number of processes or at another ZeRO stage than is running.

    Raises `ResumeError` if it cannot be converted: from or to ZeRO-3.
    """
    running, now = accelerator.num_processes, int(engine.zero_optimization_stage())
    before = int(_load(_parts(state)[0])["optimizer_state_dict"]["zero_stage"])
    if (processes, before == 3) == (running, now == 3):
        return False
    if 3 in (before, now):
        raise ResumeError(
            f"{state} was written by {processes} processes under ZeRO-{before}, and {running} run under ZeRO-{now}; a "
            f"state of ZeRO-3 is not converted: launch {processes} processes under ZeRO-{before} to resume it "
            f"(--config_file recipes/accelerate/zero{before}.yaml), or choose another run_dir"
        )
    return True


def converted_state(accelerator: Accelerator, engine: Any, state: Path, processes: int) -> Path:
    """Write `state` beside itself as the running processes would have written it. All processes must call this."""
    into = state.with_name(f"{state.name}.converted")
    if accelerator.is_main_process:
        log.info("converting %s of %d processes to %d", state, processes, accelerator.num_processes)
        shutil.rmtree(into, ignore_errors=True)
        (into / OF_MODEL).parent.mkdir(parents=True)
        model = _load(state / OF_MODEL)
        torch.save({**model, "dp_world_size": accelerator.num_processes}, into / OF_MODEL)
    accelerator.wait_for_everyone()
    parts = [_load(path) for path in _parts(state)]
    joined = [one["optimizer_state_dict"] for one in parts]
    own = engine.optimizer.state_dict()
    own["base_optimizer_state"] = dict(joined[0]["base_optimizer_state"])
    places = {name: one._hp_mapping for name, one in engine.module.named_parameters()}
    flat, moments = [], {}
    for group, cut in enumerate(own["param_slice_mappings"]):
        size = engine.optimizer.single_partition_of_fp32_groups[group].numel()
        flat.append(_cut([one[FLAT][group] for one in joined], joined, group, cut, places, size))
        states = [one["base_optimizer_state"]["state"][group] for one in joined]
        moments[group] = {
            key: _cut([one[key] for one in states], joined, group, cut, places, size)
            if torch.is_tensor(value) and value.dim()
            else value
            for key, value in states[0].items()
        }
    own[FLAT], own["base_optimizer_state"]["state"] = flat, moments
    name = _parts(state)[0].name.replace("pp_rank_0", f"pp_rank_{accelerator.process_index}")
    torch.save({**parts[0], "optimizer_state_dict": own}, into / "pytorch_model" / name)
    accelerator.wait_for_everyone()
    return into


def _cut(parts: Any, states: Any, group: int, cut: Any, places: Any, size: int) -> torch.Tensor:
    """Join the flat parts [P] of a group by parameter, and return the part [size] of this process."""
    whole: dict[str, list[torch.Tensor]] = {}
    for part, state in zip(parts, states, strict=True):
        for name, at in state["param_slice_mappings"][group].items():
            whole.setdefault(name, []).append(part[at.start : at.start + at.numel])
    mine = torch.zeros(size, dtype=parts[0].dtype)
    for name, at in cut.items():
        first = places[name].lp_fragment_address.start
        mine[at.start : at.start + at.numel] = torch.cat(whole[name])[first : first + at.numel]
    return mine


def _parts(state: Path) -> list[Path]:
    """The files of the optimizer, one for each process, in their order."""
    found = list((state / "pytorch_model").glob("*zero_pp_rank_*_optim_states.pt"))
    return sorted(found, key=lambda path: int(path.name.partition("pp_rank_")[2].partition("_")[0]))


def _load(path: Path) -> Any:
    # DeepSpeed stores objects of its own beside the tensors, and loads them so too.
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)
