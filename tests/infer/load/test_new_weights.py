"""`LLM.update_weights` and `LLM.refresh_draft`: as a new LLM with these weights, or an error and no change.

The new weights are those of another random model of the same configuration, so that a weight that kept its old value,
in whatever format, would change tokens or drafts.
"""

from __future__ import annotations

import json
import shutil
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.conftest import build_draft, build_target
from toolkit import LLM, SamplingParams
from toolkit.checkpoint.draft_dir import save_draft
from toolkit.errors import TargetError
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.infer.engine import cpu_door
from toolkit.infer.engine import engine as engine_module
from toolkit.infer.engine.config import ConfigError
from toolkit.infer.request.params import DraftShapeError, EngineError
from toolkit.targets.target import Target
from toolkit.tokenmap.files import save_freq_list
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import WeightsError, load_tensors, save_tensors

PROMPTS = [list(range(5, 40)), [7, 8, 9]]  # one is longer than a page of the cache


@dataclass
class Folders:
    """Directories: a target before and after its training, an EAGLE-3 head before and after, an MTP head."""

    old: Path
    new: Path
    head: Path
    next_head: Path
    mtp: Path
    map: Path  # ids for the MTP head


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Folders:
    return folders_of("qwen2-tied", tmp_path_factory)


def folders_of(name: str, tmp_path_factory) -> Folders:
    """Qwen2 here ties its embedding to its output matrix, and has biases."""
    root = tmp_path_factory.mktemp(name)
    targets = [family(name, seed) for seed in (0, 5)]
    for name, target in zip(("old", "new"), targets, strict=True):
        target.model.save_pretrained(root / name)
        target.tokenizer.save_pretrained(root / name)
    for name, seed in (("head", 1), ("next_head", 2)):
        draft = build_draft(targets[0], seed=seed)
        ids = build_draft(targets[0], seed=1).token_map  # one map for both
        save_draft(root / name, draft.head.state_dict(), draft.head.config, ids, {})
    torch.manual_seed(3)
    mtp = MtpHead(MtpConfig.from_target_config(targets[0].config, vocab_size=targets[0].vocab_size))
    save_draft(root / "mtp", mtp.state_dict(), mtp.config, None, {})
    size = targets[0].vocab_size
    save_freq_list(root / "map.pt", TokenMap.from_ids(range(0, size, 3), size))
    return Folders(*(root / name for name in ("old", "new", "head", "next_head", "mtp", "map.pt")))


def family(name: str, seed: int) -> Target:
    plain = build_target(layers=4, seed=seed)
    if name == "llama":
        return plain
    sizes = plain.config.to_dict()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "max_position_embeddings", "bos_token_id", "eos_token_id", "initializer_range")
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**{key: sizes[key] for key in kept + more}, tie_word_embeddings=True))
    for weight in (one for path, one in model.named_parameters() if path.endswith("bias")):
        torch.nn.init.normal_(weight, std=0.2)
    return Target(model=model, tokenizer=plain.tokenizer, name=name)


def written(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """Per prompt its greedy tokens, and per round all drafts."""
    drafted: list[list[int]] = []
    propose = llm.engine.drafter.propose

    def recorded(*given):
        tree = propose(*given)
        drafted.append(tree.tokens.tolist())
        return tree

    llm.engine.drafter.propose = recorded
    try:
        answers = llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))
    finally:
        del llm.engine.drafter.propose
    return [one.token_ids for one in answers], drafted


