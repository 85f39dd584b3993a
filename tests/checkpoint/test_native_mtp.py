"""MTP modules in the targets' own checkpoints: read by every family's names, run as its own layers run, served."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoint.native_targets import (
    DELTA,
    FAMILIES,
    HYBRID,
    NAMES,
    SIZES,
    change_module,
    module_config,
    write_native_target,
)
from toolkit.bench.check import open_checked
from toolkit.checkpoint.draft_dir import load_draft, save_draft
from toolkit.checkpoint.native_mtp import find_native, load_native
from toolkit.errors import DraftDirError
from toolkit.infer.engine.config import ConfigError, EngineConfig
from toolkit.infer.load.load_engine import load_engine
from toolkit.infer.request.params import SamplingParams
from toolkit.targets.facts import target_facts
from toolkit.targets.load import read_target
from toolkit.tokenmap.files import save_freq_list
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import WeightsError, load_tensors, write_json

TYPICAL = ("deepseek", "mimo", "qwen3-next")
TOKENS = [(7 * place * place + 3 * place) % 300 + 5 for place in range(12)]


@pytest.fixture(scope="module")
def native_target(tiny_target, tmp_path_factory):
    """Writes a family's target, once."""
    written = {}

    def write(family: str, agreeing: bool = False):
        if (family, agreeing) not in written:
            directory = tmp_path_factory.mktemp("native") / family
            written[family, agreeing] = write_native_target(directory, family, tiny_target.tokenizer, agreeing=agreeing)
        return written[family, agreeing]

    return write


@pytest.fixture
def changed(tiny_target, tmp_path):
    """A target of its own, whose module can be changed."""

    def write(family: str, change=None, **options):
        directory = write_native_target(tmp_path / family, family, tiny_target.tokenizer, **options)
        if change is not None:
            change_module(directory, change)
        return directory

    return write


def read(directory):
    facts = target_facts(directory)
    target = read_target(directory)
    return target, load_native(target, facts, find_native(facts))


def dense(q, k, v):
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


def published_module(family: str, tensors: dict[str, torch.Tensor], embeds, hidden):
    """The module's output by transformers' own model of one layer, with eager attention, and by the published order of
    its parts: norms, concatenation, projection, layer, last norm."""
    enorm, hnorm, eh_proj, norm, layer = NAMES[family]
    own = (enorm, hnorm, eh_proj, norm)
    model = AutoModelForCausalLM.from_config(module_config(family), attn_implementation="eager")
    body = model.get_decoder()
    fill = {name: value for name, value in model.state_dict().items() if ".layers." not in name}
    block = {
        f"model.layers.0.{name.removeprefix(f'{layer}.')}": value
        for name, value in tensors.items()
        if name.startswith(f"{layer}.")
        and name.removesuffix(".weight") not in own
        and not name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
    }
    model = type(model).from_pretrained(None, config=model.config, state_dict={**fill, **block})
    body = model.get_decoder()

    def normed(name, x):
        if name is None:
            return x
        one = type(body.norm)(x.shape[-1], eps=model.config.rms_norm_eps)
        one.weight.data.copy_(tensors[f"{name}.weight"])
        return one(x)

    embeds = embeds.clone()
    if family in ("mimo", "ernie"):
        embeds[0] = 0
    pair = (normed(enorm, embeds), normed(hnorm, hidden))
    x = torch.cat(pair[::-1] if family == "mimo" else pair, dim=-1) @ tensors[f"{eh_proj}.weight"].T
    at = torch.arange(len(x))[None]
    mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
    out = body.layers[0](
        x[None], attention_mask=mask, position_ids=at, position_embeddings=body.rotary_emb(x[None], at)
    )
    return normed(norm, (out if isinstance(out, torch.Tensor) else out[0])[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_module_computes_what_its_family_does(family, native_target):
    """A part in another place, a norm with another offset or a renamed expert changes every draft, and no answer."""
    directory = native_target(family)
    target, draft = read(directory)
    tensors = {}
    change_module(directory, lambda found: tensors.update(found) or found)
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        hidden = target.body(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        embeds = target.embed_tokens(ids[0, 1:])
        wanted = published_module(family, tensors, embeds, hidden)
        assert draft.head.config.features.after_norm == (family != "mimo")
        found = draft.head(embeds, hidden, torch.arange(len(embeds)), dense, len(embeds))
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in TYPICAL else pytest.mark.slow) for one in FAMILIES]
)
def test_answers_are_those_of_plain_decoding(family, native_target):
    """Chains by recursion, trees, a token map on the output's rows; one request and a ragged sixteen, in float32."""
    directory = str(native_target(family, agreeing=True))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 390, (2 + n,), generator=generator).tolist() for n in range(16)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = load_engine(EngineConfig(target=directory, draft="none"))
    assert plain.draft is None and plain.shape is None
    wanted = [one.output_ids for one in plain.engine.generate(prompts, params)]
    for draft, shape in ((None, "mtp-4"), ("native", "2,1,3" if family in HYBRID else "3,3,10")):
        loaded = load_engine(EngineConfig(target=directory, draft=draft, shape=shape))
        assert loaded.draft.kind == "mtp"
        for some in (prompts[:1], prompts):
            done = loaded.engine.generate(some, params)
            assert [one.output_ids for one in done] == wanted[: len(some)]
        assert sum(event.accepted for one in done for event in one.events) > len(done), "hardly a draft was right"
        loaded.engine.check_integrity()
        loaded.engine.close()
    assert load_engine(EngineConfig(target=directory)).shape_name == "adaptive up to chain 3 (3,1,4)"


