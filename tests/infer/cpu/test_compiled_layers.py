"""Compiled layers write the layers' own tokens, compile nothing while they serve, and leave the model as it was.

Most tests run the exported programs in PyTorch's interpreter, which takes no C++ compiler and no minute; the slow one
compiles them.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import logging
import zipfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook
from transformers.modeling_outputs import BaseModelOutputWithPast

from toolkit.infer.attention.metadata import PromptMetadata, TreeMetadata
from toolkit.infer.cpu import attention as cpu_attention
from toolkit.infer.cpu import blocked_product, body_ends, compiled_head, layer_program, layer_runner
from toolkit.infer.cpu import choices as cpu_choices
from toolkit.infer.cpu.compiled_head import CompiledHead
from toolkit.infer.cpu.compiled_layers import CompiledLayers, check_device
from toolkit.infer.drafters.beams import draft_beams
from toolkit.infer.drafters.head_drafter import limits_of, room_for
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.load.load_engine import load_engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.errors import CompileError
from toolkit.infer.request.params import SamplingParams
from toolkit.targets.features import AuxCapture
from toolkit.targets.load import Target, load_target
from toolkit.targets.quantize import quantize_head

PARAMS = SamplingParams(max_tokens=16)


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in (5, 9, 1, 17, 3)]


def answers(engine: Engine) -> list[list[int]]:
    try:
        return [one.output_ids for one in engine.generate(prompts(engine.target.vocab_size), PARAMS)]
    finally:
        engine.close()


@pytest.mark.parametrize(("shape", "max_batch"), [("3,3,8", 1), ("5,2,12", 3)])
def test_drafted_answers_are_those_of_plain_decoding(
    interpreted_layers, monkeypatch, small_target, small_draft, shape, max_batch
):
    """A head that is often right reads hidden states by hooks on the layers: they have to fire, with rows apart."""
    plain = answers(Engine(small_target))
    engine = Engine(small_target, small_draft, DraftShape.parse(shape), max_batch=max_batch, torch_compile=True)
    with monkeypatch.context() as patch:
        patch.setitem(vars(small_target.body), "forward", None)  # its own code would be missed
        requests = engine.generate(prompts(small_target.vocab_size), PARAMS)
    engine.close()
    assert [one.output_ids for one in requests] == plain
    eager = Engine(small_target, small_draft, DraftShape.parse(shape), max_batch=max_batch)
    uncompiled = eager.generate(prompts(small_target.vocab_size), PARAMS)
    eager.close()
    accepted = [[event.accepted for event in one.events] for one in requests]
    assert accepted == [[event.accepted for event in one.events] for one in uncompiled], "the head read other features"
    assert any(count for counts in accepted for count in counts)


def family(name: str, tokenizer, settings=None) -> Target:
    path = Path(__file__).parents[1] / "attention" / "test_target_families.py"
    spec = importlib.util.spec_from_file_location("target_families", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build(name, module.FAMILIES[name] | (settings or {}), tokenizer)


@pytest.mark.parametrize(("name", "programs"), [("gpt_oss", 4), ("deepseek_v3", 4), ("gemma3_text", 4)])
def test_each_kind_of_layer_has_its_programs(interpreted_layers, small_target, name, programs):
    """Windows, ropes, sinks and experts by layer; one program for one token, one for more, and each compiled once. With
    those of the body's ends all is one call, also where layers are called with ropes of their own."""
    target = family(name, small_target.tokenizer)
    plain = answers(Engine(target, max_batch=2))
    engine = Engine(target, max_batch=2, torch_compile=True)
    kinds = Counter(what.partition(" ")[0] for what in interpreted_layers)
    assert kinds.pop("BodyBegin") == kinds.pop("BodyEnd") == 2 and list(kinds.values()) == [programs]
    target.body.forward = None  # its own code would be missed
    assert answers(engine) == plain


