"""Ends of a training that have a name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from toolkit.pipeline import train_entry
from toolkit.train import loop
from toolkit.train.accelerator import DivergedError, LostProcessError, check_finite, check_weights, lost_process_named


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (float("inf"), None), (1.0, float("nan"))])
def test_a_loss_or_norm_that_is_not_finite_raises(tmp_path, loss, norm):
    check_finite(3, 1.0, 0.5, tmp_path)
    with pytest.raises(DivergedError, match="of step 3 is (nan|inf).*no state was stored yet.*learning_rate"):
        check_finite(3, loss, norm, tmp_path)


@pytest.mark.parametrize(("rank", "numbers"), [(0, 3), (2, 1)])
def test_weights_that_are_not_finite_raise_but_padding_does_not(tmp_path, rank, numbers):
    """Under ZeRO-3 a process holds a part of each parameter; the last part ends with uninitialised padding. Here 7
    elements lie in three parts of 3."""
    parameter = torch.nn.Parameter(torch.zeros(0))
    parameter.ds_tensor, parameter.ds_numel = torch.full((3,), float("nan")), 7
    model = SimpleNamespace(parameters=lambda: [parameter])
    accelerator = SimpleNamespace(process_index=rank, device="cpu", reduce=lambda count, how: count)
    parameter.ds_tensor[:numbers] = 1.0
    check_weights(accelerator, model, 5, tmp_path)
    parameter.ds_tensor[numbers - 1] = float("inf")
    with pytest.raises(DivergedError, match="weights after step 5"):
        check_weights(accelerator, model, 5, tmp_path)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"), True),
        (torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (torch.distributed.DistNetworkError("the read timed out"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ConnectionResetError("connection reset by peer"), False),  # for example of a tracker's upload
    ],
)
def test_only_the_group_s_errors_blame_another_process(tmp_path, error, lost):
    """An error of this process must not be reported as a lost process: the user would look at the wrong machine."""
    with pytest.raises(LostProcessError if lost else type(error)) as raised, lost_process_named(tmp_path):
        raise error
    assert raised.value is not error if lost else raised.value is error


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