def test_a_module_survives_a_draft_directory(native_target, tmp_path):
    """Its layer is rebuilt from config.json alone, and every tensor is there again."""
    draft = read(native_target("deepseek"))[1]
    save_draft(tmp_path, draft.head.state_dict(), draft.head.config, None, draft.meta)
    again = load_draft(tmp_path)
    assert again.head.config == draft.head.config
    state, other = draft.head.state_dict(), again.head.state_dict()
    assert all(torch.equal(state[name], other[name]) for name in state) and state.keys() == other.keys()
    # Rounded, the bias of the experts' scores would choose other experts.
    layer = again.head.cast("cpu", torch.bfloat16).layers[0]
    assert (layer.eh_proj.weight.dtype, layer.mlp.gate.e_score_correction_bias.dtype) == (torch.bfloat16, torch.float32)


def without(*endings):
    return lambda tensors: {name: value for name, value in tensors.items() if not name.endswith(endings)}


@pytest.mark.parametrize(
    ("family", "change", "error", "said"),
    [
        ("mimo", without("q_proj.bias"), WeightsError, "missing: model.layers.0.self_attn.q_proj.bias"),
        ("mimo", lambda t: {**t, "model.mtp_layers.0.input_proj.weight_scale": torch.ones(1)}, DraftDirError,
         "quantised"),
        ("deepseek", lambda t: {name: v + 1 if "embed_tokens" in name else v for name, v in t.items()}, DraftDirError,
         "not the target's"),
    ],
)  # fmt: skip
def test_modules_that_do_not_fit_are_refused(family, change, error, said, changed):
    """With the names and the way out; a part that is left random would only be seen in a low accept_length."""
    directory = changed(family, change)
    with pytest.raises(error, match=said):
        read(directory)


def test_a_target_without_a_module(tiny_target_directory, caplog):
    """Asked for by name it is an error; without `draft`, decoding is plain, and options of drafts are errors."""
    target = str(tiny_target_directory)
    with pytest.raises(ConfigError, match="`draft` is native, but .* has no MTP module"):
        load_engine(EngineConfig(target=target, draft="native"))
    assert load_engine(EngineConfig(target=target)).draft is None


def test_a_broken_module_does_not_keep_the_target_from_serving(changed, caplog):
    """Nobody asked for it: it is named, and decoding is plain."""
    directory = changed("mimo", without("q_proj.bias"))
    loaded = load_engine(EngineConfig(target=str(directory)))
    assert loaded.draft is None and "q_proj.bias. Nothing is drafted" in caplog.text
    with pytest.raises(WeightsError, match="q_proj.bias"):
        load_engine(EngineConfig(target=str(directory), draft="native"))


def test_a_token_map_on_the_output_rows(native_target, tmp_path):
    """Only its ids are drafted, and the answers stay. `toolkit check` looks at the head with this map."""
    directory, params = str(native_target("mimo", agreeing=True)), SamplingParams(max_tokens=12, ignore_eos=True)
    save_freq_list(tmp_path / "freq.pt", TokenMap.from_ids(range(0, 392, 2), 393))
    prompts = [[(7 * place + n) % 380 + 5 for place in range(4 + n)] for n in range(4)]
    wanted = [one.output_ids for one in load_engine(EngineConfig(target=directory)).engine.generate(prompts, params)]
    loaded = load_engine(EngineConfig(target=directory, token_map=tmp_path / "freq.pt", shape="3,1,4"))
    assert loaded.draft.token_map.size < 393
    checked = open_checked(EngineConfig(target=directory, draft="native", token_map=tmp_path / "freq.pt"))
    assert checked.draft.token_map.sha256 == loaded.draft.token_map.sha256
    assert [one.output_ids for one in loaded.engine.generate(prompts, params)] == wanted


@pytest.mark.skipif("qwen3.5" not in FAMILIES, reason="needs transformers 5.23 or later")
def test_qwen_3_5_as_it_is_published(native_target, tiny_target, tmp_path):
    """A multimodal checkpoint: the text model under model.language_model, its settings in text_config, mtp.* beside."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    kind = {**SIZES, **DELTA, "vocab_size": len(tiny_target.tokenizer), "mtp_num_hidden_layers": 1}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=kind, vision_config=vision))
    model.save_pretrained(tmp_path)
    tiny_target.tokenizer.save_pretrained(tmp_path)
    module = "model-00003-of-00003.safetensors"
    shutil.copyfile(native_target("qwen3.5") / module, tmp_path / module)
    names = {name: file for file in ("model.safetensors", module) for name in load_tensors(tmp_path / file)}
    write_json(tmp_path / "model.safetensors.index.json", {"metadata": {}, "weight_map": names})
    prompts, params = [[5, 6, 7, 8], [9, 10]], SamplingParams(max_tokens=8, ignore_eos=True)
    plain = load_engine(EngineConfig(target=str(tmp_path), draft="none")).engine.generate(prompts, params)
    loaded = load_engine(EngineConfig(target=str(tmp_path), draft="native", shape="mtp-4"))
    done = loaded.engine.generate(prompts, params)
    assert [one.output_ids for one in done] == [one.output_ids for one in plain]
    assert loaded.draft.meta["native"]["family"] == "Qwen3.5"