@pytest.mark.parametrize("kind", ["eagle3", "eagle3-int8", "eagle2-two-layers", "mtp", "mtp-hidden-first"])
def test_heads_run_compiled_too(interpreted_layers, monkeypatch, small_target, small_draft, shared_draft, kind):
    """Every kind of head drafts what its own code drafts, by programs for one token and for more."""
    draft = copy.deepcopy(small_draft) if kind.startswith("eagle3") else shared_draft(kind)
    if kind == "eagle3-int8":
        quantize_head(draft.head)
    ran: list[tuple[str, int]] = []
    in_cpp = cpu_attention._library() is not None

    def counted(name):
        own = getattr(CompiledHead, name)

        def run(head, *given):
            out = own(head, *given)
            ran.append((name, given[1].numel() if name == "read" else len(given[0].counts)))
            assert name == "read" or (out is None) == (kind == "mtp-hidden-first" or not in_cpp)
            return out

        monkeypatch.setattr(CompiledHead, name, run)

    def accepted(**compiled: bool) -> list[list[list[int]]]:
        engine = Engine(small_target, draft, DraftShape.chain(3), max_batch=2, **compiled)
        given = prompts(small_target.vocab_size)
        engine.add_request(given[0], PARAMS, speculative=False)  # in a row beside those that draft
        requests = engine.generate(given, PARAMS, shape=[DraftShape.chain(1), *[None] * (len(given) - 1)])
        engine.close()
        return [[one.output_ids, *([event.offered, event.accepted] for event in one.events)] for one in requests]

    plain, own = accepted(), draft.head.rope
    counted("read"), counted("drafts")
    assert accepted(torch_compile=True) == plain
    of_head = [what for what in interpreted_layers if what.startswith("Head")]
    assert of_head[:2] == ["HeadPass for 1 token", "HeadPass for 2 and more tokens"]
    assert max(tokens for name, tokens in ran if name == "read") > 3, "the head ran by its own code"
    assert {tokens for name, tokens in ran if name == "drafts"} == {1, 2}
    assert draft.head.rope is own


@pytest.mark.parametrize("name", ["HeadPass", "HeadFuse", "HeadScores"])
def test_a_head_whose_program_computes_something_else_is_refused(
    interpreted_layers, monkeypatch, small_target, small_draft, name
):
    if name != "HeadPass" and cpu_choices.library() is None:
        pytest.skip("drafts in one call need C++")
    made = compiled_head._runnable

    def wrong(layer, *given):
        run = made(layer, *given)
        factor = 1.01 if type(layer).__name__ == name else 1
        return lambda first, hidden, inputs: run(first, hidden, inputs) * factor

    monkeypatch.setattr(compiled_head, "_runnable", wrong)
    with pytest.raises(CompileError, match=f"{name} of the draft head, compiled, gives another result: off by 0"):
        Engine(small_target, small_draft, torch_compile=True)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_target(interpreted_layers, tiny_target_directory, quantization):
    """Its products choose their kernel by the number of rows, which a program must not fix."""
    target = load_target(tiny_target_directory, quantization=quantization, dtype="float32")
    plain = answers(Engine(target, max_batch=3))
    assert answers(Engine(target, max_batch=3, torch_compile=True)) == plain


def test_nothing_is_compiled_while_serving(interpreted_layers, small_target, small_draft):
    """All sizes of batch and tree, prompts too, run programs that the construction made."""
    engine = Engine(small_target, small_draft, DraftShape.parse("3,3,8"), max_batch=3, torch_compile=True)
    compiled = engine._forward._compiled
    before, graphs = len(interpreted_layers), dict(counters["stats"])
    calls = []
    for index, programs in enumerate(zip(*compiled._programs.values(), strict=True)):
        assert len(set(programs)) == 2, f"layer {index} has one program for all"
    engine.generate(prompts(24), PARAMS)
    for shape in ("2,1,3", "3,2,5"):
        engine.set_shape(DraftShape.parse(shape))
        calls += engine.generate(prompts(24), PARAMS)
    engine.close()
    assert len(calls) == 10 and len(interpreted_layers) == before
    assert dict(counters["stats"]) == graphs, "Dynamo compiled something in a step"