def model_of(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


CASES = {
    "eagle3": {"draft": "head"},
    "mtp-with-a-map": {"draft": "mtp", "token_map": "map"},
    "blocks": {"draft": "mtp", "token_map": "map", "dtype": "bfloat16"},
    "int8-blocks": {"draft": "head", "quantization": "int8", "dtype": "bfloat16"},
}


def options(folders: Folders, case: str) -> dict:
    """The case with its names replaced by paths."""
    named = {key: getattr(folders, str(value), value) for key, value in CASES[case].items()}
    return {**named, "max_running_requests": 2}


def checked_update(folders: Folders, shape: dict, given, **more) -> None:
    """Answers and drafts before and after the update are those of LLMs that loaded the weights."""
    with LLM(folders.new, **more, **shape) as fresh:
        wanted = written(fresh), written(fresh)  # again: with prefixes and the rows of earlier answers
    with LLM(folders.old, **more, **shape) as llm:
        before = written(llm)
        assert before[0] != wanted[0][0], "the two models write the same; the test tests nothing"
        llm.update_weights(given)
        assert (written(llm), written(llm)) == wanted
        llm.engine.scheduler.memory.check_integrity()
        llm.update_weights(folders.old)
        assert written(llm) == before, "and back"


@pytest.mark.parametrize("case", CASES)
def test_an_update_is_as_a_new_start(folders, case):
    """From a directory: every format of weights, heads that hold something of the target's."""
    checked_update(folders, {"shape": "3,1,4"}, folders.new, **options(folders, case))


def test_an_update_from_a_state_dict(folders, tmp_path_factory):
    """As a trainer has it: its tied weights under one name, in another float; or untied ones."""
    for there, case in ((folders, "blocks"), (folders_of("llama", tmp_path_factory), "mtp-with-a-map")):
        state = model_of(there.new).state_dict()
        if there is folders:
            state = {name: value.double() for name, value in state.items() if "lm_head" not in name}
        checked_update(there, {"shape": "3,1,4"}, state, **options(there, case))


def test_weights_that_do_not_fit_change_nothing(folders):
    """All names at once, before the first is copied."""
    state = dict(model_of(folders.new).state_dict())
    norm, query = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
    with LLM(folders.old, folders.head, shape="3,1,4", prefix_cache=False) as llm:
        before = written(llm)
        bad = {name: value for name, value in state.items() if name != norm}
        bad |= {query: state[query][:-1], "model.extra": torch.ones(1)}
        with pytest.raises(WeightsError) as caught:
            llm.update_weights(bad)
        assert all(name in str(caught.value) for name in (f"missing: {norm}", "unexpected: model.extra", query))
        with pytest.raises(WeightsError, match="dtype of model.norm.weight torch.int8"):
            llm.update_weights(state | {norm: state[norm].to(torch.int8)})
        with pytest.raises(WeightsError, match="differ, but Qwen2ForCausalLM ties them"):
            llm.update_weights(state | {"lm_head.weight": state["lm_head.weight"] + 1})
        assert written(llm) == before


def test_a_checkpoint_of_another_model_is_refused(folders, tmp_path):
    """Weights of the same shapes under another rope would write nonsense; a cut file must not be half copied."""
    shutil.copytree(folders.new, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 123.0
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"pad_token_id": 3}))
    lacking = tmp_path / "lacking"
    shutil.copytree(folders.new, lacking)
    tensors = load_tensors(lacking / "model.safetensors")
    save_tensors(lacking / "model.safetensors", {name: one for name, one in tensors.items() if "norm" not in name})
    with LLM(folders.old, draft="none", prefix_cache=False) as llm:
        before = written(llm)
        with pytest.raises(TargetError, match=r"target's configuration: rope_parameters .*123"):
            llm.update_weights(tmp_path / "other")
        with pytest.raises(TargetError, match="missing model.layers.0.input_layernorm"):
            llm.update_weights(lacking)
        assert written(llm) == before


def test_requests_that_run_are_not_mixed_up(folders):
    """Their cache holds keys of the old weights; nothing is aborted on its own account."""
    with LLM(folders.old, folders.head, shape="3,1,4") as llm:
        request = llm.engine.add_request([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True))
        llm.engine.step()
        for replace in (lambda: llm.update_weights(folders.new), lambda: llm.refresh_draft(folders.next_head)):
            with pytest.raises(EngineError, match="requests that have not ended"):
                replace()
        while not request.finished:
            llm.engine.step()
        llm.update_weights(folders.new)
    with pytest.raises(EngineError, match="closed"):
        llm.update_weights(folders.new)


def test_an_update_keeps_every_address(folders, monkeypatch):
    """A CUDA graph reads its tensors by their addresses. As on a GPU, nothing is packed."""
    monkeypatch.setattr(cpu_door, "pack_linears", lambda *_, **__: 0)

    def addresses(llm: LLM) -> list[int]:
        head = llm.engine.drafter._head
        parts = [llm.target.model, head.module, *([head.output.lm_head] if head.output else [])]
        tensors = [one for part in parts for one in (*part.parameters(), *part.buffers())]
        return [one.data_ptr() for one in tensors]

    with LLM(folders.old, **options(folders, "mtp-with-a-map"), shape="3,1,4") as llm:
        before = addresses(llm)
        written(llm)
        llm.update_weights(folders.new)
        llm.refresh_draft(folders.mtp)
        written(llm)
        assert addresses(llm) == before


