"""Reports of heads and targets: what they are, what they need, what looks wrong."""

from __future__ import annotations

import pytest

from tests.conftest import build_target
from toolkit.checkpoint.inspect_path import inspect_head, inspect_path, inspect_target
from toolkit.weights import write_json


def rows(report) -> dict[str, str]:
    return dict(report.rows)


def test_a_foreign_head(make_eagle3, publish, tiny_target_directory):
    """All that one wants to know before serving it."""
    directory = publish("specforge", make_eagle3(fc_norm=True))
    report = inspect_head(directory, str(tiny_target_directory))
    said = rows(report)
    assert "in the form of SpecForge or SGLang" in report.title and said["files"] == "config.json, model.safetensors"
    assert said["aux_layer_ids"].startswith("[2, 3, 4]") and said["variants"] == "fc_norm"
    assert said["draft vocabulary"].startswith("160 of") and "it names none" in said["needs"]
    assert any("as SGLang, SpecForge and ModelOpt mean it" in line for line in report.read)
    assert report.wrong == [] and report.usable and report.text().endswith("nothing looks wrong")
    assert "but it was not compared with a target" in inspect_head(directory).text()


def edited(**changes):
    return lambda config, _tensors: config.update(changes)


@pytest.mark.parametrize(
    ("change", "says", "usable"),
    [
        (edited(rope_theta=500000.0), "rope_theta 500000.0 (the target's 10000.0)", True),
        (edited(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}), "a target of 7 layers needs", False),
        (lambda _config, tensors: tensors.pop("lm_head.weight"), "missing: lm_head.weight", False),
        (
            lambda _config, tensors: tensors["fc.weight"].view(-1)[:1].fill_(float("nan")),
            "fc.weight hold values",
            False,
        ),
    ],
)
def test_what_looks_wrong(make_eagle3, publish, tiny_target_directory, tiny_target, change, says, usable):
    """The report has the cause, and tells what only costs acceptance from what cannot be used."""
    assert tiny_target.vocab_size == 393
    report = inspect_head(publish("specforge", make_eagle3(), change), str(tiny_target_directory))
    assert any(says in line for line in report.wrong) and report.usable == usable, report.text()


def test_native_mtp_layers(tmp_path):
    """Found by their tensors, wherever a family keeps them, from its config and its index of weights alone; decoder
    layers must not be taken for them, and nothing asks on the terminal whether to run a repository's code."""
    keys = {"num_hidden_layers": 48, "auto_map": {"AutoConfig": "configuration_mimo.C"}}
    names = [f"model.mtp.layers.{number}.eh_proj.weight" for number in range(3)]
    sizes = {"hidden_size": 64, "vocab_size": 400, "model_type": "mimo_v2", "architectures": ["ForCausalLM"]}
    write_json(tmp_path / "config.json", {**sizes, **keys})
    decoder = [f"model.layers.{number}.input_layernorm.weight" for number in range(keys["num_hidden_layers"])]
    names = ["model.embed_tokens.weight", *decoder, *names]
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": dict.fromkeys(names, "model-1.safetensors")})
    report = inspect_target(str(tmp_path))
    assert rows(report)["native MTP layers"] == "3: model.mtp.layers.0, model.mtp.layers.1, model.mtp.layers.2"
    assert any("the code of its own repository, which is not run" in line for line in report.wrong)
    assert not report.usable and rows(report)["native MTP is used"].startswith("no: ")
    (tmp_path / "model.safetensors.index.json").unlink()
    said = rows(inspect_target(str(tmp_path)))["native MTP layers"]
    assert said.startswith("unknown, since its weights cannot be searched")


def test_a_target_of_two_layers_is_no_head(tmp_path):
    """Many heads have a config of so many layers, so the weights decide."""
    target = build_target(layers=2)
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    assert inspect_path(str(tmp_path)).title.endswith("target, LlamaForCausalLM")