def test_the_model_is_left_as_it_was(interpreted_layers, small_target, small_draft):
    """Between steps, after a step that fails, and after close: other users of the model meet its own layers."""
    model = small_target.model
    ids = torch.tensor([[5, 6, 7]])
    before = model(input_ids=ids).logits
    engine = Engine(small_target, small_draft, torch_compile=True)
    request = engine.add_request([5, 6, 7], PARAMS)
    engine.step()
    assert torch.equal(model(input_ids=ids).logits, before)

    def fails(*_args):
        raise RuntimeError("a layer failed")

    handle = small_target.layers[2].register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="a layer failed"):
        engine.step()
    handle.remove()
    assert "layers" not in vars(small_target.body)
    assert torch.equal(model(input_ids=ids).logits, before)
    engine.abort(request)
    engine.close()
    assert all("forward" not in vars(layer) and not layer._forward_pre_hooks for layer in small_target.layers)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("in_one_call", [True, False])
def test_a_forward_that_fails_leaves_no_work_behind(interpreted_layers, monkeypatch, small_target, in_one_call):
    """In the middle of its layers. Nobody hooks them: where the body's own code calls them, those before the one that
    fails have left their work to it."""
    plain = answers(Engine(small_target))
    engine = Engine(small_target, torch_compile=True)
    fired = []
    hook = None if in_one_call else small_target.final_norm.register_forward_hook(lambda *_given: fired.append(1))
    own = PromptMetadata.attend

    def fails(plan, layer, *given):
        if layer == 2:
            raise ValueError("no attention today")
        return own(plan, layer, *given)

    asked = engine.add_request([5, 6, 7], PARAMS)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="no attention today"):
        patch.setattr(PromptMetadata, "attend", fails)
        engine.step()
    engine.abort(asked)
    assert answers(engine) == plain and bool(fired) != in_one_call
    if hook is not None:
        hook.remove()


@pytest.mark.parametrize("part", ["embed_tokens", "rotary_emb", "norm", "body"])
def test_hooks_around_the_layers_fire_while_they_are_there(interpreted_layers, small_target, part):
    body = small_target.body
    plain, seen = answers(Engine(small_target)), []
    engine = Engine(small_target, torch_compile=True)
    request = engine.add_request(prompts(24)[0], PARAMS)
    engine.step()
    module = body if part == "body" else getattr(body, part)
    handle = module.register_forward_hook(lambda *_given: seen.append(len(request.output_ids)))
    before = len(request.output_ids)
    engine.step()
    handle.remove()
    engine.step()
    assert seen == [before] and request.output_ids == plain[0][: len(request.output_ids)]
    engine.abort(request)
    assert answers(engine) == plain


def test_a_hook_that_is_there_at_the_start_does_not_stay(interpreted_layers, small_target):
    """On what stands around the layers, changing what it gives: programs that had it in them would go on doing so."""
    plain = answers(Engine(small_target))
    handle = small_target.final_norm.register_forward_hook(lambda _norm, _given, out: -out)
    hooked = answers(Engine(small_target))
    engine = Engine(small_target, torch_compile=True)
    request = engine.add_request(prompts(24)[0], PARAMS)
    engine.step()
    assert request.output_ids == hooked[0][: len(request.output_ids)] != plain[0][: len(request.output_ids)]
    engine.abort(request)
    handle.remove()
    assert answers(engine) == plain


def test_two_threads_need_two_targets(interpreted_layers, monkeypatch, small_target):
    """A forward of one engine inside that of another on the same target, which threads could do."""
    one, other = (Engine(small_target, torch_compile=True) for _ in range(2))
    own = PromptMetadata.attend

    def meanwhile(*given):
        other.step()
        return own(*given)

    one.add_request([5, 6, 7], PARAMS)
    other.add_request([5, 6, 7], PARAMS)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="engines in two threads need two targets"):
        patch.setattr(PromptMetadata, "attend", meanwhile)
        one.step()
    one.close(), other.close()
    assert answers(Engine(small_target, torch_compile=True)) == answers(Engine(small_target))


@pytest.mark.parametrize("part", ["BodyBegin", "BodyEnd"])
def test_ends_whose_program_computes_something_else_are_refused(interpreted_layers, monkeypatch, small_target, part):
    made = body_ends.compile_layer

    def wrong(layer, *given):
        run = made(layer, *given)
        factor = 1.001 if type(layer).__name__ == part else 1
        return lambda inputs: [one * factor if one.is_floating_point() else one for one in run(inputs)]

    monkeypatch.setattr(body_ends, "compile_layer", wrong)
    with pytest.raises(CompileError, match="around its layers, compiled, gives another result: off by 0.001"):
        Engine(small_target, torch_compile=True)


