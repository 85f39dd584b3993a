import copy
import json
import shutil

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertForMaskedLM, LlamaModel, T5Config

from toolkit.data.chat_template import decode, prompt_ids, response_mask
from toolkit.data.synthesis import user_turn_prefix_ids
from toolkit.errors import TargetError
from toolkit.targets import load
from toolkit.targets.chat_templates import choose_template, has_chat_template
from toolkit.targets.load import load_tokenizer, read_target


@pytest.fixture
def directory(tiny_target_directory, tmp_path):
    """A copy of the tiny target's directory to spoil."""
    return shutil.copytree(tiny_target_directory, tmp_path / "model")


def edit_config(directory, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_directory_loads_as_it_was_saved(directory, tiny_target, sample_ids):
    """The plainest way in."""
    target = read_target(directory)
    assert torch.equal(target.model(sample_ids).logits, tiny_target.model(sample_ids).logits)
    assert target.name == str(directory) and target.revision is None and target.stop_ids == tiny_target.stop_ids
    assert target.model.config._attn_implementation == "sdpa"
    assert load_tokenizer(directory)("the fox")["input_ids"] == tiny_target.tokenizer("the fox")["input_ids"]


@pytest.mark.parametrize(
    "stated, asked, expected",
    [("bfloat16", "auto", torch.bfloat16), ("bfloat16", "float32", torch.float32), ("float16", "auto", torch.float32)],
)
def test_dtype(directory, stated, asked, expected):
    """auto follows a bf16 config; float16 has no place on a CPU. Casting after loading would round the rotary table."""
    edit_config(directory, dtype=stated)
    target = read_target(directory, dtype=asked)
    assert target.dtype == expected and {p.dtype for p in target.model.parameters()} == {expected}
    assert target.body.rotary_emb.inv_freq.dtype == torch.float32


def test_a_name_that_is_no_target_fails_without_a_network():
    """Asking the hub for a mistyped path takes half a minute of retries before it fails."""
    with pytest.raises(TargetError, match="does not exist"):
        read_target("/nowhere/at/all")
    with pytest.raises(TargetError, match="the demo is called 'smollm2-135m'"):
        read_target("SmolLM2-135M")


def test_models_of_other_kinds_are_refused(tmp_path):
    """An encoder or a translator loads under AutoModelForCausalLM with an untrained head and talks at random."""
    small = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    BertForMaskedLM(BertConfig(**small)).save_pretrained(tmp_path / "bert")
    T5Config().save_pretrained(tmp_path / "t5")
    for name in ("bert", "t5"):
        with pytest.raises(TargetError, match=f"{name}.*decoder-only causal LM"):
            read_target(tmp_path / name)


def test_weights_without_an_output_head_are_refused(directory, tiny_target):
    """transformers only warns and fills the head with random numbers."""
    LlamaModel(copy.deepcopy(tiny_target.config)).save_pretrained(directory)
    with pytest.raises(TargetError, match="missing lm_head.weight"):
        read_target(directory)


def test_a_family_that_changes_its_logits_is_refused(directory, monkeypatch):
    """The engine reads logits off the body; an unknown last step would make its tokens differ from the model's own."""
    forward = load.Target.logits
    monkeypatch.setattr(load.Target, "logits", lambda self, hidden: forward(self, hidden) * 1.5)
    with pytest.raises(TargetError, match="changes its logits"):
        read_target(directory)


def test_a_wrong_value_is_one_line(directory):
    """Whatever transformers raises over it: a traceback names no file, and is no exit status of 2."""
    edit_config(directory, num_key_value_heads=0)
    with pytest.raises(TargetError, match="cannot be loaded") as caught:
        read_target(directory)
    assert "\n" not in str(caught.value)


def test_weights_that_are_not_finite_are_named(directory, tiny_target):
    """The check of the logits itself failed on them: "atol must be >= 0, got -nan"."""
    model, name = copy.deepcopy(tiny_target.model), "model.layers.3.mlp.up_proj.weight"
    model.get_parameter(name).data[-1, 0] = float("nan")
    model.save_pretrained(directory)
    with pytest.raises(TargetError, match=f"its weights have some: {name}"):
        read_target(directory)


def test_a_chosen_template_takes_the_place_of_the_targets_own(directory, tmp_path):
    """Base models have none. A template that was not taken would train a head on texts that are never served."""
    own, file = load_tokenizer(directory).chat_template, tmp_path / "own.jinja"
    file.write_text("{{ messages[0]['content'] }}!", encoding="utf-8-sig")  # the mark is no text
    chat, ids = [{"role": "user", "content": "Hi"}], load_tokenizer(directory)("Hi")["input_ids"]

    def rendered(chosen: str) -> str:
        tokenizer = load_tokenizer(directory, chat_template=chosen)
        assert has_chat_template(tokenizer) == (chosen != "none")
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    assert rendered(str(file)) == rendered(file.read_text("utf-8-sig")) == "Hi!"
    assert rendered("chatml") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert load_tokenizer(directory)(rendered("none"), add_special_tokens=False)["input_ids"] == ids
    assert load_tokenizer(directory).chat_template == own
    with pytest.raises(TargetError, match="chat_template is 'chatlm', and there is no such file"):
        read_target(directory, chat_template="chatlm")


def test_plain_texts_begin_as_completions_do(directory):
    """The server writes BOS before a text where the tokenizer does; the training's texts need it too."""
    tokenizer = load_tokenizer(directory)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, tokenizer.bos_token_id)]
    )
    choose_template(tokenizer, "none", "x")
    chat = [{"role": "user", "content": "the fox"}]
    assert prompt_ids(tokenizer, chat) == tokenizer("the fox")["input_ids"]
    assert user_turn_prefix_ids(tokenizer) == [tokenizer.bos_token_id]
    answered = [*chat, {"role": "assistant", "content": " runs"}]
    ids, mask = response_mask(tokenizer, answered)
    assert decode(tokenizer, [one for one, inside in zip(ids, mask, strict=True) if inside]) == " runs"
