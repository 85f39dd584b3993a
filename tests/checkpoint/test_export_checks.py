"""What is said or refused before a head is written for another engine, where nothing would tell of it any more."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from toolkit.checkpoint import export_checks
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.errors import ExportError
from toolkit.checkpoint.export_head import export_head as export
from toolkit.checkpoint.launch_lines import Shape
from toolkit.checkpoint.open_head import open_head
from toolkit.errors import TargetError

CHAIN = Shape(3, 1, 4)


def test_an_embedding_of_its_own(make_eagle3, publish, tiny_target, tiny_facts, tmp_path, monkeypatch):
    """It is not written: a head that was trained with another one would be exported in silence."""
    close = tiny_target.embed_tokens.weight.detach().to(torch.bfloat16)

    def opened(embedding, name):
        add = {"embed_tokens.weight": embedding}
        return open_head(
            publish("specforge", make_eagle3(), lambda _, tensors: tensors.update(add), name), target=tiny_facts.source
        )

    copied = opened(close, "copied")
    assert any(one.key == "embed_tokens.weight" and one.value == "left out" for one in copied.resolutions)
    _, notes = export(copied, "vllm", tmp_path / "a", tiny_facts, CHAIN)
    assert not any("embedding" in note for note in notes)
    with pytest.raises(ExportError, match="embedding that differs from that of .* %"):
        export(opened(torch.randn_like(close), "own"), "vllm", tmp_path / "b", tiny_facts, CHAIN)
    assert not (tmp_path / "b").exists()

    def absent(_facts):
        raise TargetError("no weights here")

    monkeypatch.setattr(export_checks, "target_embedding", absent)
    _, notes = export(copied, "vllm", tmp_path / "c", tiny_facts, CHAIN)
    assert any("could not be compared with the target's: no weights here" in note for note in notes)


def test_warnings_are_in_the_card(make_eagle3, publish, tiny_facts, tmp_path):
    """A rope that is not the target's, another target than the head's own, a key no rule knows: whoever gets the export
    has only the card."""

    def change(config, _tensors):
        config.update(rope_theta=5e5, logit_scale=0.5)

    directory = publish("specforge", make_eagle3(), change)
    (directory / "README.md").write_text("---\nbase_model: nobody/at-hand\n---\n")
    _, notes = export(open_head(directory, target=tiny_facts.source), "vllm", tmp_path / "o", tiny_facts, CHAIN)
    card = (tmp_path / "o" / "README.md").read_text()
    for says in ("rope_theta 500000.0 (the target's 10000.0)", "names nobody/at-hand as its target", "logit_scale"):
        assert any(says in note for note in notes) and says in card, says


def test_another_revision_of_the_target(tiny_draft, tiny_facts, tmp_path):
    stated = {"target": {"name": tiny_facts.name, "revision": "a"}}
    draft = DraftCheckpoint(tiny_draft.head, tiny_draft.token_map, stated)
    for revision, told in (("b", True), ("a", False)):
        facts = dataclasses.replace(tiny_facts, revision=revision)
        _, notes = export(draft, "vllm", tmp_path / revision, facts, CHAIN)
        assert any(f"@a as its target, but the revision given is {revision}" in note for note in notes) == told


def test_a_head_that_is_not_finite(make_eagle3, tiny_draft, tiny_facts, tmp_path):
    """NaN is not equal to itself: the reading back would blame the exporter."""
    head = make_eagle3()
    head.lm_head.weight.view(-1)[7] = float("nan")
    with pytest.raises(ExportError, match="lm_head.weight hold values that are not finite"):
        export(DraftCheckpoint(head, tiny_draft.token_map), "vllm", tmp_path / "o", tiny_facts, CHAIN)