def written_by_its_own_code(engine: Engine, caplog, why: str) -> list[list[int]]:
    assert not engine._forward._compiled._bodies and why in caplog.text
    return answers(engine)


def test_a_body_that_reads_its_embeddings_at_the_end(interpreted_layers, monkeypatch, small_target, caplog):
    """Its layers run compiled all the same."""
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    target = with_a_loop_of_its_own(small_target, lambda _number, hidden, _kept: hidden)
    own = target.body.forward

    def forward(input_ids, **others):
        out = own(input_ids, **others)
        return BaseModelOutputWithPast(last_hidden_state=out.last_hidden_state + target.embed_tokens(input_ids))

    target.body.forward = forward
    plain = answers(Engine(target))
    engine = Engine(target, torch_compile=True)
    assert written_by_its_own_code(engine, caplog, "it does more than begin, call its layers and end") == plain


def test_a_rope_that_changes_with_the_length(interpreted_layers, monkeypatch, small_target, caplog):
    """It compares positions while it runs, and sets attributes: what a trace cannot follow it must not leave behind."""
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 10000.0}
    settings = {"rope_parameters": rope, "original_max_position_embeddings": 32, "max_position_embeddings": 64}
    target = family("phi3", small_target.tokenizer, settings)
    plain = answers(Engine(target))
    engine = Engine(target, torch_compile=True)
    assert written_by_its_own_code(engine, caplog, "stays its own code, which is slower") == plain
    held = [*vars(target.body.rotary_emb).values(), *target.body.rotary_emb.buffers()]
    assert not any(isinstance(one, FakeTensor) for one in held)


def with_a_loop_of_its_own(target: Target, between) -> Target:
    """The target with another loop over its layers: between(number, hidden, kept) -> hidden, behind every layer."""
    model = copy.deepcopy(target.model)
    body = model.model

    def forward(input_ids, position_ids=None, plan=None, **_others):
        hidden, kept = body.embed_tokens(input_ids), {}
        at = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        keywords = {"attention_mask": None, "position_ids": at, "position_embeddings": body.rotary_emb(hidden, at)}
        for number, layer in enumerate(body.layers):
            hidden = layer(hidden, **keywords, **({} if plan is None else {"plan": plan}))
            hidden = between(number, hidden, kept)
        return BaseModelOutputWithPast(last_hidden_state=body.norm(hidden))

    body.forward = forward
    return Target(model=model, tokenizer=target.tokenizer, name="its own loop", revision=None)


def test_a_body_that_changes_a_layers_output(interpreted_layers, small_target):
    """It gets that output, not what the layer was called with."""
    target = with_a_loop_of_its_own(small_target, lambda number, hidden, _kept: 2 * hidden if number == 1 else hidden)
    plain = answers(Engine(target))
    engine = Engine(target, torch_compile=True)
    assert engine._forward._compiled._handed_on == [True, False, True, False]
    assert answers(engine) == plain != answers(Engine(small_target))


def test_a_body_that_also_reads_a_layers_output_aside_is_refused(interpreted_layers, small_target):
    """Nothing tells beforehand that it is read: the logits of a whole forward do."""

    def skipping(number, hidden, kept):
        aside = kept.setdefault("aside", hidden)
        return hidden + aside if number == 3 else hidden

    target = with_a_loop_of_its_own(small_target, skipping)
    assert all(map(len, answers(Engine(target))))
    with pytest.raises(CompileError, match="logits differ .* leave --torch-compile out"):
        Engine(target, torch_compile=True)


def test_hooks_on_all_modules_fire(interpreted_layers, small_target):
    """Counters of operations install such."""
    engine, seen = Engine(small_target, torch_compile=True), {}
    engine.add_request([5, 6, 7], PARAMS)
    handle = register_module_forward_hook(lambda layer, _given, out: seen.update({layer: out}))
    try:
        engine.step()
    finally:
        handle.remove()
        engine.close()
    states = [seen[layer] for layer in small_target.layers]
    assert all(not torch.equal(one, behind) for one, behind in pairwise(states))


