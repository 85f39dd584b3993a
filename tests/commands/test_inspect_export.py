"""`toolkit inspect` and `toolkit export` as they are typed, and what they write served again."""

from __future__ import annotations

import pytest

from toolkit.cli import main
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.load.load_engine import load_engine
from toolkit.infer.request.params import SamplingParams


@pytest.mark.parametrize("to", ["sglang", "vllm", "speculators", "eagle", "gguf", "toolkit"])
def test_export_inspect_and_serve_again(tiny_draft_directory, tiny_target_directory, tmp_path, capsys, to):
    """The whole way: our head -> their format -> the report -> our engine, whose drafts are the same as before."""
    out = tmp_path / "out"
    assert main(["export", "--draft", str(tiny_draft_directory), "--to", to, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"{out}: eagle3 head for {to}, read back and equal" in said and str(out) in said.split("serve it:")[1]
    assert main(["inspect", str(out), "--target", str(tiny_target_directory)]) == 0
    assert "nothing looks wrong" in capsys.readouterr().out
    assert drafts(out, tiny_target_directory) == drafts(tiny_draft_directory, None)


def drafts(directory, target) -> list:
    """Tokens and accepted counts of a few answers."""
    target = None if target is None else str(target)
    opened = load_engine(EngineConfig(draft=directory, target=target, shape="3,2,6", dtype="float32"))
    done = opened.engine.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=16, ignore_eos=True))
    opened.engine.close()
    return [(one.output_ids, [event.accepted for event in one.events]) for one in done]
