"""What the pretended device refuses, waits for and counts: else the tests on it would say nothing."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tests.pretend_cuda.device import pretended_cuda
from tests.pretend_cuda.seen import CaptureError, MixedDevicesError, seen
from toolkit.infer.kernels.dispatch import ops_for
from toolkit.infer.kernels.paged_reference import Pages


def refuses(error: type[Exception], run: Callable[[], object]) -> bool:
    try:
        run()
    except error:
        return True
    return False


def both_devices_in_one_operation_are_refused() -> None:
    here, there = torch.ones(2), torch.ones(2, device="cuda")
    pages = Pages(*(there.view(2, 1, 1),) * 2, table=torch.tensor([[0, 1]]), page_size=1, span=2)
    starts = torch.zeros(1, dtype=torch.long, device="cuda")
    for mixed in (
        lambda: there + here, lambda: torch.cat((there, here)), lambda: here[torch.tensor([0], device="cuda")],
        lambda: ops_for("cuda").write_kv(pages, *(there.view(1, 2, 1, 1),) * 2, starts, 0),
    ):  # fmt: skip
        assert refuses(MixedDevicesError, mixed)
    assert torch.equal((there + torch.tensor(1.0)).cpu(), here + 1), "a number of the host goes with the launch"


def reads_and_uploads_are_noted() -> None:
    values, pinned = torch.arange(3.0, device="cuda"), torch.ones(3, pin_memory=True)
    reads = (
        values.tolist, values.cpu, values[1].item, lambda: values[values > 1], values.nonzero,
        torch.cuda.Event().synchronize, lambda: torch.empty(3).copy_(values),
    )  # fmt: skip
    uploads = (
        lambda: torch.ones(3).to("cuda"), lambda: torch.tensor([1, 2], device="cuda"), lambda: values[[0, 2]],
        lambda: values.copy_(pinned), lambda: values.copy_(torch.ones(3), non_blocking=True),
    )  # fmt: skip
    for run in (*reads, *uploads):
        seen.clear()
        run()
        assert (seen.reads.total(), seen.uploads.total()) == ((1, 0) if run in reads else (0, 1)), run
    seen.clear()
    torch.empty(3, pin_memory=True).copy_(values, non_blocking=True)
    values.copy_(pinned, non_blocking=True)
    assert not seen.reads and not seen.uploads and seen.pinned == 1, "the host does not wait for these"


def launches_are_counted() -> None:
    values = torch.ones(2, 3, 4, 4, device="cuda")
    seen.clear()
    values.view(-1)[:3].expand(2, 3).unsqueeze(0)
    torch.empty_like(values)
    assert not seen.launches, "views and allocations start no kernel"
    values.add_(1), values.to(torch.bfloat16), F.scaled_dot_product_attention(values, values, values)
    assert seen.launches.total() == 3
    ops_for("cuda").top_log_probs(values.flatten(0, 2), 2)
    assert seen.launches.total() == 5


def a_graph_runs_its_operations_again() -> None:
    """Not the code of the host, whose numbers are part of it."""
    values, factor = torch.ones(3, device="cuda"), 2.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = values * factor
        values.add_(1)
        best = ops_for("cuda").argmax(values[None])
    factor = 5.0
    values.copy_(torch.tensor([3.0, 7.0, 4.0]))
    graph.replay()
    assert doubled.tolist() == [6, 14, 8] and values.tolist() == [4, 8, 5] and best.tolist() == [1]
    for refused in (values.tolist, lambda: torch.tensor([1.0], device="cuda"), lambda: values[[0]]):
        with torch.cuda.graph(graph):
            assert refuses(CaptureError, refused)


CHECKS = (
    both_devices_in_one_operation_are_refused, reads_and_uploads_are_noted, launches_are_counted,
    a_graph_runs_its_operations_again,
)  # fmt: skip


def wrong() -> list[str]:
    """Tracebacks of the checks that failed."""
    found = []
    for check in CHECKS:
        try:
            with pretended_cuda():
                check()
        except Exception:
            found.append(traceback.format_exc())
    return found