def test_a_program_that_computes_something_else_is_refused(monkeypatch, small_target):
    """A miscompiled layer, or one of another kind taken for this one, must never answer."""

    def program(exported, _inputs, _what):
        module = exported.module()
        return lambda inputs: [module(*inputs) * 1.001]

    monkeypatch.setattr(layer_program, "_program", program)
    with pytest.raises(CompileError, match="layer 0 .* another result"):
        Engine(small_target, torch_compile=True)


def test_layers_that_differ_in_secret_are_refused(interpreted_layers, small_target, monkeypatch):
    """A layer's activation that is a plain function is no setting that tells kinds apart: the comparison finds it."""
    monkeypatch.setattr(type(small_target.layers[1].mlp), "forward", tanh_in_one_layer(small_target.layers[1].mlp))
    with pytest.raises(CompileError, match="layer 1 .* another result"):
        Engine(small_target, torch_compile=True)


def tanh_in_one_layer(odd):
    def forward(self, x):
        return self.down_proj((torch.tanh if self is odd else torch.relu)(self.gate_proj(x)) * self.up_proj(x))

    return forward


def test_a_family_that_cannot_be_traced_is_refused(interpreted_layers, small_target):
    with pytest.raises(CompileError, match="GPT2Block .* leave --torch-compile out"):
        Engine(family("gpt2", small_target.tokenizer), torch_compile=True)


def test_what_is_missing_is_named(small_target, monkeypatch, tmp_path):
    """Without a C++ compiler, and on a GPU."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match="C\\+\\+ compiler.* no-such-compiler is not there"):
        Engine(small_target, torch_compile=True)
    with pytest.raises(CompileError, match="cuda:1.* --device cpu"):
        check_device(torch.device("cuda:1"))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_layers_that_read_the_same_input_are_one_product(tiny_target_directory, monkeypatch, quantization):
    """q, k, v and gate, up: four products a layer, with packed weights as the program's inputs."""
    operators = torch.ops.toolkit.packed_product.default, torch.ops.toolkit.blocked_product.default
    if quantization and not blocked_product.available():
        pytest.skip("needs AVX2 and a C++ compiler")
    target, graphs = load_target(tiny_target_directory, dtype="bfloat16", quantization=quantization), []
    target.pack()

    def program(exported, _inputs, _what):
        graphs.append(exported.graph)
        raise CompileError("enough")

    monkeypatch.setattr(layer_program, "_program", program)
    with pytest.raises(CompileError, match="enough"):
        Engine(target, torch_compile=True)
    products = [node for node in graphs[0].nodes if node.target in operators]
    assert len(products) == 4 and not any(node.target is torch.ops.aten.linear.default for node in graphs[0].nodes)


def machine_code(package: Path) -> bytes:
    with zipfile.ZipFile(package) as files:
        return b"".join(files.read(name) for name in files.namelist() if name.endswith(".so"))


