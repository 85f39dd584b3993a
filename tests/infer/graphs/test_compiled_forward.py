"""Rounds whose layers are compiled write the tokens of rounds by the layers' own code; the bound is kept.

Recorded rounds on a CPU: by Dynamo and AOTAutograd without Inductor, and with a capture that runs the round again in
place of a graph. Sizes, guards, operators and hooks are those of a GPU.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.graphs import compiled_forward
from toolkit.infer.graphs.compiled_forward import CompiledForward
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import CompileError, SamplingParams
from toolkit.targets.target import Target

pytestmark = pytest.mark.compile
LENGTHS = (5, 19, 2, 33, 9)  # with ragged ends below: 5 requests in 4 rows fill every bucket
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def own_target(small_target: Target) -> Target:
    """A model of its own: transformers leaves hooks on a model that was asked for its hidden states, as other tests do,
    and Dynamo does not trace these."""
    model = type(small_target.model)(small_target.model.config)
    model.load_state_dict(small_target.model.state_dict())
    return replace(small_target, model=model)


def again(run):
    run()
    return run


def engine_with(target, draft, shape, capture=again, **options) -> Engine:
    wanted = None if draft is None else DraftShape.parse(shape)
    settings = {"max_running_requests": 4, "chunked_prefill_size": 16, "torch_compile": True, **options}
    return Engine(target, draft, wanted, capture=capture, **settings)


@pytest.fixture
def backend(monkeypatch):
    """Choose what compiles."""
    return lambda name: monkeypatch.setattr(compiled_forward, "BACKEND", name)


def answers(engine: Engine) -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, 24, (length,), generator=generator).tolist() for length in LENGTHS]
    params = [SamplingParams(max_tokens=8 + 3 * i) for i in range(len(LENGTHS))]
    try:
        done = engine.generate(prompts, params)
    finally:
        engine.close()
    return [(one.output_ids, [event.accepted for event in one.events]) for one in done]


@pytest.mark.parametrize("name, shape", [("eagle3", "3,3,8"), ("mtp-three-layers", "3,1,4")])
def test_compiled_rounds_write_what_eager_rounds_write(own_target, build, backend, name, shape):
    """Features reach the head by hooks on the compiled layers, and every stage of the head attends with its own
    metadata: wrong metadata, a wrong layer number or row would show in tokens or in what is accepted."""
    draft = build(name)
    backend("aot_eager")
    compiled = answers(engine_with(own_target, draft, shape))
    assert compiled == answers(engine_with(own_target, draft, shape, torch_compile=False))
    assert any(max(accepted) > 0 for _, accepted in compiled)
    assert all("forward" not in vars(layer) for layer in draft.head.modules())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name, shape", [("eagle3", "3,3,8"), ("mtp-three-layers", "3,1,4")])
def test_graphs_of_compiled_forward_write_what_eager_rounds_write(own_target, build, name, shape):
    """The same by Inductor, with real graphs, on kernels: fp32, where tokens are equal."""
    draft = build(name)
    draft = replace(draft, head=copy.deepcopy(draft.head).cuda())
    target = replace(own_target, model=copy.deepcopy(own_target.model).cuda())
    compiled = answers(engine_with(target, draft, shape, None))
    assert compiled == answers(engine_with(target, draft, shape, None, torch_compile=False))


def test_rounds_above_the_bound_hold_the_layers_own_code(own_target, build, backend, monkeypatch):
    """Drafts and forwards up to the bound, and none above, are recorded with compiled layers. They are
    made before the first request, and nothing is compiled afterwards."""
    compiled_now: list[bool] = []
    recorded: dict[int, bool] = {}

    def noting(run):
        compiled_now.clear()
        run()
        recorded[len(recorded)] = bool(compiled_now)
        return run

    def ran(self, program, name, *inputs):
        compiled_now.append(True)
        kinds.add(name)
        return own(self, program, name, *inputs)

    own, kinds = CompiledForward._run, set()
    monkeypatch.setattr(CompiledForward, "_run", ran)
    backend("eager")
    engine = engine_with(own_target, build("eagle3"), "3,3,8", noting, torch_compile_max_bs=2)
    assert len(recorded) == 16, "drafts, forward and three kinds of choices for each of three buckets, and a prompt"
    compiled = counters["stats"]["unique_graphs"]
    parts, prompts = list(engine._rounds.graphs.made), engine._rounds.graphs._prompts
    answers(engine)
    wanted = [one.bucket <= 2 and one.what != "choice" and one.source not in prompts for one in parts]
    assert list(recorded.values()) == wanted
    assert {one.bucket for one in parts} == {1, 2, 4}
    assert kinds == {"LlamaModel", "DraftLayer"}
    assert counters["stats"]["unique_graphs"] == compiled, "something was compiled while it served"


def test_layers_that_come_out_different_are_refused(own_target, backend):
    """A compiler that computes something else must never answer."""

    def wrong(graph, _inputs):
        return lambda *inputs: [out * 1.01 for out in graph(*inputs)]

    def broken(graph, _inputs):
        raise NotImplementedError("no such instruction")

    torch.compiler.reset()
    backend(wrong)
    with pytest.raises(CompileError, match="logits differ.* leave it out"):
        engine_with(own_target, None, "")
    torch.compiler.reset()
    backend(broken)
    with pytest.raises(CompileError, match="LlamaModel cannot be compiled .*no such instruction"):
        engine_with(own_target, None, "")


@pytest.mark.parametrize("max_rows, graph_rows, bound", [(None, 64, 32), (None, 8, 8), (4, 64, 4), (None, None, 16)])
def test_the_bound_that_was_asked_for(max_rows, graph_rows, bound):
    config = EngineConfig(target="x", torch_compile=True, torch_compile_max_bs=max_rows, cuda_graph_max_bs=graph_rows)
    assert config.with_graph_sizes().torch_compile_max_bs == bound
