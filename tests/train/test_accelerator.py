"""What the recipe replaces in the launcher's settings, bucket sizes, and ends of a training that have a name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import build_target
from toolkit.infer.engine.cpu_door import load_target
from toolkit.pipeline import train_entry
from toolkit.train import loop
from toolkit.train.accelerator import (
    DivergedError,
    LostProcessError,
    _replaced,
    check_finite,
    check_weights,
    lost_process_named,
    set_buckets,
    weights_checksum,
)


@pytest.mark.parametrize(
    ("config", "mixed", "warnings"),
    [
        ({"gradient_accumulation_steps": 1, "gradient_clipping": "auto", "fp16": {"loss_scale": 0}}, "no", []),
        (
            {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0},
            "fp16",
            [
                "mixed_precision fp16, but the recipe trains in bf16",
                "gradient_accumulation_steps 2, but the recipe's value is 4",
                "gradient_clipping 1.0, but the recipe's value is 0.5",
            ],
        ),
    ],
)
def test_replaced_settings_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], mixed: str, warnings: list[str]
) -> None:
    """The recipe has precision bf16, accumulation 4, clip 0.5. accelerate's defaults (no, 1, auto) give no warning."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", mixed)
    assert list(_replaced(config, "bf16", accumulation=4, clip=0.5)) == warnings


@pytest.mark.parametrize(
    ("sizes", "elements"),
    [
        ([40, 7], 48),  # a small head: one bucket of an even size for all of it
        ([131_072_000, 50_331_648, 4096], 131_072_000),  # the output matrix of 32,000 tokens fits whole
    ],
)
def test_buckets_are_as_large_as_the_head_needs(sizes: list[int], elements: int) -> None:
    """DeepSpeed's default would allocate 5e8 elements for a head of 47 parameters."""
    config: dict[str, Any] = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
    set_buckets(config, sizes)
    assert config["zero_optimization"] == {
        "stage": 2, "reduce_bucket_size": elements, "allgather_bucket_size": elements
    }  # fmt: skip


@pytest.mark.parametrize(("loss", "norm"), [(float("inf"), None), (1.0, float("nan"))])
def test_a_loss_or_norm_that_is_not_finite_raises(tmp_path, loss, norm):
    check_finite(3, 1.0, 0.5, tmp_path)
    with pytest.raises(DivergedError, match="of step 3 is (nan|inf).*no state was stored yet.*learning_rate"):
        check_finite(3, loss, norm, tmp_path)


def test_weights_that_are_not_finite_raise_but_padding_does_not(tmp_path):
    """Under ZeRO-3 a process holds a part of each parameter; the last part ends with uninitialised padding. Here 7
    elements lie in three parts of 3."""
    parameter = torch.nn.Parameter(torch.zeros(0))
    parameter.ds_tensor, parameter.ds_numel = torch.full((3,), float("nan")), 7
    model = SimpleNamespace(parameters=lambda: [parameter])
    accelerator = SimpleNamespace(process_index=2, device="cpu", reduce=lambda count, how: count)
    parameter.ds_tensor[0] = 1.0
    check_weights(accelerator, model, 5, tmp_path)
    parameter.ds_tensor[0] = float("inf")
    with pytest.raises(DivergedError, match="weights after step 5"):
        check_weights(accelerator, model, 5, tmp_path)


def test_the_checksum_knows_each_weight(tiny_target_directory):
    """A training on other weights of the same name and configuration would go on from the old states."""
    int8, other = (load_target(tiny_target_directory, quantization="int8") for _ in range(2))
    assert weights_checksum(int8, SimpleNamespace()) == weights_checksum(other, SimpleNamespace())
    layer = other.layers[1].mlp.up_proj
    layer.set_weight(layer.weight * (1.0 + torch.arange(layer.out_features)[:, None] % 2))
    assert weights_checksum(int8, SimpleNamespace()) != weights_checksum(other, SimpleNamespace())
    target, alone = build_target(layers=4), SimpleNamespace()
    before = weights_checksum(target, alone)
    assert before == weights_checksum(build_target(layers=4), alone)
    with torch.no_grad():
        target.layers[1].mlp.up_proj.weight[3, 4] *= 1.0 + 2**-23
    assert weights_checksum(target, alone) != before


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"), "process ended"),
        (torch.distributed.DistNetworkError("the read timed out"), "process ended"),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv"), "hangs"),
        (torch.distributed.DistStoreError("wait timeout after 3000ms, keys: /default_pg/0//1//cpu//0/1"), "hangs"),
        (torch.distributed.DistBackendError("NCCL watchdog caught collective operation timeout: .."), "hangs"),
        (RuntimeError("CUDA out of memory"), None),
    ],
)
def test_only_the_group_s_errors_blame_another_process(tmp_path, error, said):
    """An error of this process must not be reported as a lost process: the user would look at the wrong machine. And
    who looks for the message of an ended process finds none while it hangs."""
    with pytest.raises(LostProcessError if said else type(error), match=said) as raised, lost_process_named(tmp_path):
        raise error
    assert (raised.value is error) == (said is None)


def test_the_process_group_ends_at_exit_also_after_a_failed_training(tmp_path, monkeypatch):
    """Threads of gloo that still run may abort the exit, which would hide the error's own exit status."""
    at_exit: list = []

    class Failing:
        def __init__(self, *_):
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            raise DivergedError("of step 3")

    monkeypatch.setattr(train_entry, "bring_up_to_date", lambda *_: None)
    monkeypatch.setattr(train_entry.atexit, "register", at_exit.append)
    monkeypatch.setattr(loop, "Trainer", Failing)
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert train_entry.train_from_command_line("eagle3", [f"run_dir={tmp_path}"]) != 0
    assert torch.distributed.is_initialized()
    for end in at_exit:
        end()
    assert not torch.distributed.is_initialized()
