"""Several nodes: the recipes are what accelerate and DeepSpeed read, and two "nodes" train the curve of one process."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from deepspeed.launcher.runner import fetch_hostfile

from toolkit.head_kinds import HEAD_KINDS
from toolkit.pipeline.launch import zero_stage

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = REPOSITORY / "recipes" / "accelerate"
SCRIPT = "toolkit/train/eagle3.py"


@pytest.mark.parametrize("name", ["zero3", "nodes"])
def test_accelerate_reads_the_recipe(name):
    """An unknown key is an error of its loader."""
    config = load_config_from_file(str(RECIPES / f"{name}.yaml"))
    settings = config.deepspeed_config
    assert str(config.distributed_type) == "DistributedType.DEEPSPEED" and config.mixed_precision == "no"
    assert not {"gradient_clipping", "gradient_accumulation_steps"} & settings.keys(), "they are the recipe's"
    assert settings["zero_stage"] == zero_stage(RECIPES / f"{name}.yaml") == (3 if name == "zero3" else 2)
    assert config.num_machines == (2 if name in ("nodes", "hostfile") else 1)


def lines_typed(path: Path, command: str) -> list[list[str]]:
    """The arguments of each line of a file, commented out or not, that contains this command."""
    whole = path.read_text().replace("\\\n#", " ").replace("\\\n", " ")
    lines = [line.removeprefix("#").strip() for line in whole.splitlines()]
    return [shlex.split(line.removeprefix(command), comments=True) for line in lines if line.startswith(f"{command} ")]


def typed(name: str) -> list[str]:
    """The launch line in the recipe's header, of the second node where it is one of each node."""
    (words,) = lines_typed(RECIPES / f"{name}.yaml", "accelerate launch")
    return ["1" if word == "K" else word for word in words]


def started(words: list[str], monkeypatch):
    """What `accelerate launch` would start: DeepSpeed's command if there is one, its environment, all arguments."""
    found = []
    monkeypatch.setattr(launch, "deepspeed_launcher", found.append)
    launch.launch_command(launch.launch_command_parser().parse_args(words))
    (args,) = found
    return *prepare_deepspeed_cmd_env(args), args


def test_the_line_over_ssh(monkeypatch):
    """What accelerate makes of it: DeepSpeed's launcher with our hosts, each with its share of the processes."""
    monkeypatch.chdir(REPOSITORY)
    command, environment, _ = started(typed("hostfile"), monkeypatch)
    words = " ".join(command)
    assert words.startswith("deepspeed --hostfile recipes/accelerate/hostfile --no_local_rank --launcher pdsh")
    assert "--num_gpus 8 --master_addr NODE0 --master_port 29500" in words
    assert words.endswith(f"{SCRIPT} --recipe recipes/smollm2-135m.yaml train.data.global_batch=16")
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
    assert dict(fetch_hostfile("recipes/accelerate/hostfile")) == {"node0": 8, "node1": 8}
    assert ".deepspeed_env" in (REPOSITORY / ".gitignore").read_text().splitlines()


# Slurm, as far as the script needs it: two nodes, both on this machine. Like its own since 22.05, this srun does not
# know the job's --cpus-per-task by itself.
SRUN = """#!/bin/bash
[[ "${SRUN_CPUS_PER_TASK:-}" == "$SLURM_CPUS_PER_TASK" ]] || { echo "srun: one CPU a task" >&2; exit 1; }
while [[ "$1" == --* ]]; do shift; done
jobs=(); for node in 0 1; do SLURM_NODEID=$node "$@" & jobs+=($!); done
status=0; for job in "${jobs[@]}"; do wait "$job" || status=$?; done; exit $status
"""
SCONTROL = "#!/bin/bash\n[[ $* == 'show hostnames two-nodes' ]] && printf '127.0.0.1\\n127.0.0.2\\n'\n"


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """The environment of a job's first node, with stand-ins for srun and scontrol, and this Python's accelerate."""
    launcher = f'#!/bin/bash\nexec "{sys.executable}" -m accelerate.commands.accelerate_cli "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("accelerate", launcher)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ours = {"SLURM_JOB_NODELIST": "two-nodes", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "GPUS": "1", "PORT": str(port)}
    ours["SLURM_CPUS_PER_TASK"] = "3"
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    return {**os.environ, **ours, **paths, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "TOOLKIT_LOG": "info"}


@pytest.mark.parametrize(("head", "script"), [("mtp", "toolkit/train/mtp.py"), ("loss", None)])
def test_the_job_trains_the_chosen_head(slurm, tmp_path, head, script):
    """Every node starts that head's script; a head that is none is refused before any node starts."""
    (tmp_path / "accelerate").write_text('#!/bin/bash\necho "$@"\n')
    environment = {**slurm, **({} if head is None else {"HEAD": head})}
    command = ["bash", "recipes/slurm/train.sbatch", "a=b"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)
    if script is None:
        assert done.returncode == 2 and f"one of {' '.join(HEAD_KINDS)} is needed" in done.stderr and not done.stdout
    else:
        started = done.stdout.splitlines()
        assert done.returncode == 0 and len(started) == 2 and (REPOSITORY / script).is_file()
        assert all(line.endswith(f" {script} a=b") for line in started)


def test_nodes_differ_from_zero2_only_in_who_starts_them():
    """A setting changed in one file alone would make many nodes another training."""
    one, *others = (yaml.safe_load((RECIPES / f"{n}.yaml").read_text()) for n in ("zero2", "nodes", "hostfile"))
    launching = {"num_machines", "num_processes", "main_process_ip", "main_process_port", "deepspeed_config"}
    starts = {"deepspeed_multinode_launcher", "deepspeed_hostfile"}
    for config in others:
        assert {k: v for k, v in config["deepspeed_config"].items() if k not in starts} == one["deepspeed_config"]
        assert {k: v for k, v in config.items() if k not in launching} == {
            k: v for k, v in one.items() if k not in launching
        }
