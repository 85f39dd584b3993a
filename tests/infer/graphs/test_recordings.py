"""What a recording leaves behind, on a stand-in for the device: the real one is for `pytest -m gpu`."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from toolkit.infer.graphs import recordings
from toolkit.infer.graphs.recordings import WARM_UPS, BrokenCaptureError, CudaCapture
from toolkit.infer.request.params import EngineError


@pytest.fixture
def device(monkeypatch) -> SimpleNamespace:
    """torch.cuda as far as it is used, with torch's own fault: a capture that fails is left on its stream."""
    state = SimpleNamespace(current="default", used=[], graphs=0)

    class Stream:
        def wait_stream(self, other) -> None:
            pass

    default = Stream()
    state.current = default

    class Graph:
        def pool(self) -> str:
            return "pool"

        def replay(self) -> None:
            state.used.append("replay")

    @contextmanager
    def stream(one):
        before, state.current = state.current, one
        try:
            yield
        finally:
            state.current = before

    @contextmanager
    def graph(_graph, pool, stream):
        before, state.current = state.current, stream
        try:
            yield
        except RuntimeError:
            raise RuntimeError("capture was invalidated") from None
        state.used.append((pool, stream))
        state.current = before

    cuda = SimpleNamespace(
        Stream=Stream, CUDAGraph=Graph, stream=stream, graph=graph, current_stream=lambda: state.current,
        set_stream=lambda one: setattr(state, "current", one),
    )  # fmt: skip
    monkeypatch.setattr(recordings.torch, "cuda", cuda)
    state.default = default
    return state


def test_recordings_share_a_pool_and_a_stream(device) -> None:
    """A stream of its own for each would cost a workspace of each library; a pool of its own, its memory. Warm-ups run
    on the caller's stream: a workspace that they allocate is outside of the pool, and others can free it."""
    capture, ran = CudaCapture(), []
    for _ in range(2):
        capture(lambda: ran.append(device.current))()
    (first_pool, first), _, (second_pool, second), _ = device.used
    assert (first_pool, second_pool) == (None, "pool") and first is second is not device.default
    assert ran == 2 * [*[device.default] * WARM_UPS, first] and device.current is device.default


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_inside_a_capture(device, enabled) -> None:
    """A collection frees what is in cycles, another graph among it, and a capture does not survive that."""
    collecting = []
    (gc.enable if enabled else gc.disable)()
    try:
        CudaCapture()(lambda: collecting.append(gc.isenabled()))
        assert collecting == [enabled] * WARM_UPS + [False] and gc.isenabled() == enabled
    finally:
        gc.enable()


@pytest.mark.parametrize("fails_in", [1, WARM_UPS + 1])
def test_a_failure_tells_its_cause_and_leaves_the_stream(device, fails_in) -> None:
    """What runs next would else run beside the default stream, unordered; only a failure inside the capture ends all
    recording."""
    runs = []

    def run() -> None:
        runs.append(1)
        if len(runs) == fails_in:
            raise RuntimeError("somebody read a number")

    with pytest.raises(EngineError, match="somebody read a number.*or set `disable_cuda_graph`") as found:
        CudaCapture()(run)
    assert isinstance(found.value, BrokenCaptureError) == (fails_in > WARM_UPS)
    assert device.current is device.default


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_keep_the_workspaces_of_their_products() -> None:
    """torch.compile frees all workspaces of cuBLAS before it captures a graph. This product needs one: one row by 4096
    columns is split over the columns."""
    torch._C._cuda_clearCublasWorkspaces()  # an earlier test may have used the stream
    row, matrix = torch.randn(1, 4096, device="cuda"), torch.randn(4096, 4096, device="cuda")
    row, matrix, out = row.bfloat16(), matrix.bfloat16(), torch.zeros(1, 4096, device="cuda").bfloat16()
    capture = CudaCapture()
    replay = capture(lambda: out.copy_(row @ matrix))
    replay()
    expected = out.clone()
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.stream(capture._stream):  # memory that is freed goes to its own stream first
        others = [torch.full((2**21,), 7, dtype=torch.uint8, device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    out.zero_()
    replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected) and all(other.eq(7).all() for other in others)