# -- the draft head ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["eagle3", "int8-blocks"])
def test_a_head_is_refreshed_in_place(folders, case):
    """From a directory and from a state dict: the drafts are those of a new LLM with this head."""
    more = options(folders, case) | {"shape": "3,3,8"}
    with LLM(folders.old, **{**more, "draft": folders.next_head}) as fresh:
        wanted = written(fresh), written(fresh)
    with LLM(folders.old, **more) as llm:
        engine, before = llm.engine, written(llm)
        assert before[1] != wanted[0][1], "the two heads draft the same; the test tests nothing"
        llm.refresh_draft(folders.next_head)
        assert (written(llm), written(llm)) == wanted and llm.engine is engine
        state = {name: one for name, one in load_tensors(folders.head / "model.safetensors").items()}
        llm.refresh_draft({name: one for name, one in state.items() if name not in ("d2t", "t2d")})
        assert written(llm) == before
        again = written(llm)
        with pytest.raises(WeightsError, match="missing: .*fc.weight"):
            llm.refresh_draft({name: one for name, one in state.items() if "fc" not in name})
        assert written(llm) == again


@pytest.mark.parametrize("first, then", [("head", "mtp"), ("none", "head"), ("mtp", "ngram")])
def test_another_kind_of_draft_replaces_the_drafter(folders, first, then):
    """The target stays, also with weights that it got in the meantime."""
    of = {name: getattr(folders, name, name) for name in (first, then)}
    with LLM(folders.new, of[then], shape="3,1,4", dtype="bfloat16") as fresh:
        wanted = written(fresh)
    with LLM(folders.old, of[first], dtype="bfloat16", shape=None if first == "none" else "3,1,4") as llm:
        written(llm)
        target = llm.target
        llm.update_weights(folders.new)
        llm.refresh_draft(of[then])
        assert llm.target is target
        found = written(llm)
        assert found[0] == wanted[0] and (found[1] == wanted[1] or first == "none")  # without a shape it is adaptive


def test_a_draft_that_does_not_fit_changes_nothing(folders, tmp_path):
    """The engine goes on with the draft that it has."""
    with LLM(folders.old, folders.mtp, token_map=folders.map, shape="3,20,8", prefix_cache=False) as llm:
        before = written(llm)
        with pytest.raises(ConfigError, match="`token_map` is"):
            llm.refresh_draft(folders.head)
        with pytest.raises(ValueError, match="nowhere"):
            llm.refresh_draft(tmp_path / "nowhere")
        assert written(llm) == before
    narrow = build_draft(build_target(layers=4), draft_vocab_size=8)
    save_draft(tmp_path / "narrow", narrow.head.state_dict(), narrow.head.config, narrow.token_map, {})
    with LLM(folders.old, folders.head, shape="3,20,8", prefix_cache=False) as llm:
        before = written(llm)
        with pytest.raises(DraftShapeError, match="draft vocabulary of 8"):
            llm.refresh_draft(tmp_path / "narrow")
        assert written(llm) == before
    with LLM(folders.old, draft="ngram") as llm, pytest.raises(ConfigError, match="n-gram lookup drafts here"):
        llm.refresh_draft({})


def test_an_engine_that_cannot_be_built_leaves_the_old_draft(folders, monkeypatch):
    """Short memory is no ValueError. What was built of the next engine, its cache and its hooks on the target, must be
    gone when the old one is built again."""
    own, caches = engine_module.RoundState, []

    def short_of_memory(rows, pool, device):  # after the cache and the drafter, whose hooks are on the target
        assert not any(cache() for cache in caches), "a part of the next engine is held"
        if not caches:
            caches.append(weakref.ref(pool))
            raise torch.OutOfMemoryError("no room for a round")
        return own(rows, pool, device)

    def hooks(target) -> int:
        return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in target.model.modules())

    with LLM(folders.old, folders.head, shape="3,1,4", prefix_cache=False) as llm:
        before, hooked = written(llm), hooks(llm.target)
        monkeypatch.setattr(engine_module, "RoundState", short_of_memory)
        with pytest.raises(torch.OutOfMemoryError, match="no room for a round"):
            llm.refresh_draft(folders.mtp)
        assert len(caches) == 1 and written(llm) == before and hooks(llm.target) == hooked > 0
