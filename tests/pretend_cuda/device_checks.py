"""What the pretended device refuses, waits for and counts. A program, since it patches torch.

Prints one JSON object: by check what was wrong (None: nothing).
"""

from __future__ import annotations

import json
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
    assert refuses(MixedDevicesError, lambda: there + here)
    assert refuses(MixedDevicesError, lambda: torch.cat((there, here)))
    assert refuses(MixedDevicesError, lambda: here[torch.tensor([0], device="cuda")])
    pages = Pages(*(there.view(2, 1, 1),) * 2, table=torch.tensor([[0, 1]]), page_size=1, span=2)
    starts = torch.zeros(1, dtype=torch.long, device="cuda")
    assert refuses(
        MixedDevicesError, lambda: ops_for("cuda").write_kv(pages, *(there.view(1, 2, 1, 1),) * 2, starts, 0)
    )
    assert torch.equal((there + torch.tensor(1.0)).cpu(), here + 1), "a number of the host goes with the launch"


def reads_are_noted() -> None:
    values = torch.arange(3.0, device="cuda")
    for read in (
        values.tolist, values.cpu, values[1].item, lambda: values[values > 1], values.nonzero,
        torch.cuda.Event().synchronize, lambda: torch.empty(3).copy_(values),
    ):  # fmt: skip
        seen.clear()
        read()
        assert seen.reads.total() == 1, (read, seen.reads)
    seen.clear()
    torch.empty(3, pin_memory=True).copy_(values, non_blocking=True)
    torch.repeat_interleave(values, values.long(), output_size=3)
    assert not seen.reads, "the host does not wait for these"


def uploads_are_noted() -> None:
    store, pinned = torch.zeros(3, device="cuda"), torch.ones(3, pin_memory=True)
    for upload in (
        lambda: torch.ones(3).to("cuda"), lambda: torch.tensor([1, 2], device="cuda"), lambda: store[[0, 2]],
        lambda: store.copy_(pinned), lambda: store.copy_(torch.ones(3), non_blocking=True),
    ):  # fmt: skip
        seen.clear()
        upload()
        assert seen.uploads.total() == 1 and not seen.pinned, (upload, seen.uploads)
    seen.clear()
    store.copy_(pinned, non_blocking=True)
    store[:2].copy_(pinned[1:], non_blocking=True)
    torch.ones(3).pin_memory().to("cuda", non_blocking=True)
    torch.full((3,), 2.0, device="cuda")
    assert not seen.uploads and seen.pinned == 3


def launches_are_counted() -> None:
    values = torch.ones(2, 3, 4, 4, device="cuda")
    seen.clear()
    values.view(-1)[:3].expand(2, 3).unsqueeze(0)
    torch.empty_like(values)
    assert not seen.launches, "views and allocations start no kernel"
    values.add_(1), values.to(torch.bfloat16), values.contiguous()
    F.scaled_dot_product_attention(values, values, values), F.rms_norm(values, (4,))
    assert seen.launches.total() == 4
    seen.clear()
    scores, ids = ops_for("cuda").top_log_probs(values.flatten(0, 2), 2)
    assert seen.launches == {"_top_of_chunks": 1, "_top_of_rows": 1}
    assert scores.shape == ids.shape == (24, 2) and torch.isfinite(scores).all()


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
    both_devices_in_one_operation_are_refused, reads_are_noted, uploads_are_noted, launches_are_counted,
    a_graph_runs_its_operations_again,
)  # fmt: skip


def outcome(check: Callable[[], None]) -> str | None:
    own = torch.cuda.Event
    try:
        with pretended_cuda():
            check()
        assert torch.cuda.Event is own, "torch is patched after the end of the block"
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    print(json.dumps({check.__name__: outcome(check) for check in CHECKS}))
