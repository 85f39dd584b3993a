"""Heads to a hub and back, against a stand-in on this machine: what arrives, which revision, and what offline means."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from toolkit.checkpoint.draft_dir import load_draft
from toolkit.checkpoint.open_head import open_head
from toolkit.cli import main
from toolkit.errors import DraftDirError, TargetError
from toolkit.targets.facts import target_facts
from toolkit.targets.load import read_target

_SPEC = importlib.util.spec_from_file_location("local_hub", Path(__file__).with_name("local_hub.py"))
local_hub = sys.modules["local_hub"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(local_hub)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """As HF_ENDPOINT, HF_HUB_CACHE and HF_TOKEN would set it, for this process and an empty cache."""
    server = local_hub.LocalHub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    url = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + url[url.index("/{repo_id}") :])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", local_hub.TOKEN)
    yield server
    server.shutdown()
    server.server_close()


def export(draft, out, *words: str, to: str = "toolkit") -> int:
    return main(["export", "--draft", str(draft), "--to", to, "--out", str(out), *words])


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_pushed_and_fetched_by_revision(hub, tiny_draft, tiny_draft_directory, tmp_path, capsys, monkeypatch):
    """Every file arrives as it is; a later commit does not change what an earlier revision is; offline is the cache."""
    assert export(tiny_draft_directory, tmp_path / "one", "--push-to-hub", "org/head", "--private") == 0
    said, repository = capsys.readouterr().out, hub.repositories["org/head"]
    (first,) = repository.commits
    assert f"on the hub: org/head@{first}" in said and repository.private
    assert repository.commits[first] == files_of(tmp_path / "one")
    assert "toolkit serve --draft org/head --target MODEL\n" in repository.commits[first]["README.md"].decode()
    changed = load_draft(tiny_draft_directory).head.state_dict()["fc.weight"] + 1
    second = repository.commit(_with_fc(repository.commits[first], changed, tmp_path))
    assert torch.equal(open_head(f"org/head@{first}").head.fc.weight, tiny_draft.head.fc.weight)
    assert torch.equal(open_head("org/head").head.fc.weight, changed)
    with pytest.raises(DraftDirError, match="it could not be fetched from the hub"):
        open_head("org/head@0000000000000000000000000000000000000000")
    asked = len(hub.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert torch.equal(open_head(f"org/head@{first}").head.fc.weight, tiny_draft.head.fc.weight)
    assert torch.equal(open_head(f"org/head@{second}").head.fc.weight, changed)
    with pytest.raises(DraftDirError, match="it could not be fetched from the hub"):
        open_head("org/unseen")
    assert len(hub.asked) == asked, "something was sent in offline mode"


def _with_fc(files: dict[str, bytes], weight: torch.Tensor, tmp_path: Path) -> dict[str, bytes]:
    from toolkit.weights import load_tensors, save_tensors

    path = tmp_path / "changed.safetensors"
    path.write_bytes(files["model.safetensors"])
    save_tensors(path, {**load_tensors(path), "fc.weight": weight})
    return {"model.safetensors": path.read_bytes()}


def test_a_targets_revision(hub, tiny_target, tiny_target_directory):
    """target.revision loads that commit and no other; without one the commit that main is now is kept, since main moves
    and a draft directory must say which weights it was trained for."""
    repository = hub.repositories["org/target"] = local_hub.Repository()
    first = repository.commit(files_of(Path(tiny_target_directory)))
    config = json.loads((Path(tiny_target_directory) / "config.json").read_text())
    second = repository.commit({"config.json": json.dumps({**config, "rms_norm_eps": 0.5}).encode()})
    old, new = read_target("org/target", revision=first), read_target("org/target")
    assert (old.revision, new.revision) == (first, second)
    assert old.config.rms_norm_eps == tiny_target.config.rms_norm_eps and new.config.rms_norm_eps == 0.5
    with pytest.raises(TargetError, match="the model configuration of target .* cannot be loaded"):
        read_target("org/target", revision="v9")
    named = target_facts(f"org/target@{first}")
    assert (named.name, named.source, named.revision) == ("org/target", "org/target", first)
    with pytest.raises(TargetError, match="give only one of them"):
        target_facts(f"org/target@{first}", second)
    facts = target_facts("org/target")
    repository.commit({"config.json": json.dumps({**config, "rms_norm_eps": 0.25}).encode()})
    assert facts.revision == second and read_target("org/target", revision=facts.revision).revision == second


def test_an_import_from_a_hub_says_which_commits(hub, tiny_draft_directory, tiny_target_directory, tmp_path):
    """Both repositories move on; the head that was read, and the target it was read with, are one commit each."""
    assert export(tiny_draft_directory, tmp_path / "o", to="vllm") == 0
    target, head = (local_hub.Repository() for _ in range(2))
    hub.repositories.update({"org/target": target, "org/head": head})
    old = target.commit(files_of(Path(tiny_target_directory)))
    new = target.commit({"notes.txt": b"moved on"})
    head.commit({"notes.txt": b"empty", "modeling.py": b"raise SystemExit"})
    of_head = head.commit({**files_of(tmp_path / "o"), "README.md": b"---\nbase_model: org/target\n---\n"})
    meta = open_head("org/head").meta
    assert not any("modeling.py" in path for _, path in hub.asked), "code is never run, so never fetched"
    assert meta["source"] == {"name": "org/head", "revision": of_head}
    assert meta["target"] == {"name": "org/target", "revision": new}
    assert main(["inspect", "org/head", "--target", f"org/target@{old}"]) == 0
    typed = ["export", "--draft", "org/head", "--to", "toolkit", "--out", str(tmp_path / "own")]
    assert main([*typed, "--target", f"org/target@{old}"]) == 0
    stored = json.loads((tmp_path / "own" / "config.json").read_text())["toolkit"]
    assert stored["source"]["revision"] == of_head and stored["target"] == {"name": "org/target", "revision": old}


def test_a_whole_model_is_not_fetched_as_a_head(hub, tiny_target_directory):
    """Its config is enough to say so; its weights may be a terabyte."""
    hub.repositories["org/model"] = local_hub.Repository()
    hub.repositories["org/model"].commit(files_of(Path(tiny_target_directory)))
    with pytest.raises(DraftDirError, match="use it as `target`"):
        open_head("org/model")
    assert not any("safetensors" in path for _, path in hub.asked)