@pytest.mark.slow
def test_compiled_layers_call_our_own_products(tiny_target_directory, monkeypatch, tmp_path):
    """Programs of bfloat16 layers for one token and several: the function of C is called, not the operator, and every
    layer's result is the layer's own (the engine compares them when it opens)."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    blocked_product._library.cache_clear()
    target = load_target(tiny_target_directory, dtype="bfloat16")
    target.pack()
    if not blocked_product.takes(target.embed_tokens.weight):
        pytest.skip("needs AVX2")
    assert all(map(len, answers(Engine(target, max_batch=3, torch_compile=True))))
    blocked_product._library.cache_clear()
    programs = [machine_code(one) for one in (tmp_path / "compiled").glob("*/layer.pt2")]
    # Beside the layers' two there are those of the body's ends, which multiply nothing.
    assert len(programs) == 6 and sum(blocked_product.OPERATOR.encode() in one for one in programs) == 2


def before_layer_1(engine: Engine) -> torch.Tensor:
    """What a hook is handed in a step that decodes, behind two that nobody hooks."""
    read: list[torch.Tensor] = []
    request = engine.add_request([5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True))
    engine.step()
    engine.step()
    handle = engine.target.layers[1].register_forward_pre_hook(lambda _, given: read.append(given[0].clone()))
    engine.step()
    handle.remove()
    engine.abort(request)
    return read[0]


def captured(engine: Engine, aux_layer_ids: tuple[int, ...]) -> torch.Tensor:
    """What entered these layers in a step of three rows."""
    capture = AuxCapture(engine.target, aux_layer_ids)
    requests = [engine.add_request(ids, SamplingParams(max_tokens=9, ignore_eos=True)) for ids in ([5, 6], [7], [8, 9])]
    engine.step()
    engine.step()
    capture.remove()
    for request in requests:
        engine.abort(request)
    return capture.take()


@pytest.mark.slow
def test_layers_run_together_unless_somebody_reads_between(tiny_target_directory, monkeypatch, tmp_path):
    """The body is one call, until a hook parts the layers; one that only keeps what enters them does not, and both are
    handed what they are without compiling. A hook on what stands around the layers has the body's own code call them.
    Attention of a prompt asks Python, with its own error, that of few nodes does not. What C++ is handed, and makes, is
    freed."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    target = load_target(tiny_target_directory, dtype="float32")
    layers = len(target.layers)
    aux = ((0, 2), (0, 2, layers))  # what leaves the last layer enters the norm behind it
    expected, entered = before_layer_1(Engine(target)), [captured(Engine(target), ids) for ids in aux]
    ran, bodies, asked, handles = [], [], [], []  # handles: how many came, and, below 0, went

    def noted(place, name, note):
        own = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given: note(*given) or own(*given))

    noted(layer_runner, "_handles", lambda tensors: handles.append(len(tensors)))
    noted(layer_runner, "_take", lambda _handle: handles.append(-1))
    noted(layer_runner.runner(), "toolkit_free_tensors", lambda _some, count: handles.append(-count))
    engine = Engine(target, torch_compile=True)
    noted(
        layer_runner.RunnableLayers,
        "__call__",
        lambda _self, first, _hidden, inputs, *_taps: ran.append((first, len(inputs))),
    )
    noted(layer_runner.RunnableBody, "__call__", lambda _self, ids, *_given: bodies.append(ids.numel()))
    noted(PromptMetadata, "attend", lambda _self, layer, *_given: asked.append(layer))
    noted(TreeMetadata, "attend", lambda _self, layer, *_given: asked.append(layer))
    compiled = engine._forward._compiled
    runs = {one for body in compiled._bodies.values() for one in body._held}
    held = sum(len(one._weights) for one in runs)
    assert len(runs) == 6 and runs > {*compiled._runs.values()}
    assert held > 2 * sum(len(weights) for weights in compiled._weights) > 0
    handles.clear()
    torch.testing.assert_close(before_layer_1(engine), expected, rtol=1e-4, atol=1e-4)
    assert (
        ran == [(0, 1), (1, layers - 1)] and len(bodies) >= 2 and sum(handles) == -len(bodies)
    )  # C++ makes its result
    assert asked == [*range(layers)] if cpu_attention._library() is not None else len(asked) > layers

    for by_its_own_code in (False, True):
        if by_its_own_code:
            target.final_norm.register_forward_hook(lambda *_given: None)
        for ids, wanted in zip(aux, entered, strict=True):
            ran.clear(), bodies.clear(), handles.clear()
            torch.testing.assert_close(captured(engine, ids), wanted, rtol=1e-4, atol=1e-4)
            made_by_cpp = (1 + len(ids)) * len(bodies) + 2 * len(ran)  # a body's result; what entered layers
            assert sum(handles) == -made_by_cpp
            assert (not bodies and set(ran) == {(0, layers)}) if by_its_own_code else (not ran and len(bodies) > 1)

    def fails(*_given):
        raise ValueError("no attention today")

    monkeypatch.setattr(PromptMetadata, "attend", fails)
    with pytest.raises(ValueError, match="no attention today"):
        engine.add_request([8, 9], PARAMS)
        engine.step()
    engine.close()
    del engine, compiled, runs
    gc.collect()
    assert sum(handles) == -made_by_cpp - held


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "eagle2-two-layers"])
def test_drafts_in_one_call(small_target, small_draft, shared_draft, monkeypatch, tmp_path, kind):
    """Inductor's own programs and the loop of C++, in fp32: one row, and rows that differ in what they have to read and
    in what they keep. Every tree is the one that the head's own code grows from the same nodes."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    layer_runner.runner.cache_clear()  # as a second copy: programs call the attention of the first
    if cpu_attention._library() is None:
        pytest.skip("attention is not C++'s here")
    draft = small_draft if kind == "eagle3" else shared_draft(kind)
    engine = Engine(small_target, draft, DraftShape(4, 3, 12), max_batch=3)
    drafter, seen = engine.drafter, []
    own = drafter.propose

    def both(requests):
        shapes = [drafter.shape_of(one) for one in requests]
        drafted = [one for one in shapes if one is not None]
        if not drafted:
            return own(requests)
        shape, unread = DraftShape.covering(drafted), drafter._unread(requests)
        limits = None if shape.is_chain else limits_of(shapes, shape)
        whole = compiled.drafts(unread, drafter.reader.caches[0], shape, limits)
        nodes = drafter._read_pending(unread, room_for(shape))
        tokens, parents, _, scores = draft_beams(nodes, shape, limits, drafter.to_target)
        real = scores > -torch.inf
        assert torch.equal(whole[0][real], tokens[real]) and torch.equal(whole[1][real], parents[real])
        torch.testing.assert_close(whole[2], scores, rtol=1e-4, atol=1e-4)
        seen.append((len(requests), shape.is_chain, limits is not None, max(unread.counts) > min(unread.counts)))
        return own(requests)

    with torch.inference_mode():
        compiled = CompiledHead(drafter._head, small_target.embed_tokens, drafter.to_target, torch.float32)
    monkeypatch.setattr(drafter, "propose", both)
    settings = SamplingParams(max_tokens=60, ignore_eos=True)
    engine.add_request(prompts(24)[0], settings, speculative=False)
    for shapes in (None, [DraftShape.parse(text) for text in ("4,1,5", "2,2,4", "4,3,12", "3,3,5", "4,1,5")]):
        engine.generate(prompts(24), settings, shape=shapes)
    engine.set_shape(DraftShape.chain(4))
    engine.generate(prompts(24), settings)
    engine.close()
    rows, chains, limited, ragged = zip(*seen, strict=True)
    assert set(rows) == {1, 2, 3} and all(len(set(one)) == 2 for one in (chains, limited, ragged))


@pytest.mark.slow
def test_windows_and_sinks_compiled(small_target, monkeypatch, tmp_path):
    """Inductor's own programs hand them to the attention in Python; a window lost on the way would write others."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    target = family("gpt_oss", small_target.tokenizer)
    plain = answers(Engine(target, max_batch=2))
    assert answers(Engine(target, max_batch=2, torch_compile=True)) == plain


@pytest.mark.slow
def test_compiled_answers_are_exact_and_the_next_start_compiles_nothing(
    tiny_target_directory, tiny_draft, monkeypatch, tmp_path
):
    """Inductor's own programs, in fp32, drafted and plain. The second start must do without the compiler."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    layer_runner.runner.cache_clear()  # an earlier test's lies elsewhere
    target = load_target(tiny_target_directory)
    plain = answers(Engine(target))
    target.pack()
    assert answers(Engine(target, tiny_draft, DraftShape.parse("4,4,16"), max_batch=3, torch_compile=True)) == plain
    monkeypatch.setenv("CXX", "no-such-compiler")
    layer_runner.runner.cache_clear()
    opened = load_engine(EngineConfig(target=str(tiny_target_directory), torch_compile=True, device="cpu"))
    assert isinstance(opened.engine._forward._compiled, CompiledLayers)
    assert answers(opened.engine) == plain
    made = list((tmp_path / "compiled").glob("*/layer.pt2"))
    assert len(made) == 12, "two each of the target's begin, layers and end, and of the head's fuse, pass and scores"


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_compiled_layers_over_integers_are_exact(tiny_target_directory, monkeypatch, tmp_path, quantization):
    """Inductor's own programs over weights of a byte and of half of one, in fp32, of prompts and of rows side by side:
    the answers of the same target uncompiled. A program that multiplied by other levels, scales or rows would write
    others."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    target = load_target(tiny_target_directory, quantization=quantization, dtype="float32")
    plain = answers(Engine(target))
    assert plain != answers(Engine(load_target(tiny_target_directory)))
    assert answers(Engine(target, max_batch=3, torch_compile=True)) == plain
    assert len(list((tmp_path / "compiled").glob("*/layer.pt2"))) == 6, "of begin, layers and end"
